"""Files that a process maps shared: the kernel moves no timestamp for writes through such a mapping.

Seen from the host's ``/proc`` of frozen processes. Writable or not is not asked: ``mprotect`` changes that between two
captures, and a page that is dirty already is written to without a fault. What counts is that the file was opened for
writing. Source: proc_pid_maps(5), proc_pid_map_files(5).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Set
from contextlib import suppress
from typing import Final

from snapshot_drivers import beneath

ANYWHERE: Final = b"?"
"""Stands for a mapped file to which no path leads, but another name may: a hardlink of it, or one that came later."""
_SHARED: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...s [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ [1-9]", re.MULTILINE)
_GONE: Final = b" (deleted)"


def mapped_paths(pids: Iterable[int]) -> frozenset[bytes]:
    """Container paths of the files that these processes map shared and may write to; ``ANYWHERE`` if one has none."""
    found: set[bytes] = set()
    for pid in pids:
        directory, table = _mappings(pid)
        for match in _SHARED.finditer(table):
            # The text of ``maps`` is ambiguous: it escapes a line break in a name, but not a backslash.
            try:
                found |= names_of(f"{directory}/map_files/{int(match[1], 16):x}-{int(match[2], 16):x}")
            except FileNotFoundError:  # a process that is gone maps nothing
                continue
            except OSError:
                found.add(ANYWHERE)
    return frozenset(found)


def _mappings(pid: int) -> tuple[str, bytes]:
    """The memory map of a process, from any of its threads that still has it: the first one may have ended."""
    threads = [str(pid)]
    with suppress(OSError):
        threads += os.listdir(f"/proc/{pid}/task")
    for thread in threads:
        with suppress(OSError), open(f"/proc/{thread}/maps", "rb", buffering=0) as file:
            if table := file.readall():
                return f"/proc/{thread}", table
    return "", b""


def names_of(link: str) -> set[bytes]:
    """The name of the file behind a link in ``map_files`` or ``fd``, if it was opened for writing.

    Raises: OSError.
    """
    if not os.lstat(link).st_mode & stat.S_IWUSR:  # opened for reading alone
        return set()
    path = os.fsencode(os.readlink(link))
    if not path.endswith(_GONE):
        return {path}
    found = os.stat(link)
    return {ANYWHERE} if stat.S_ISREG(found.st_mode) and found.st_nlink else set()


def inodes_of(paths: Set[bytes], mount: str, root_fd: int) -> frozenset[int]:
    """Inodes of those paths that lie in the tree at ``root_fd``, mounted on ``mount`` in the container."""
    found: set[int] = set()
    prefix = os.fsencode(mount.rstrip("/")) + b"/"
    for path in paths:
        if path.startswith(prefix):
            with suppress(OSError, ValueError):
                found.add(_inode(root_fd, path[len(prefix) :].split(b"/")))
    return frozenset(found)


def _inode(root_fd: int, parts: list[bytes]) -> int:
    place = beneath.Descent(root_fd)
    try:
        for part in parts[:-1]:
            place.down(part)
        with beneath.closing(beneath.look(place.fd, parts[-1])) as looked:
            return os.fstat(looked).st_ino
    finally:
        place.close()
