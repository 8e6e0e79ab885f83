"""Where images are on their way into a pack or out of one: in memory, where there is enough of it.

On a disk a gigabyte of them waits for the writing of pages that are deleted a moment later. The file system in memory
is attached nowhere, so it goes with its last descriptor, whoever dies. One on the disk is locked as long as its owner
lives: what a dead one left, which may hold any secret, is removed by the next.

Source: the kernel's ``mount_api.rst`` (fsopen, fsconfig, fsmount).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC: Final = 1
_SET_STRING, _CREATE = 1, 6
_NOSUID_NODEV_NOEXEC: Final = 2 | 4 | 8
_SPARE: Final = 3
_PREFIX: Final = "images-"
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_DIRECTORIES: Final = Path("/proc/self/fd")


@contextmanager
def work_directory(disk: Path, size_bytes: int) -> Iterator[Path]:
    """An empty directory, 0700, gone after the block: in memory where three times so much is free, else below ``disk``.

    Raises: OSError.
    """
    if size_bytes * _SPARE > _available_bytes():
        with _on_disk(disk) as path:
            yield path
        return
    descriptor = memory_directory()
    try:
        yield OPEN_DIRECTORIES / str(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _on_disk(disk: Path) -> Iterator[Path]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=disk))
        try:
            descriptor = os.open(path, _OPEN)
        except FileNotFoundError:
            continue  # taken for a dead one's before it was locked
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                yield path
                return
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)


def remove_abandoned(disk: Path) -> int:
    """The directories below ``disk`` whose owners are dead are gone; how many. Raises: OSError."""
    removed = 0
    for path in disk.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, _OPEN)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
            removed += 1
        except (BlockingIOError, FileNotFoundError):
            continue  # its owner lives, or has just removed it
        finally:
            os.close(descriptor)
    return removed


def _available_bytes() -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def memory_directory() -> int:
    """Descriptor of the root of a new, empty file system in memory. Raises: OSError."""
    context = _call(_FSOPEN, b"tmpfs", _CLOEXEC)
    try:
        _call(_FSCONFIG, context, _SET_STRING, b"mode", b"0700", 0)
        with suppress(OSError):  # kernels without huge pages; where a file has none of their size, small ones
            _call(_FSCONFIG, context, _SET_STRING, b"huge", b"within_size", 0)
        _call(_FSCONFIG, context, _CREATE, None, None, 0)
        return _call(_FSMOUNT, context, _CLOEXEC, _NOSUID_NODEV_NOEXEC)
    finally:
        os.close(context)


def _call(number: int, *arguments: object) -> int:
    answer = int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"no file system in memory: {os.strerror(code)}")
    return answer
