"""Walk one tree that a container controls and store what changed since the last walk.

The last walk's tree is the index: an entry whose inode, ctime, size and mode are as they were is taken over unread.
Two things can change content without moving these: a clock tick that both writes share (an entry that was not older
than the last walk by ``_RACY_NS`` is read again, git's racily-clean rule), and a shared mapping (``dirty_inodes``, see
``mapped``).

The walk is iterative and holds a bounded number of descriptors, so no depth stops it: ``os.walk`` loses 20,000 levels
without an error. Whatever cannot be read is a problem of the result, never left out in silence.
"""

from __future__ import annotations

import copy
import errno
import os
import stat
import time
from collections.abc import Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions
from snapshot_drivers.errors import LimitExceeded
from snapshot_drivers.inode_flags import read_flags
from snapshot_drivers.leases import Leases
from snapshot_drivers.overlay.entry import EntryReader, node_of
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.overlay.places import Places
from snapshot_drivers.tree import ROOT_KEY, Node, Put, encode_directory, encode_root, path_key

_RACY_NS: Final = 20_000_000
_COARSE_RACY_NS: Final = 3_000_000_000
"""The same where a time without nanoseconds says that the file system keeps whole seconds (or two of them: FAT)."""
_SHOWN_PATH_BYTES: Final = 400


@dataclass(frozen=True)
class Problem:
    """An entry that the walk could not take as it is."""

    path: str
    reason: str


@dataclass
class ScannedTree:
    """One tree in memory and, if the walk stored it, in the store."""

    root: Node
    digest: bytes
    taken_ns: int
    """Wall clock before the walk began."""
    entries: int
    reread: int
    """Entries that had to be opened."""
    problems: list[Problem] = field(default_factory=list)
    places: Places | None = None
    """For walks that look at changed entries alone (see ``tracked``)."""


class _Frame:
    """A directory whose subdirectories are being visited."""

    __slots__ = ("before", "key", "node", "pending", "skip")

    def __init__(self, node: Node, before: Node | None, skip: PathSet, key: bytes) -> None:
        self.node = node
        self.before = before
        self.skip = skip
        self.key = key
        self.pending: list[bytes] = []


class _Name(NamedTuple):
    """One name of a file that has several."""

    node: Node
    key: bytes
    directory: Node
    names: int
    """How many the file has, in this tree or where no walk goes."""


class Scanner:
    """One walk of one tree."""

    def __init__(
        self,
        put: Put,
        options: CaptureOptions,
        *,
        skip: PathSet,
        index: ScannedTree | None = None,
        dirty_inodes: Set[int] = frozenset(),
        leases: Leases = MappingProxyType({}),
    ) -> None:
        """``put`` stores (or only hashes) objects; ``skip``: paths below the root that are left out."""
        self._put = put
        self._reader = EntryReader(put, options, leases)
        self._options = options
        self._skip = skip
        self._index = index
        self._dirty_inodes = dirty_inodes
        self._changed: set[int] = set()
        # By device, too: subvolumes of btrfs are crossed and number their inodes alike.
        self._linked: dict[tuple[int, int], list[_Name]] = {}
        self._problems: list[Problem] = []
        self._frames: list[_Frame] = []
        self._entries = 0
        self._reread = 0

    def scan(self, root_fd: int) -> ScannedTree:
        """The tree below ``root_fd``, encoded.

        Raises: LimitExceeded; OSError only where the root itself cannot be read.
        """
        taken_ns = time.time_ns()
        found = os.fstat(root_fd)
        root = node_of(b"", found)
        before = self._index.root if self._index else None
        place = beneath.Descent(root_fd)
        try:
            self._enter(place, root, before, self._skip, ROOT_KEY)
            while self._frames:
                frame = self._frames[-1]
                if frame.pending:
                    self._descend(place, frame)
                    continue
                self._frames.pop()
                if self._frames:
                    place.up()
        finally:
            place.close()
        self._link_groups()
        digest = self._encode(root, before)
        return ScannedTree(root, digest, taken_ns, self._entries, self._reread, self._problems)

    def _descend(self, place: beneath.Descent, frame: _Frame) -> None:
        name = frame.pending.pop()
        child = (frame.node.children or {})[name]
        if len(self._frames) >= self._options.max_depth:
            most = self._options.max_depth
            raise LimitExceeded(f"the tree is deeper than {most} levels (max_depth) at {self._shown(name)}")
        try:
            place.down(name)
        except OSError as error:
            self._lose(frame, child, error)
            return
        before = (frame.before.children or {}).get(name) if frame.before and frame.before.children else None
        if before is not None and (not before.is_directory or before.unreadable):
            before = None
        try:
            self._enter(place, child, before, frame.skip.below(name), path_key(frame.key, name))
        except OSError as error:
            place.up()
            self._lose(frame, child, error)

    def _lose(self, frame: _Frame, directory: Node, error: OSError) -> None:
        """It is gone, or it stands in the tree as one that could not be read: a restore must know of it."""
        self._changed.add(id(frame.node))
        if error.errno == errno.ENOENT:
            del (frame.node.children or {})[directory.name]
        else:
            directory.unreadable = True
            self._problem(directory.name, f"the directory cannot be read: {error.strerror}")

    def _enter(self, place: beneath.Descent, node: Node, before: Node | None, skip: PathSet, key: bytes) -> None:
        """List the present directory into ``node`` and read what changed of its files.

        Raises: OSError: the directory itself cannot be read; the walk stands where it stood.
        """
        try:
            listed = beneath.list_directory(place.fd, self._options.max_entries - self._entries)
        except beneath.TooManyEntries as error:
            raise LimitExceeded(
                f"the container has more than {self._options.max_entries} changed entries (max_entries)"
            ) from error
        frame = self._begin(place.fd, node, before, skip, key)
        earlier = (before.children if before else None) or {}
        children: dict[bytes, Node] = {}
        node.children = children
        for name, found in listed:
            if skip.holds(name):
                if skip.keeps(name):
                    for above in self._frames:
                        above.node.stays = True
                continue
            self._entries += 1
            child = self._visit(place.fd, name, found, earlier.get(name), frame)
            if child is not None:
                children[name] = child
        frame.pending.reverse()
        if len(children) != len(earlier) or children.keys() != earlier.keys():
            self._changed.add(id(node))

    def _begin(self, directory_fd: int, node: Node, before: Node | None, skip: PathSet, key: bytes) -> _Frame:
        """The directory's own attributes are known, and it is the one whose entries are visited.

        Raises: OSError.
        """
        frame = _Frame(node, before, skip, key)
        same = before is not None and self._is_same(node, before)
        if same and before is not None:
            node.xattrs, node.flags = before.xattrs, before.flags
        else:
            node.xattrs = self._reader.xattrs(directory_fd, node.name, looked=False)
            node.flags = read_flags(directory_fd)
        if not same or before is None or before.attributes() != node.attributes():
            self._changed.add(id(node))
        self._frames.append(frame)
        return frame

    def _visit(
        self, directory_fd: int, name: bytes, found: os.stat_result, before: Node | None, frame: _Frame
    ) -> Node | None:
        if stat.S_ISDIR(found.st_mode):
            frame.pending.append(name)
            return node_of(name, found)
        child: Node
        if before is not None and self._is_unread(node_of(name, found), before):
            child = before
        else:
            try:
                child = self._twin(name, found) or self._read(directory_fd, name, found)
            except FileNotFoundError:
                return None
            if before is None or before.attributes() != child.attributes() or before.content() != child.content():
                self._changed.add(id(frame.node))
        if found.st_nlink > 1 and not child.is_whiteout:  # overlayfs links all its signs to one inode
            met = _Name(child, path_key(frame.key, name), frame.node, found.st_nlink)
            self._linked.setdefault((found.st_dev, found.st_ino), []).append(met)
        elif child.link is not None:
            child = self._relinked(child, None, frame.node)
        return child

    def _is_unread(self, node: Node, before: Node) -> bool:
        return (
            self._is_same(node, before)
            and before.size == node.size
            and before.mode == node.mode
            and not before.unreadable
            and node.ino not in self._dirty_inodes
        )

    def _read(self, directory_fd: int, name: bytes, listed: os.stat_result) -> Node:
        self._reread += 1
        node, trouble = self._reader.read(directory_fd, name, listed)
        if trouble:
            self._problem(name, trouble)
        return node

    def _twin(self, name: bytes, found: os.stat_result) -> Node | None:
        """The entry under another of its names, if this walk has met it: many names of one file are read once."""
        known = self._linked.get((found.st_dev, found.st_ino))
        if known is None or known[0].node.ctime_ns != found.st_ctime_ns:
            return None
        twin = copy.copy(known[0].node)
        twin.name = name
        if twin.unreadable:
            self._problem(name, "cannot be read under its other name either")
        return twin

    def _relinked(self, node: Node, link: bytes | None, directory: Node) -> Node:
        """The node in another hardlink group: a copy, since the last walk's tree may share it."""
        node = copy.copy(node)
        node.link = link
        self._changed.add(id(directory))
        return node

    def _problem(self, name: bytes, reason: str) -> None:
        self._problems.append(Problem(self._shown(name), reason))

    def _is_same(self, node: Node, before: Node) -> bool:
        if self._index is None or (node.ino, node.ctime_ns) != (before.ino, before.ctime_ns):
            return False
        racy_ns = _RACY_NS if node.ctime_ns % 1_000_000_000 else _COARSE_RACY_NS
        return node.ctime_ns < self._index.taken_ns - racy_ns

    def _link_groups(self) -> None:
        """Give each hardlink group the id of its first member; a sole member is a plain file."""
        for members in self._linked.values():
            link = members[0].key if len(members) > 1 else None
            for node, _, directory, names in members:
                if node.link != link:
                    node = self._relinked(node, link, directory)
                    (directory.children or {})[node.name] = node
                node.shared = len(members) < names

    def _encode(self, root: Node, before: Node | None) -> bytes:
        """Store every changed directory, children first; unchanged ones keep their digests."""
        stack: list[tuple[Node, Node | None]] = [(root, before)]
        order: list[tuple[Node, Node | None, Node | None]] = []
        parents: list[Node | None] = [None]
        while stack:
            node, earlier = stack.pop()
            parent = parents.pop()
            order.append((node, earlier, parent))
            known = (earlier.children if earlier else None) or {}
            for child in (node.children or {}).values():
                if child.is_directory and not child.unreadable:
                    match = known.get(child.name)
                    stack.append((child, match if match is not None and match.is_directory else None))
                    parents.append(node)
        for node, earlier, parent in reversed(order):
            if id(node) not in self._changed and earlier is not None and earlier.digests is not None:
                node.digests = earlier.digests
                continue
            node.digests = encode_directory((node.children or {}).values(), self._put)
            if parent is not None:
                self._changed.add(id(parent))
        return encode_root(root, self._put)

    def _shown(self, name: bytes) -> str:
        path = b"/".join([*(frame.node.name for frame in self._frames[-64:]), name])
        if len(self._frames) > 64 or len(path) > _SHOWN_PATH_BYTES:
            path = b"..." + path[-_SHOWN_PATH_BYTES:]
        return os.fsdecode(path if path.startswith(b"...") else b"/" + path.lstrip(b"/"))
