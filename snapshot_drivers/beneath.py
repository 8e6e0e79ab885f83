"""The one module that opens what a container controls.

A path is the container's until ``openat2`` says otherwise: every step goes one component down from a held descriptor,
follows no symbolic link, no magic link, and crosses no mount. A file is looked at through ``O_PATH`` first and opened
for reading only if it is regular, so no fifo, device or socket is ever opened. ``O_NONBLOCK`` keeps a lease from
stopping us.

Source: openat2(2), proc_pid_fd(5), fcntl(2) "Leases". Every function raises ``OSError``.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_SYS_OPENAT2: Final = 437
_RESOLVE_NO_XDEV: Final = 0x01
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_NO_SYMLINKS: Final = 0x04
_RESOLVE_BENEATH: Final = 0x08
_STRICT: Final = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_XDEV
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LOOK: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOATIME | os.O_CLOEXEC
_KEPT_DESCRIPTORS: Final = 64
_STRIDE: Final = 256


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_HOW_SIZE = ctypes.sizeof(_OpenHow)


def _openat2(directory_fd: int, name: bytes, flags: int, resolve: int) -> int:
    how = _OpenHow(flags, 0, resolve)
    while True:
        descriptor = int(_syscall(_SYS_OPENAT2, directory_fd, name, ctypes.byref(how), _HOW_SIZE))
        if descriptor >= 0:
            return descriptor
        code = ctypes.get_errno()
        if code not in (4, 11):  # EINTR; EAGAIN: a rename raced the walk and the kernel asks for another try
            raise OSError(code, os.strerror(code), os.fsdecode(name))


def check_name(name: bytes) -> None:
    """Raises ``ValueError`` unless ``name`` is one path component."""
    if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
        raise ValueError(f"not a single path component: {name!r}")


def open_directory(directory_fd: int, name: bytes) -> int:
    """Descriptor of the directory ``name`` right below ``directory_fd``; a link or a mount there is an error."""
    check_name(name)
    return _openat2(directory_fd, name, _DIRECTORY, _STRICT)


def open_below(top: Path, path: Path) -> int:
    """Descriptor of the directory ``path``, which must lie below the trusted directory ``top``."""
    relative = os.path.relpath(path, top)
    if relative == ".." or relative.startswith("../"):
        raise OSError(18, "does not lie below the engine's data root", str(path))
    descriptor = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Engines may keep their layers on a file system of their own, so mounts are crossed here, links never.
        return _openat2(descriptor, os.fsencode(relative), _DIRECTORY, _STRICT & ~_RESOLVE_NO_XDEV)
    finally:
        os.close(descriptor)


def look(directory_fd: int, name: bytes) -> int:
    """An ``O_PATH`` descriptor of whatever ``name`` is; never opens the object itself."""
    check_name(name)
    return _openat2(directory_fd, name, _LOOK, _STRICT)


def open_regular(looked_fd: int) -> int:
    """Opens for reading what an ``O_PATH`` descriptor shows, if and only if it is a regular file.

    Raises: ``BlockingIOError`` while somebody holds a lease on it.
    """
    if not stat.S_ISREG(os.fstat(looked_fd).st_mode):
        raise OSError(22, "not a regular file")
    return os.open(f"/proc/self/fd/{looked_fd}", _READ)


def read(file: int, size: int, position: int) -> bytes:
    """``size`` bytes from a position, fewer only where the file ends: one call may answer less than there is."""
    data = os.pread(file, size, position)
    while 0 < len(data) < size and (more := os.pread(file, size - len(data), position + len(data))):
        data += more
    return data


def write(file: int, data: bytes | memoryview, position: int) -> None:
    """All of ``data`` stands at a position: one call may write less than it was given."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, position)
        view = view[written:]
        position += written


class TooManyEntries(Exception):
    """A directory holds more entries than the caller wants to hear of."""


def list_directory(directory_fd: int, most: int | None = None) -> list[tuple[bytes, os.stat_result]]:
    """Names and attributes of all entries, sorted by name; entries that vanish meanwhile are left out.

    Raises: TooManyEntries: more than ``most``.
    """
    found: list[tuple[bytes, os.stat_result]] = []
    with os.scandir(directory_fd) as entries:
        for entry in entries:
            if most is not None and len(found) >= most:
                raise TooManyEntries
            name = os.fsencode(entry.name)
            with suppress(FileNotFoundError):
                found.append((name, os.stat(name, dir_fd=directory_fd, follow_symlinks=False)))
    found.sort(key=lambda item: item[0])
    return found


def read_xattrs(descriptor: int, *, looked: bool) -> tuple[tuple[str, bytes], ...]:
    """All extended attributes, sorted; ``looked``: the descriptor is an ``O_PATH`` one."""
    handle: int | str = f"/proc/self/fd/{descriptor}" if looked else descriptor
    try:
        names = os.listxattr(handle)
    except OSError as error:
        if error.errno == 95:  # EOPNOTSUPP: the file system has none
            return ()
        raise
    return tuple((name, os.getxattr(handle, name)) for name in sorted(names))


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """The descriptor is closed when the block ends."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Descent:
    """A position in a tree that moves one component at a time, at any depth, with a bounded number of descriptors.

    The last ``_KEPT_DESCRIPTORS`` stay open, and one level in ``_STRIDE`` of those above. Going up past the kept ones
    walks down again from the nearest, and accepts only the directories that were left (device and inode), so one that
    somebody moves meanwhile is an error and never another directory. Not by ``..``: below a mount of a part of a file
    system each such step costs the kernel the whole depth.
    """

    def __init__(self, root_fd: int) -> None:
        """Stands at ``root_fd``, which stays the caller's."""
        self._root_fd = root_fd
        self._below: list[int | None] = []
        self._names: list[tuple[bytes, tuple[int, int]]] = []

    @property
    def fd(self) -> int:
        """Descriptor of the present directory; valid until the next move."""
        return self._descriptor(len(self._below) - 1)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return len(self._below)

    def down(self, name: bytes) -> None:
        """Enter the directory ``name``."""
        descriptor = open_directory(self.fd, name)
        self._below.append(descriptor)
        self._names.append((name, _identity(descriptor)))
        self._let_go(self.depth - 1 - _KEPT_DESCRIPTORS)

    def up(self) -> None:
        """Return to the parent directory."""
        child = self._below.pop()
        assert child is not None
        os.close(child)
        self._names.pop()
        if self._below and self._below[-1] is None:
            self._come_back()

    def _come_back(self) -> None:
        """Open the present directory again, and those above it that are kept."""
        last = self.depth - 1
        level = next((index for index in range(last, -1, -1) if self._below[index] is not None), -1)
        while level < last:
            name, identity = self._names[level + 1]
            try:
                found = open_directory(self._descriptor(level), name)
            except OSError as error:
                raise OSError(116, f"a directory was moved while its tree was walked: {error.strerror}") from error
            level += 1
            self._below[level] = found
            if _identity(found) != identity:
                raise OSError(116, "a directory was moved while its tree was walked")
            self._let_go(level - _KEPT_DESCRIPTORS)

    def _descriptor(self, level: int) -> int:
        descriptor = self._below[level] if level >= 0 else self._root_fd
        assert descriptor is not None
        return descriptor

    def _let_go(self, level: int) -> None:
        if level > 0 and level % _STRIDE and (old := self._below[level]) is not None:
            os.close(old)
            self._below[level] = None

    def close(self) -> None:
        """Give back all descriptors but the root's. Repeatable."""
        while self._below:
            descriptor = self._below.pop()
            if descriptor is not None:
                os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
