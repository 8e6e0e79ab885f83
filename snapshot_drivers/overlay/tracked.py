"""Walk a tree of which a tracker says what changed: only that is looked at, the rest is taken over from the last walk.

An entry that is looked at is judged as in any walk (see ``scan``), and the result is the same tree, down to its digest.
What concerns more than single entries ends in ``Doubt``, and the caller walks the whole tree: names of one file in
several places, entries that come or go where the task excludes some, anything that is not where it was.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, MutableMapping, Set
from contextlib import suppress
from typing import Final

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions
from snapshot_drivers.errors import LimitExceeded
from snapshot_drivers.leases import Leases
from snapshot_drivers.overlay.branch import branched
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.overlay.places import MANY_ENTRIES, Doubt, Places
from snapshot_drivers.overlay.runs import Runs
from snapshot_drivers.overlay.scan import ScannedTree, Scanner, _Frame
from snapshot_drivers.overlay.tracker import Changes
from snapshot_drivers.tree import Node, Put, encode_directory, encode_root

_WORTH: Final = 4
"""Where more than one entry in so many has to be looked at, a whole walk is as quick."""
_FEW: Final = 1000


class TrackedScanner(Scanner):
    """One walk of the changed part of one tree."""

    def __init__(
        self,
        put: Put,
        options: CaptureOptions,
        *,
        skip: PathSet,
        index: ScannedTree,
        dirty_inodes: Set[int],
        leases: Leases,
        changes: Iterable[Changes],
        suspects: Set[int],
    ) -> None:
        """``changes``: all since ``index`` was taken; ``suspects``: inodes to look at besides.

        Raises: Doubt.
        """
        super().__init__(put, options, skip=skip, index=index, dirty_inodes=dirty_inodes, leases=leases)
        if index.places is None or index.problems:
            raise Doubt
        self._places: Places = index.places
        self._before = index
        self._root = index.root.ino
        known = self._places.where
        names: dict[int, set[bytes]] = {}
        inodes = {inode for inode in (*suspects, *dirty_inodes) if inode in known}
        for some in changes:
            inodes.update(inode for inode in some.inodes if inode in known)
            for directory, name in some.names(known):
                names.setdefault(directory, set()).add(name)
        count = len(inodes) + sum(len(some) for some in names.values())
        if count > _FEW and count * _WORTH > index.entries:
            raise Doubt
        self._marks = self._places.marks(self._root, names, inodes)
        self._visited: list[tuple[Node, Node | None, Node | None]] = []
        self._touched: dict[int, set[bytes]] = {}
        self._found: list[tuple[int, tuple[int, bytes]]] = []
        """Inodes that were met, and where."""
        self._entries = index.entries

    def scan(self, root_fd: int) -> ScannedTree:
        """The tree below ``root_fd``, encoded. ``index`` has no places any more.

        Raises: Doubt: the index is as it was, but for its places; else as ``Scanner.scan``.
        """
        self._before.places = None
        found = super().scan(root_fd)
        self._places.where.update(self._found)
        found.places = self._places
        return found

    def _enter(self, place: beneath.Descent, node: Node, before: Node | None, skip: PathSet, key: bytes) -> None:
        if os.fstat(place.fd).st_ino != node.ino:
            raise Doubt
        parent = self._frames[-1].node if self._frames else None
        if before is None or before.ino != node.ino or before.children is None or before.digests is None:
            if parent is None:
                raise Doubt
            self._visited.append((node, None, parent))
            super()._enter(place, node, None, skip, key)
            return
        self._visited.append((node, before, parent))
        frame = self._begin(place.fd, node, before, skip, key)
        node.stays = before.stays
        node.children = before.children
        self._touched[id(node)] = set()
        names = self._marks.get(node.ino)
        if names:
            node.children = branched(before.children)
            for name in sorted(names):
                self._look_at(place.fd, name, frame, node.children)
        frame.pending.reverse()

    def _look_at(self, directory_fd: int, name: bytes, frame: _Frame, children: MutableMapping[bytes, Node]) -> None:
        """The entry is in ``children`` as it is now, if it is there."""
        if frame.skip.holds(name):
            raise Doubt
        beneath.check_name(name)
        found: os.stat_result | None = None
        with suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
        earlier = children.get(name)
        if earlier is not None and (found is None or _is_another(earlier, found)):
            self._entries -= self._places.forget(frame.node.ino, earlier)
            del children[name]
            earlier = None
            self._changed.add(id(frame.node))
            self._touched[id(frame.node)].add(name)
        if found is None:
            return
        if earlier is None:
            self._entries += 1
            if self._entries > self._options.max_entries:
                raise LimitExceeded(
                    f"the container has more than {self._options.max_entries} changed entries (max_entries)"
                )
            self._changed.add(id(frame.node))
        child = self._visit(directory_fd, name, found, earlier, frame)
        if child is None:
            raise Doubt
        if child is not earlier:
            children[name] = child
            if earlier is None or not child.is_directory:
                self._touched[id(frame.node)].add(name)

    def _visit(
        self, directory_fd: int, name: bytes, found: os.stat_result, before: Node | None, frame: _Frame
    ) -> Node | None:
        if not stat.S_ISDIR(found.st_mode):
            has_names = before is not None and (before.link is not None or before.shared)
            is_sign = stat.S_ISCHR(found.st_mode) and not found.st_rdev
            if has_names or (found.st_nlink > 1 and not is_sign):
                raise Doubt
        child = super()._visit(directory_fd, name, found, before, frame)
        if child is not None:
            self._found.append((child.ino, (frame.node.ino, name)))
        return child

    def _lose(self, frame: _Frame, directory: Node, error: OSError) -> None:  # noqa: ARG002 the rest of the whole walk's
        raise Doubt from error

    def _encode(self, root: Node, before: Node | None) -> bytes:  # noqa: ARG002 each directory has its own
        for node, earlier, parent in reversed(self._visited):
            touched = self._touched.get(id(node))
            if earlier is not None and not touched and id(node) not in self._changed:
                node.digests = earlier.digests
                continue
            node.digests = earlier.digests if earlier is not None and not touched else self._digests(node, touched)
            if parent is not None:
                self._changed.add(id(parent))
                if id(parent) in self._touched:
                    self._touched[id(parent)].add(node.name)
        return encode_root(root, self._put)

    def _digests(self, node: Node, touched: set[bytes] | None) -> tuple[bytes, ...]:
        children = node.children or {}
        if len(children) <= MANY_ENTRIES:
            self._places.runs.pop(node.ino, None)
            return encode_directory((children[name] for name in sorted(children)), self._put)
        runs = self._places.runs.get(node.ino)
        if runs is None or touched is None:
            runs = self._places.runs[node.ino] = Runs.encoded(children, self._put)
        else:
            runs.update(touched, children, self._put)
        return tuple(runs.digests)


def _is_another(earlier: Node, found: os.stat_result) -> bool:
    """Another file or directory stands there than before."""
    return earlier.ino != found.st_ino or earlier.is_directory != stat.S_ISDIR(found.st_mode)
