"""Files that a process maps shared and writable: the kernel moves no timestamp for writes through such a mapping.

Seen from the host's ``/proc`` of frozen processes. The path in ``maps`` is the container's word and only picks which
entries are read again; a lie costs the liar's own change its place in the next capture and nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path

from snapshot_drivers import beneath

_LINE = re.compile(rb"[0-9a-f]+-[0-9a-f]+ .w.s [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ ([1-9][0-9]*) +(/.*)")
_OCTAL = re.compile(rb"\\([0-7]{3})")


def mapped_paths(pids: Iterable[int]) -> frozenset[bytes]:
    """Container paths of all files that these processes map shared and writable."""
    found: set[bytes] = set()
    for pid in pids:
        with suppress(OSError):  # a process that is gone maps nothing
            for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
                match = _LINE.fullmatch(line)
                if match:
                    found.add(_OCTAL.sub(lambda octal: bytes([int(octal[1], 8)]), match[2]))
    return frozenset(found)


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
