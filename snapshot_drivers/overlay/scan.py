"""Walk one tree that a container controls and store what changed since the last walk.

The last walk's tree is the index: an entry whose inode, ctime, size and mode are as they were is taken over unread.
Two things can change content without moving these: a clock tick that both writes share (an entry younger than the
last walk by ``_RACY_NS`` is read again, git's racily-clean rule), and a shared mapping (``dirty_inodes``, see
``mapped``).

The walk is iterative and holds a bounded number of descriptors, so no depth stops it: ``os.walk`` loses 20,000 levels
without an error. Whatever cannot be read is a problem of the result, never left out in silence.
"""

from __future__ import annotations

import copy
import os
import stat
import time
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Final

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions
from snapshot_drivers.errors import LimitExceeded
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.tree import ROOT_KEY, Node, Put, Segment, encode_directory, encode_root, path_key

BLOCK_BYTES: Final = 1 << 20
_ZERO: Final = bytes(BLOCK_BYTES)
_RACY_NS: Final = 20_000_000
_READ_TRIES: Final = 3
_SHOWN_PATH_BYTES: Final = 400
# Made by the kernel for one upper directory; they neither belong to the state nor fit another directory.
ROOT_ONLY_XATTRS: Final = frozenset({"trusted.overlay.uuid", "trusted.overlay.origin"})


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


class _Frame:
    """A directory whose subdirectories are being visited."""

    __slots__ = ("before", "key", "node", "pending", "skip")

    def __init__(self, node: Node, before: Node | None, skip: PathSet, key: bytes) -> None:
        self.node = node
        self.before = before
        self.skip = skip
        self.key = key
        self.pending: list[bytes] = []


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
    ) -> None:
        """``put`` stores (or only hashes) objects; ``skip``: paths below the root that are left out."""
        self._put = put
        self._options = options
        self._skip = skip
        self._index = index
        self._dirty_inodes = dirty_inodes
        self._clean_before_ns = index.taken_ns - _RACY_NS if index else 0
        self._changed: set[int] = set()
        self._linked: dict[int, list[tuple[Node, bytes, Node]]] = {}
        self._problems: list[Problem] = []
        self._frames: list[_Frame] = []
        self._entries = 0
        self._reread = 0
        self._content_bytes = 0

    def scan(self, root_fd: int) -> ScannedTree:
        """The tree below ``root_fd``, encoded.

        Raises: LimitExceeded; OSError only where the root itself cannot be read.
        """
        taken_ns = time.time_ns()
        found = os.fstat(root_fd)
        root = _node(b"", found)
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
            raise LimitExceeded(f"the tree is deeper than {self._options.max_depth} levels at {self._shown(name)}")
        try:
            place.down(name)
        except OSError as error:
            self._lose(frame, name, error)
            return
        before = (frame.before.children or {}).get(name) if frame.before and frame.before.children else None
        if before is not None and not before.is_directory:
            before = None
        try:
            self._enter(place, child, before, frame.skip.below(name), path_key(frame.key, name))
        except OSError as error:
            place.up()
            self._lose(frame, name, error)

    def _lose(self, frame: _Frame, name: bytes, error: OSError) -> None:
        if error.errno != 2:
            self._problems.append(Problem(self._shown(name), f"the directory cannot be read: {error.strerror}"))
        del (frame.node.children or {})[name]
        self._changed.add(id(frame.node))

    def _enter(self, place: beneath.Descent, node: Node, before: Node | None, skip: PathSet, key: bytes) -> None:
        """List the present directory into ``node`` and read what changed of its files."""
        try:
            listed = beneath.list_directory(place.fd, self._options.max_entries - self._entries)
        except beneath.TooManyEntries as error:
            raise LimitExceeded(
                f"the container has more than {self._options.max_entries} changed entries (max_entries)"
            ) from error
        frame = _Frame(node, before, skip, key)
        same = before is not None and self._is_same(node, before)
        node.xattrs = before.xattrs if same and before else self._xattrs(place.fd, looked=False, root=not self._frames)
        if not same or before is None or before.attributes() != node.attributes():
            self._changed.add(id(node))
        self._frames.append(frame)
        earlier = (before.children if before else None) or {}
        children: dict[bytes, Node] = {}
        node.children = children
        for name, found in listed:
            if skip.holds(name):
                continue
            self._entries += 1
            child = self._visit(place.fd, name, found, earlier.get(name), frame)
            if child is not None:
                children[name] = child
        frame.pending.reverse()
        if len(children) != len(earlier) or children.keys() != earlier.keys():
            self._changed.add(id(node))

    def _visit(
        self, directory_fd: int, name: bytes, found: os.stat_result, before: Node | None, frame: _Frame
    ) -> Node | None:
        if stat.S_ISDIR(found.st_mode):
            frame.pending.append(name)
            return _node(name, found)
        if (
            before is not None
            and before.ino == found.st_ino
            and before.ctime_ns == found.st_ctime_ns
            and before.ctime_ns < self._clean_before_ns
            and before.size == found.st_size
            and before.mode == found.st_mode
            and not before.unreadable
            and found.st_ino not in self._dirty_inodes
        ):
            child = before
        else:
            try:
                child = self._read(directory_fd, name)
            except FileNotFoundError:
                return None
            if before is None or before.attributes() != child.attributes() or before.content() != child.content():
                self._changed.add(id(frame.node))
        if found.st_nlink > 1:
            self._linked.setdefault(child.ino, []).append((child, path_key(frame.key, name), frame.node))
        elif child.link is not None:
            child = self._relinked(child, None, frame.node)
        return child

    def _relinked(self, node: Node, link: bytes | None, directory: Node) -> Node:
        """The node in another hardlink group: a copy, since the last walk's tree may share it."""
        node = copy.copy(node)
        node.link = link
        self._changed.add(id(directory))
        return node

    def _read(self, directory_fd: int, name: bytes) -> Node:
        """Everything about one entry that is no directory; what cannot be read becomes a problem."""
        self._reread += 1
        with beneath.closing(beneath.look(directory_fd, name)) as looked:
            found = os.fstat(looked)
            node = _node(name, found)
            try:
                node.xattrs = self._xattrs(looked, looked=True)
                if stat.S_ISLNK(found.st_mode):
                    node.target = os.readlink(b"", dir_fd=looked)
                elif stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
                    node.rdev = found.st_rdev
                elif stat.S_ISREG(found.st_mode):
                    self._read_content(looked, node)
            except OSError as error:
                node.unreadable = node.is_regular
                self._problems.append(Problem(self._shown(name), f"cannot be read: {error.strerror}"))
        return node

    def _read_content(self, looked: int, node: Node) -> None:
        with beneath.closing(beneath.open_regular(looked)) as file:
            for _ in range(_READ_TRIES):
                before = os.fstat(file)
                node.size, node.ctime_ns, node.mtime_ns = before.st_size, before.st_ctime_ns, before.st_mtime_ns
                node.segments = self._segments(file, before.st_size)
                after = os.fstat(file)
                if (after.st_size, after.st_ctime_ns) == (before.st_size, before.st_ctime_ns):
                    return
        node.unreadable = True
        self._problems.append(Problem(self._shown(node.name), "was written to while it was read, every time"))

    def _segments(self, file: int, size: int) -> tuple[Segment, ...]:
        """The blocks of a file that are not all zero.

        Whole aligned blocks whatever the layout on the disk, so that equal content has equal segments.
        """
        if size == 0:
            return ()
        if size <= BLOCK_BYTES:
            data = os.pread(file, size, 0)
            self._count(len(data))
            return () if data == _ZERO[: len(data)] else (Segment(0, len(data), self._put(data)),)
        segments: list[Segment] = []
        position = 0
        while position < size:
            try:
                position = os.lseek(file, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == 6:  # ENXIO: only a hole follows
                    break
                raise
            position -= position % BLOCK_BYTES
            data = os.pread(file, min(BLOCK_BYTES, size - position), position)
            if not data:
                break
            if data != _ZERO[: len(data)]:
                self._count(len(data))
                segments.append(Segment(position, len(data), self._put(data)))
            position += BLOCK_BYTES
        return tuple(segments)

    def _count(self, size: int) -> None:
        self._content_bytes += size
        if self._content_bytes > self._options.max_content_bytes:
            raise LimitExceeded(f"more than {self._options.max_content_bytes} changed bytes (max_content_bytes)")

    def _xattrs(self, descriptor: int, *, looked: bool, root: bool = False) -> tuple[tuple[str, bytes], ...]:
        found = beneath.read_xattrs(descriptor, looked=looked)
        if root:
            found = tuple(pair for pair in found if pair[0] not in ROOT_ONLY_XATTRS)
        if found and sum(len(name) + len(value) for name, value in found) > self._options.max_xattr_bytes:
            raise LimitExceeded(f"{self._shown(b'')}: more than {self._options.max_xattr_bytes} bytes of attributes")
        return found

    def _is_same(self, node: Node, before: Node) -> bool:
        return node.ino == before.ino and node.ctime_ns == before.ctime_ns < self._clean_before_ns

    def _link_groups(self) -> None:
        """Give each hardlink group the id of its first member; a sole member is a plain file."""
        for members in self._linked.values():
            link = members[0][1] if len(members) > 1 else None
            for node, _, directory in members:
                if node.link != link:
                    (directory.children or {})[node.name] = self._relinked(node, link, directory)

    def _encode(self, root: Node, before: Node | None) -> bytes:
        """Store every changed directory, children first; unchanged ones keep their digests."""
        stack: list[tuple[Node, Node | None, bool]] = [(root, before, False)]
        order: list[tuple[Node, Node | None, Node | None]] = []
        parents: list[Node | None] = [None]
        while stack:
            node, earlier, _ = stack.pop()
            parent = parents.pop()
            order.append((node, earlier, parent))
            known = (earlier.children if earlier else None) or {}
            for child in (node.children or {}).values():
                if child.is_directory:
                    match = known.get(child.name)
                    stack.append((child, match if match is not None and match.is_directory else None, False))
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


def _node(name: bytes, found: os.stat_result) -> Node:
    node = Node(name, found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns)
    node.ino = found.st_ino
    node.ctime_ns = found.st_ctime_ns
    node.size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    return node
