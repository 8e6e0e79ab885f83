"""Files that a process maps: the kernel moves no timestamp for writes through a shared mapping, and reports none.

Seen from the host's ``/proc`` of frozen processes. Writable or not is not asked: ``mprotect`` changes that between two
captures, and a page that is dirty already is written to without a fault. What counts is that the file was opened for
writing. Source: proc_pid_maps(5), proc_pid_map_files(5), statx(2).
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from typing import Final

from snapshot_drivers import beneath
from snapshot_drivers.leases import Inode

ANYWHERE: Final = b"?"
"""Stands for a mapped file to which no path leads, but another name may: a hardlink of it, or one that came later."""
_SHARED: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...s [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ [1-9]", re.MULTILINE)
_PRIVATE: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...p [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ [1-9]", re.MULTILINE)
_FILE: Final = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ .... [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) ([1-9][0-9]*)", re.MULTILINE)
_HIDING: Final = (b"/[aio]", b"[io_uring]")
"""Rings by which a process may hold files that have no number."""
_GONE: Final = b" (deleted)"
_MOST_PRIVATE: Final = 5000
"""Looking at more takes longer than a walk of most trees."""
_DONT_SYNC: Final = 0x4000
_STATX: Final = struct.Struct("=IIQIIIH")
_statx = ctypes.CDLL(None, use_errno=True).statx

Maps = Sequence[tuple[str, bytes]]
"""Memory maps of processes: a directory of ``/proc`` in which ``map_files`` stands, and the text of ``maps``."""


def memory_maps(pids: Iterable[int]) -> Maps:
    """Those of these processes; one that is gone has none."""
    return [found for pid in pids if (found := _memory_map(pid)) is not None]


def _memory_map(pid: int) -> tuple[str, bytes] | None:
    """From any of its threads that still has it: the first one may have ended."""
    threads = [str(pid)]
    with suppress(OSError):
        threads += os.listdir(f"/proc/{pid}/task")
    for thread in threads:
        with suppress(OSError), open(f"/proc/{thread}/maps", "rb", buffering=0) as file:
            if table := file.readall():
                return f"/proc/{thread}", table
    return None


def mapped_paths(maps: Maps) -> frozenset[bytes]:
    """Container paths of the files that are mapped shared and may be written to; ``ANYWHERE`` if one has none."""
    return frozenset(path for area in _areas(maps, _SHARED) for path in _names(area))


def privately_mapped_paths(maps: Maps) -> frozenset[bytes] | None:
    """Those of the files that are open for writing by nothing but a private mapping; ``None``: too many to look at.

    Such a file may have been written to through a shared mapping that is gone again, and is not closed yet.
    """
    found: set[bytes] = set()
    for count, area in enumerate(_areas(maps, _PRIVATE)):
        if count == _MOST_PRIVATE:
            return None
        found |= _names(area)
    return frozenset(found)


def mapped_files(maps: Maps) -> frozenset[Inode]:
    """Every file that is mapped, as the kernel's table of mappings names it."""
    return frozenset(
        Inode(int(found[1], 16), int(found[2], 16), int(found[3]))
        for _, table in maps
        for found in _FILE.finditer(table)
    )


def may_hide(maps: Maps) -> bool:
    """Files may be held that are in no table."""
    return any(word in table for _, table in maps for word in _HIDING)


def _areas(maps: Maps, kind: re.Pattern[bytes]) -> Iterator[str]:
    """Links to the files of mappings. The text of ``maps`` is ambiguous: it escapes a line break, but no backslash."""
    for directory, table in maps:
        for match in kind.finditer(table):
            yield f"{directory}/map_files/{int(match[1], 16):x}-{int(match[2], 16):x}"


def _names(area: str) -> set[bytes]:
    try:
        return names_of(area)
    except FileNotFoundError:  # a process that is gone maps nothing
        return set()
    except OSError:
        return {ANYWHERE}


def names_of(link: str) -> set[bytes]:
    """The name of the file behind a link in ``map_files`` or ``fd``, if it was opened for writing.

    Raises: OSError.
    """
    if not os.lstat(link).st_mode & stat.S_IWUSR:  # opened for reading alone
        return set()
    path = os.fsencode(os.readlink(link))
    if not path.endswith(_GONE):
        return {path}
    mode, links = _mode_and_links(link)
    return {ANYWHERE} if stat.S_ISREG(mode) and links else set()


def _mode_and_links(link: str) -> tuple[int, int]:
    """Of the file behind a link, as far as the kernel knows: a file system that does not answer is not asked.

    Raises: OSError.
    """
    found = ctypes.create_string_buffer(256)
    if _statx(-100, os.fsencode(link), _DONT_SYNC, 0x7FF, found):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), link)
    _, _, _, links, _, _, mode = _STATX.unpack_from(found)
    return mode, links


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
