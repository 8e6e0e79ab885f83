"""What this host can do, found by trying. Nothing here needs an engine or changes anything.

Sources: capabilities(7), openat2(2), open_tree(2), mount_setattr(2), pidfd_open(2), elf(5); runc's security advisories.
"""

from __future__ import annotations

import ctypes
import gzip
import os
import re
import signal
import struct
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

NEEDED_CAPABILITIES: Final = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "DAC_READ_SEARCH": 2,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "SYS_CHROOT": 18,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "MKNOD": 27,
    "SETFCAP": 31,
}
"""Name without ``CAP_`` and bit: files of any owner and kind, other mount and pid namespaces."""

FIXED_RUNC: Final = {(1, 2): "1.2.8", (1, 3): "1.3.3", (1, 4): "1.4.0-rc.3"}
"""First versions in which the mount races of November 2025 are closed; each start after a rewind is a try at them."""

FIXED_CVE: Final = "CVE-2025-31133"
"""The first of those three; distributions name it in the changelog of the package that has their fix."""

_OPENAT2: Final = 437
_OPEN_TREE: Final = 428
_MOUNT_SETATTR: Final = 442
_CLOSE_RANGE: Final = 436
_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_OPEN_TREE_CLONE: Final = 1
_MOUNT_ATTR_RDONLY: Final = 1
_PT_INTERP: Final = 3
_FINAL: Final = 10**6
"""Stands for "no release candidate": sorts behind them all."""


class Space(NamedTuple):
    """Room on the filesystem that holds a path."""

    free_bytes: int
    device: int
    """Equal for paths of one filesystem."""


def missing_capabilities(
    status: Path = Path("/proc/self/status"), *, also: Mapping[str, int] | None = None
) -> list[str]:
    """Names of ``NEEDED_CAPABILITIES``, and ``also`` of these, that this process does not have in effect."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
    effective = int(match.group(1), 16) if match else 0
    return [name for name, bit in {**NEEDED_CAPABILITIES, **(also or {})}.items() if not effective >> bit & 1]


def _call(number: int, *arguments: object) -> int:
    result = int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _try_openat2() -> None:
    how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, 0)
    os.close(_call(_OPENAT2, _AT_FDCWD, b"/", how, len(how)))


def _try_open_tree() -> None:
    os.close(_call(_OPEN_TREE, _AT_FDCWD, b"/", _OPEN_TREE_CLONE | os.O_CLOEXEC))


def _try_mount_setattr() -> None:
    clone = _call(_OPEN_TREE, _AT_FDCWD, b"/", _OPEN_TREE_CLONE | os.O_CLOEXEC)
    try:
        attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
        _call(_MOUNT_SETATTR, clone, b"", _AT_EMPTY_PATH, attributes, ctypes.c_size_t(len(attributes)))
    finally:
        os.close(clone)


def _try_pidfd() -> None:
    descriptor = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(descriptor, 0)  # 0: only check, see kill(2)
    finally:
        os.close(descriptor)


def _try_close_range() -> None:
    last = ctypes.c_uint(0xFFFF_FFFF)
    _call(_CLOSE_RANGE, last, last, 0)


KERNEL_CALLS: Final[dict[str, Callable[[], None]]] = {
    "openat2": _try_openat2,
    "open_tree": _try_open_tree,
    "mount_setattr": _try_mount_setattr,
    "pidfd": _try_pidfd,
    "close_range": _try_close_range,
}


def refused_kernel_calls() -> dict[str, str]:
    """Each call of ``KERNEL_CALLS`` that this kernel, or a filter in front of it, refused: its name and the reason."""
    refused = {}
    for name, attempt in KERNEL_CALLS.items():
        try:
            attempt()
        except OSError as error:
            refused[name] = error.strerror or str(error)
    return refused


def _machine(header: bytes) -> int:
    return int(struct.unpack_from("<H", header, 18)[0])


def fault_of_static_program(path: Path) -> str | None:
    """Why the file at ``path`` cannot run in a container of any image, or ``None`` if it can."""
    try:
        data = path.read_bytes()
        own = Path(sys.executable).read_bytes()[:64]
        if os.statvfs(path).f_flag & os.ST_NOEXEC:
            return "lies on a filesystem mounted noexec"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if len(data) < 64 or data[:5] != b"\x7fELF\x02":
        return "is no 64-bit program"
    if _machine(data) != _machine(own):
        return "is a program for another processor"
    if not os.access(path, os.X_OK):
        return "is not executable"
    (start,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    try:
        kinds = [struct.unpack_from("<I", data, start + index * size)[0] for index in range(count)]
    except struct.error:
        return "is a damaged program"
    return "is linked dynamically" if _PT_INTERP in kinds else None


def space(path: Path) -> Space:
    """Room where ``path`` lies, or would lie: the nearest directory above it that exists.

    Raises: OSError: nothing above it can be reached.
    """
    while not path.exists() and path != path.parent:
        path = path.parent
    room = os.statvfs(path)
    return Space(room.f_bavail * room.f_frsize, path.stat().st_dev)


def _version(text: str) -> tuple[int, int, int, int] | None:
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)(?:[-~]rc\.?(\d+))?", text)
    if match is None:
        return None
    major, minor, patch, candidate = match.groups()
    return int(major), int(minor), int(patch), int(candidate or _FINAL)


def runc_is_fixed(version: str, changelog: Path = Path("/usr/share/doc/runc/changelog.Debian.gz")) -> bool | None:
    """Whether runc of this version holds the fixes of ``FIXED_RUNC``; ``None`` where it cannot be told.

    A distribution's package keeps its old number when it gets a fix, so for those (``1.1.5+ds1``, ``1.1.12-0ubuntu3``)
    the package's changelog is asked, if there is one.
    """
    parsed = _version(version)
    if parsed is None:
        return None
    newest = max(FIXED_RUNC)
    fixed = _version(FIXED_RUNC.get(parsed[:2], FIXED_RUNC[newest]))
    if fixed is not None and parsed >= fixed:
        return True
    if not re.search(r"ds\d|dfsg|deb|ubuntu|~|\+", version):
        return False
    try:
        return FIXED_CVE in gzip.decompress(changelog.read_bytes()).decode(errors="replace")
    except (OSError, EOFError, zlib.error):
        return None
