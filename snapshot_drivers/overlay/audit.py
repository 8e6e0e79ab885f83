"""Look at a few entries that a tracker called unchanged, in every capture: the tracker's word is checked, not believed.

Entries are picked at random, one in a hundred, as far as a small budget of time goes: the container stands still.
"""

from __future__ import annotations

import os
import random
import stat
import time
from dataclasses import dataclass
from typing import Final

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions
from snapshot_drivers.leases import Leases
from snapshot_drivers.overlay.entry import EntryReader, node_of
from snapshot_drivers.overlay.places import Places
from snapshot_drivers.overlay.scan import ScannedTree
from snapshot_drivers.tree import Node, digest_of

_ONE_IN: Final = 100
_BUDGET_S: Final = 0.0005
_MOST: Final = 50
"""There is no time for more."""
_READ_BYTES: Final = 1 << 18
"""Larger files are compared by their attributes alone."""
_NEW_LIST_AFTER: Final = 50


@dataclass(frozen=True)
class Miss:
    """An entry that is not as its tree says."""

    inode: int
    path: str
    only_flags: bool
    """Nothing but flags of its inode differs: the kernel reports no such change."""


class Audit:
    """Checks of one tree, capture after capture."""

    def __init__(self, *, one_in: int = _ONE_IN, budget_s: float = _BUDGET_S) -> None:
        self._one_in = one_in
        self._budget_s = budget_s
        self._inodes: list[int] = []
        self._rounds = 0

    def check(self, tree: ScannedTree, root_fd: int, options: CaptureOptions, leases: Leases) -> Miss | None:
        """The first entry found that is not as ``tree`` says; ``None``: there was none among those looked at."""
        assert tree.places is not None
        self._rounds += 1
        if self._rounds % _NEW_LIST_AFTER == 1:
            self._inodes = list(tree.places.where)
        until = time.perf_counter() + self._budget_s
        reader = EntryReader(digest_of, options, leases)
        most = min(len(self._inodes), 1 + len(self._inodes) // self._one_in, _MOST)
        for inode in random.sample(self._inodes, most):
            way = _way(tree.places, tree.root.ino, inode)
            if way:
                only_flags = _difference(tree.root, way, root_fd, reader)
                if only_flags is not None:
                    shown = b"/".join(way).decode("utf-8", "backslashreplace")
                    return Miss(inode, f"/{shown}", only_flags)
            if time.perf_counter() > until:
                break
        return None


def _way(places: Places, root: int, inode: int) -> list[bytes]:
    """The names that lead to an inode; none if it is gone, or the root."""
    way: list[bytes] = []
    while inode != root:
        if inode not in places.where:
            return []
        inode, name = places.where[inode]
        way.append(name)
    return way[::-1]


def _difference(root: Node, way: list[bytes], root_fd: int, reader: EntryReader) -> bool | None:
    """``None``: the entry is as it was; else whether only flags differ."""
    node = root
    place = beneath.Descent(root_fd)
    try:
        for name in way[:-1]:
            node = (node.children or {})[name]
            place.down(name)
        node = (node.children or {})[way[-1]]
        if node.is_whiteout:  # the times of all of them change with each new link
            return None
        found = os.stat(way[-1], dir_fd=place.fd, follow_symlinks=False)
        now = node_of(way[-1], found)
        is_same = (now.ino, now.ctime_ns, now.mode, now.size) == (node.ino, node.ctime_ns, node.mode, node.size)
        if stat.S_ISDIR(found.st_mode) or now.size > _READ_BYTES or not node.is_regular:
            return None if is_same else False
        read, trouble = reader.read(place.fd, way[-1], found)
        if trouble:
            return None
    except OSError:
        return False
    finally:
        place.close()
    read.link = node.link
    if read.content() != node.content() or read.attributes()[:-1] != node.attributes()[:-1]:
        return False
    return None if is_same and read.flags == node.flags else True
