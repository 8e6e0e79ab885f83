"""A captured tree: nodes in memory, and their stored form, in which unchanged directories are shared.

A directory is stored as a sequence of *leaves*, each a run of entries in name order. Where one leaf ends and the next
begins depends on the names alone (a name whose hash has its low bits zero ends a leaf), so a change in a directory of
any size rewrites one leaf, and directories with equal entries have equal digests whatever their history. The digest
of a tree therefore stands for its whole content; a restored tree is proven by scanning it and comparing one digest.

Nothing of the host (inode, ctime, device of the file system) enters the stored form. Hard links are stored as a link
id, derived from the path of the group's first member.

Stored entry (msgpack): ``[name, mode, uid, gid, mtime_ns, xattrs, link, payload]``, and where the inode has any, its
flags (see ``inode_flags``); payload by type: directory
``[leaf digests]`` · regular ``[size, segments]`` · symlink ``target`` · device ``rdev`` · else ``None``; a segment is
``[offset, length, digest]`` and what no segment covers is a hole. ``segments`` of more than ``_INLINE_SEGMENTS`` are
stored apart, those of each 64 MiB in an object of their own, and replaced by the digest of the list of these: a change
in a file of any size rewrites one of them. An entry that could not be read has the payload ``False``: it is named in
the coverage and a restore leaves what stands there.
"""

from __future__ import annotations

import itertools
import stat
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final, NamedTuple

import msgpack
from blake3 import blake3

from snapshot_drivers.errors import StoreDamaged

_INLINE_SEGMENTS: Final = 16
_SPAN_BYTES: Final = 64 << 20
_LEAF_MASK: Final = 0x3F  # a leaf holds 64 entries on average
_LEAF_MOST: Final = 512

Xattrs = tuple[tuple[str, bytes], ...]
Put = Callable[[bytes], bytes]
"""Stores one object and answers its digest."""
Get = Callable[[bytes], bytes]
"""Reads one object by its digest, verified."""


class Segment(NamedTuple):
    """A run of data in a file; offsets and lengths in bytes."""

    offset: int
    length: int
    digest: bytes


class Node:
    """One entry of a tree. ``children`` and ``segments`` are ``None`` until they are known (see ``Tree``)."""

    __slots__ = (
        "children",
        "ctime_ns",
        "digests",
        "flags",
        "gid",
        "ino",
        "link",
        "mode",
        "mtime_ns",
        "name",
        "rdev",
        "segments",
        "shared",
        "size",
        "stays",
        "target",
        "uid",
        "unreadable",
        "xattrs",
    )

    def __init__(self, name: bytes, mode: int, uid: int, gid: int, mtime_ns: int) -> None:
        """A node without content."""
        self.name = name
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.mtime_ns = mtime_ns
        self.xattrs: Xattrs = ()
        self.flags = 0
        """Of the inode, see ``inode_flags``."""
        self.link: bytes | None = None
        self.size = 0
        self.rdev = 0
        self.target = b""
        self.segments: tuple[Segment, ...] = ()
        self.unreadable = False
        self.shared = False
        """The file has a name that no walk meets, too: not even its attributes may be changed in place."""
        self.stays = False
        """Something that no walk enters, by the task's wish, stands below this directory: it must not be removed."""
        self.children: MutableMapping[bytes, Node] | None = None
        self.digests: tuple[bytes, ...] | None = None
        """Leaf digests of a directory, once encoded."""
        self.ino = 0
        self.ctime_ns = 0

    @property
    def is_directory(self) -> bool:
        """True for a directory."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_regular(self) -> bool:
        """True for a regular file."""
        return stat.S_ISREG(self.mode)

    @property
    def is_whiteout(self) -> bool:
        """True for overlayfs' sign that a lower entry is deleted (device form)."""
        return stat.S_ISCHR(self.mode) and self.rdev == 0

    def attributes(self) -> tuple[int, int, int, int, Xattrs, int]:
        """What can be changed without touching the content."""
        return self.mode, self.uid, self.gid, self.mtime_ns, self.xattrs, self.flags

    def content(self) -> tuple[Any, ...]:
        """What cannot: type, data, target, device, link group."""
        kind = stat.S_IFMT(self.mode)
        return kind, self.size, self.segments, self.target, self.rdev, self.link, self.unreadable


def pack(value: Any) -> bytes:
    """The stored form of plain data; text that is no UTF-8 (names of attributes) comes back as it was."""
    return bytes(msgpack.packb(value, unicode_errors="surrogateescape"))


def unpack(data: bytes) -> Any:
    """The reverse of ``pack``."""
    return msgpack.unpackb(data, unicode_errors="surrogateescape")


def digest_of(data: bytes) -> bytes:
    """BLAKE3, 32 bytes."""
    return blake3(data).digest()


def path_key(parent_key: bytes, name: bytes) -> bytes:
    """16 bytes that stand for a path, made from those of its parent; constant cost at any depth."""
    return blake3(parent_key + name).digest(16)


ROOT_KEY: Final = bytes(16)


def encode_entry(node: Node, put: Put) -> list[Any]:
    """The stored form of one entry; a directory must have been encoded before."""
    payload: Any = None
    if node.unreadable:
        payload = False
    elif node.is_directory:
        assert node.digests is not None
        payload = list(node.digests)
    elif node.is_regular:
        payload = [node.size, _encode_segments(node.segments, put)]
    elif stat.S_ISLNK(node.mode):
        payload = node.target
    elif stat.S_ISCHR(node.mode) or stat.S_ISBLK(node.mode):
        payload = node.rdev
    xattrs = [list(pair) for pair in node.xattrs] or None
    stored = [node.name, node.mode, node.uid, node.gid, node.mtime_ns, xattrs, node.link, payload]
    return [*stored, node.flags] if node.flags else stored


def _encode_segments(segments: tuple[Segment, ...], put: Put) -> Any:
    if len(segments) <= _INLINE_SEGMENTS:
        return [list(segment) for segment in segments]
    spans = itertools.groupby(segments, key=lambda segment: segment.offset // _SPAN_BYTES)
    return put(pack([put(pack([list(segment) for segment in span])) for _, span in spans]))


def decode_entry(stored: list[Any], get: Get) -> Node:
    """The node of a stored entry; the children of a directory are not read (see ``children_of``)."""
    name, mode, uid, gid, mtime_ns, xattrs, link, payload, *flags = stored
    node = Node(name, mode, uid, gid, mtime_ns)
    node.xattrs = tuple((key, value) for key, value in xattrs or ())
    node.link = link
    node.flags = flags[0] if flags else 0
    if payload is False:
        node.unreadable = True
    elif node.is_directory:
        node.digests = tuple(payload)
    elif node.is_regular:
        node.size, segments = payload
        if isinstance(segments, bytes):
            segments = itertools.chain.from_iterable(unpack(get(span)) for span in unpack(get(segments)))
        node.segments = tuple(Segment(*segment) for segment in segments)
    elif stat.S_ISLNK(mode):
        node.target = payload
    elif payload is not None:
        node.rdev = payload
    return node


def ends_leaf(name: bytes) -> bool:
    """Whether a leaf ends with the entry of that name, whatever else stands in the directory."""
    return blake3(name).digest(1)[0] & _LEAF_MASK == 0


def first_names(names: Iterable[bytes]) -> list[bytes]:
    """The names with which the leaves of a directory begin; ``names``: all of it, sorted."""
    found: list[bytes] = []
    count = 0
    for name in names:
        if not count:
            found.append(name)
        count = 0 if count + 1 >= _LEAF_MOST or ends_leaf(name) else count + 1
    return found


def encode_leaves(children: Iterable[Node], put: Put) -> list[tuple[bytes, bytes]]:
    """Store the entries of one directory (sorted by name), or a run that begins and ends where leaves do.

    Answers the first name and the digest of each leaf.
    """
    found: list[tuple[bytes, bytes]] = []
    leaf: list[list[Any]] = []
    for node in children:
        leaf.append(encode_entry(node, put))
        if len(leaf) >= _LEAF_MOST or ends_leaf(node.name):
            found.append((leaf[0][0], put(pack(leaf))))
            leaf = []
    if leaf:
        found.append((leaf[0][0], put(pack(leaf))))
    return found


def encode_directory(children: Iterable[Node], put: Put) -> tuple[bytes, ...]:
    """Store the entries of one directory (already sorted by name); answers its leaf digests."""
    return tuple(digest for _, digest in encode_leaves(children, put))


def encode_root(root: Node, put: Put) -> bytes:
    """Store the root's own entry; its digest stands for the whole tree."""
    return put(pack(encode_entry(root, put)))


def decode_root(digest: bytes, get: Get) -> Node:
    """The root of a stored tree."""
    return decode_entry(unpack(get(digest)), get)


def children_of(node: Node, get: Get) -> Mapping[bytes, Node]:
    """The entries of a directory by name, read from the store unless they are in memory.

    Raises: StoreDamaged: also for a name that would lead out of the directory.
    """
    return node.children if node.children is not None else entries_in(node.digests or (), get)


def entries_in(leaves: Iterable[bytes], get: Get) -> dict[bytes, Node]:
    """The entries of these leaves by name.

    Raises: as ``children_of``.
    """
    found: dict[bytes, Node] = {}
    for digest in leaves:
        for stored in unpack(get(digest)):
            child = decode_entry(stored, get)
            if child.name in (b"", b".", b"..") or b"/" in child.name or b"\0" in child.name:
                raise StoreDamaged(
                    f"object {digest.hex()} names an entry {child.name!r}: no directory holds such a one"
                )
            found[child.name] = child
    return found
