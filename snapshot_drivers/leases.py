"""Files on which a process holds a write lease: opening one would break the lease, and a lease that breaks sends its
holder a signal that ends it unless it is caught. A holder that stands still cannot answer, so the opener would wait.

They are read through the holder's own descriptor instead, which opens nothing. Source: fcntl(2) "Leases",
proc_locks(5), pidfd_getfd(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from snapshot_drivers import beneath

_SYS_PIDFD_GETFD: Final = 438
_syscall = ctypes.CDLL(None, use_errno=True).syscall


class Inode(NamedTuple):
    """A file as the kernel's table of locks names it."""

    major: int
    minor: int
    number: int

    @classmethod
    def of(cls, found: os.stat_result) -> Inode:
        """Of a file that was looked at."""
        return cls(os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)


Leases = Mapping[Inode, int | None]
"""Leased files, with the process through which each can be read; ``None``: through nobody."""


def write_leases(pids: Collection[int]) -> dict[Inode, int | None]:
    """All files that cannot be opened for reading now; ``pids``: processes that stand still.

    Reading the kernel's table makes it wait for all processors (a grace period of RCU): some 10 ms.
    """
    found: dict[Inode, int | None] = {}
    for words in _locks(Path("/proc/locks").read_text("ascii", "replace")):
        if words[2:4] != ["ACTIVE", "READ"]:
            pid = int(words[4])
            found[_inode(words[5])] = pid if pid in pids else None
    return found


def leased_through(information: bytes) -> Inode | None:
    """The file on which a write lease is held through a descriptor; from ``/proc/<pid>/fdinfo/<number>``."""
    if b"LEASE" not in information:
        return None
    held = (words for words in _locks(information.decode("ascii", "replace")) if words[2:4] != ["ACTIVE", "READ"])
    return next((_inode(words[5]) for words in held), None)


@contextmanager
def opened(looked: int, leases: Leases) -> Iterator[int]:
    """A descriptor for reading the regular file that an ``O_PATH`` descriptor shows.

    Raises: OSError: also where a lease stands in the way, which is left as it is.
    """
    inode = Inode.of(os.fstat(looked))
    if inode not in leases:
        with beneath.closing(beneath.open_regular(looked)) as file:
            yield file
        return
    with beneath.closing(_descriptor_of(leases[inode], inode)) as file:
        position = os.lseek(file, 0, os.SEEK_CUR)
        try:
            yield file
        finally:
            os.lseek(file, position, os.SEEK_SET)  # it is the holder's own position


def _descriptor_of(pid: int | None, inode: Inode) -> int:
    if pid is not None:
        with suppress(OSError), beneath.closing(os.pidfd_open(pid)) as process:
            for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
                if any(_inode(words[5]) == inode for words in _locks(entry.read_text("ascii", "replace"))):
                    found = _get(process, int(entry.name))
                    if Inode.of(os.fstat(found)) == inode and _is_readable(found):
                        return found
                    os.close(found)
    raise OSError(errno.EAGAIN, "a process holds a lease on it")


def _get(process: int, number: int) -> int:
    descriptor = int(_syscall(_SYS_PIDFD_GETFD, process, number, 0))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def _is_readable(descriptor: int) -> bool:
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY


def _locks(table: str) -> Iterator[list[str]]:
    """Leases of a table, or of one descriptor: number, LEASE, state, type, pid, device and inode, range."""
    for line in table.splitlines():
        words = line.removeprefix("lock:").split()
        if len(words) > 5 and words[1] == "LEASE":
            yield words


def _inode(text: str) -> Inode:
    major, minor, number = text.split(":")
    return Inode(int(major, 16), int(minor, 16), int(number))
