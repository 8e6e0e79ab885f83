"""Flags of an inode, as ``chattr`` sets them: those that belong to the state of a file or directory.

Compression, copy-on-write and the like say how a file system stores an inode, not what it is, and are left to it.
overlayfs keeps *immutable* and *append only* of its own files in an extended attribute of the upper directory.

Source: ioctl_iflags(2), chattr(1), the kernel's ``overlayfs.rst``.
"""

from __future__ import annotations

import errno
import fcntl
import struct
from typing import Final

_GET: Final = 0x80086601  # FS_IOC_GETFLAGS
_SET: Final = 0x40086602  # FS_IOC_SETFLAGS
_SYNC, _IMMUTABLE, _APPEND, _NODUMP, _NOATIME, _DIRSYNC = 0x8, 0x10, 0x20, 0x40, 0x80, 0x10000
KEPT: Final = _SYNC | _IMMUTABLE | _APPEND | _NODUMP | _NOATIME | _DIRSYNC
HOLDING: Final = _IMMUTABLE | _APPEND
"""With one of these an entry can be neither changed nor removed, by nobody; in such a directory none can be made."""
_HAS_NONE: Final = frozenset({errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_WORD: Final = struct.Struct("=Ixxxx")  # the kernel writes an int, whatever the request's size says


def read_flags(descriptor: int) -> int:
    """Which of ``KEPT`` an open file or directory has; none on a file system without them. Raises: OSError."""
    try:
        return _all_flags(descriptor) & KEPT
    except OSError as error:
        if error.errno in _HAS_NONE:
            return 0
        raise


def write_flags(descriptor: int, flags: int) -> None:
    """Of ``KEPT`` it has these alone; its other flags stay. Raises: OSError: also where there are none."""
    try:
        present = _all_flags(descriptor)
    except OSError as error:
        if not flags and error.errno in _HAS_NONE:
            return
        raise
    if present & KEPT != flags:
        fcntl.ioctl(descriptor, _SET, _WORD.pack(present & ~KEPT | flags))


def _all_flags(descriptor: int) -> int:
    word = bytearray(_WORD.size)
    fcntl.ioctl(descriptor, _GET, word)
    return int(_WORD.unpack(word)[0])
