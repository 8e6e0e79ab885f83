"""Whether a tracker hears of each kind of change that a container can make, found out by making each.

Through an overlay of our own whose upper directory stands on the file system in question: kernels differ in what they
report of the files below an overlay. The overlay is mounted nowhere, so nobody else sees it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from snapshot_drivers.inode_flags import read_flags, write_flags
from snapshot_drivers.overlay.tracker import Tracker, TrackerLost

_APPEND: Final = 0x20
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_SET_STRING, _CREATE, _CLOEXEC = 1, 6, 1
_KEEP_SIZE_PUNCH_HOLE: Final = 3
_libc = ctypes.CDLL(None, use_errno=True)


def prove(tracker: Tracker, place: Path) -> None:
    """Every kind of change is heard of. ``place``: an empty directory on the tracked file system, ours alone.

    Raises: TrackerLost: one is not, or it cannot be tried here. OSError.
    """
    upper = place / "upper"
    for name in ("lower", "upper", "work"):
        (place / name).mkdir()
    (place / "lower" / "below").write_bytes(b"1")
    root = _overlay(place)
    try:
        with closing(_Target(root, tracker)) as target:
            for kind, change in _KINDS.items():
                tracker.changes()
                name = change(target)
                reported = tracker.changes()
                inode = (upper / name).lstat().st_ino if os.path.lexists(upper / name) else -1
                names = [name for _, name in reported.names([upper.stat().st_ino])]
                if inode not in reported.inodes and os.fsencode(name) not in names:
                    raise TrackerLost(f"this kernel does not report below an overlay: {kind}")
    finally:
        os.close(root)


class _Target:
    """The overlay in which changes are tried."""

    def __init__(self, root: int, tracker: Tracker) -> None:
        self.root = root
        self.tracker = tracker
        self._kept: list[int] = []

    def open(self, name: str, flags: int = os.O_RDWR) -> int:
        """A descriptor that stays open as long as the probe runs: its close would be heard of by itself."""
        self._kept.append(os.open(name, flags | os.O_CLOEXEC, 0o600, dir_fd=self.root))
        return self._kept[-1]

    def path(self, name: str) -> Path:
        """A path to the entry, for calls that take no directory."""
        return Path(f"/proc/self/fd/{self.root}/{name}")

    def close(self) -> None:
        """Give back all descriptors."""
        while self._kept:
            os.close(self._kept.pop())


def _overlay(place: Path) -> int:
    """A detached overlay of the three directories; its root."""
    context = _call(_SYS_FSOPEN, b"overlay", _CLOEXEC)
    try:
        for key, name in ((b"lowerdir", "lower"), (b"upperdir", "upper"), (b"workdir", "work")):
            _call(_SYS_FSCONFIG, context, _SET_STRING, key, os.fsencode(place / name), 0)
        _call(_SYS_FSCONFIG, context, _CREATE, None, None, 0)
        mounted = _call(_SYS_FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)
    return mounted


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _create(target: _Target) -> str:
    target.open("file", os.O_RDWR | os.O_CREAT)
    return "file"


def _write(target: _Target) -> str:
    os.write(target.open("file"), b"x" * 8192)
    return "file"


def _copy_up(target: _Target) -> str:
    os.write(target.open("below"), b"2")
    return "below"


def _truncate(target: _Target) -> str:
    os.truncate(target.path("file"), 8000)
    return "file"


def _open_truncate(target: _Target) -> str:
    target.open("file", os.O_RDWR | os.O_TRUNC)
    return "file"


def _allocate(target: _Target) -> str:
    os.posix_fallocate(target.open("file"), 0, 8192)
    return "file"


def _punch(target: _Target) -> str:
    offset, length = ctypes.c_long(0), ctypes.c_long(4096)
    if _libc.fallocate(target.open("file"), _KEEP_SIZE_PUNCH_HOLE, offset, length) < 0:
        raise OSError(ctypes.get_errno(), "cannot punch a hole")
    return "file"


def _copy_range(target: _Target) -> str:
    os.copy_file_range(target.open("below"), target.open("file"), 1)
    return "file"


def _map(target: _Target) -> str:
    descriptor = os.open("file", os.O_RDWR | os.O_CLOEXEC, dir_fd=target.root)
    with mmap.mmap(descriptor, 4096) as area:
        os.close(descriptor)
        area[0:1] = b"m"
    return "file"


def _write_after_rename(target: _Target) -> str:
    """By a descriptor of a name that is gone, while another one is there."""
    descriptor = target.open("file")
    os.link("file", "other", src_dir_fd=target.root, dst_dir_fd=target.root)
    os.unlink("file", dir_fd=target.root)
    os.rename("other", "file", src_dir_fd=target.root, dst_dir_fd=target.root)
    target.tracker.changes()
    os.write(descriptor, b"y")
    return "file"


def _protection(target: _Target) -> str:
    descriptor = target.open("file", os.O_RDONLY)
    flags = read_flags(descriptor)
    write_flags(descriptor, flags | _APPEND)
    write_flags(descriptor, flags)
    return "file"


def _named(change: Callable[[_Target], object], name: str) -> Callable[[_Target], str]:
    def changed(target: _Target) -> str:
        change(target)
        return name

    return changed


_KINDS: Final[dict[str, Callable[[_Target], str]]] = {
    "a file's creation": _create,
    "a write": _write,
    "a write to a file of a lower layer": _copy_up,
    "a truncation": _truncate,
    "a truncation by opening": _open_truncate,
    "an allocation": _allocate,
    "a hole punched": _punch,
    "a range copied": _copy_range,
    "the end of a mapping": _map,
    "a mode": _named(lambda target: target.path("file").chmod(0o640), "file"),
    "an owner": _named(lambda target: os.chown("file", 1, 1, dir_fd=target.root), "file"),
    "times": _named(lambda target: os.utime("file", (1, 1), dir_fd=target.root), "file"),
    "an attribute": _named(lambda target: os.setxattr(target.path("file"), "trusted.probe", b"1"), "file"),
    "an attribute's end": _named(lambda target: os.removexattr(target.path("file"), "trusted.probe"), "file"),
    "a flag against changes": _protection,
    "a write by a name that is gone": _write_after_rename,
    "a directory": _named(lambda target: os.mkdir("directory", dir_fd=target.root), "directory"),
    "a directory's mode": _named(lambda target: target.path("directory").chmod(0o750), "directory"),
    "a symbolic link": _named(lambda target: os.symlink("x", "link", dir_fd=target.root), "link"),
    "a fifo": _named(lambda target: os.mkfifo("fifo", dir_fd=target.root), "fifo"),
    "a hard link": _named(
        lambda target: os.link("file", "second", src_dir_fd=target.root, dst_dir_fd=target.root), "second"
    ),
    "a renaming to": _named(
        lambda target: os.rename("second", "third", src_dir_fd=target.root, dst_dir_fd=target.root), "third"
    ),
    "a renaming from": _named(
        lambda target: os.rename("third", "fourth", src_dir_fd=target.root, dst_dir_fd=target.root), "third"
    ),
    "a removal": _named(lambda target: os.unlink("fourth", dir_fd=target.root), "fourth"),
    "a removed file of a lower layer": _named(lambda target: os.unlink("below", dir_fd=target.root), "below"),
    "a removed directory": _named(lambda target: os.rmdir("directory", dir_fd=target.root), "directory"),
}
