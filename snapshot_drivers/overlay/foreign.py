"""Whether a snapshot that came from elsewhere may be believed: its manifest and each entry of its trees.

What a walk of a real container cannot have found is refused: names that are no single component, types and attributes
that nobody captures, devices that no container has by itself, trees beyond the limits of a capture. A leaf may be named
many times, so entries and bytes are counted as a restore would write them, not as they are stored.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions, StateKind
from snapshot_drivers.errors import StoreDamaged
from snapshot_drivers.inode_flags import KEPT
from snapshot_drivers.overlay.leaves import PAYLOAD, Entry, Leaf, below, leaves_below
from snapshot_drivers.overlay.portable import MOST_NODE_BYTES, Meaning, meaning_of
from snapshot_drivers.store.manifest import Manifest, StoredTree
from snapshot_drivers.tree import Get, unpack

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_IMAGE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_ETC_PATHS: Final = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
_MOST_ETC_BYTES: Final = 1 << 20
_MOST_NAME_BYTES: Final = 255
_MOST_TARGET_BYTES: Final = 4095
_MOST_ID: Final = 2**32 - 2
_MOST_TIME_NS: Final = 2**63 - 1
_TREES: Final = frozenset({StateKind.ROOTFS, StateKind.VOLUME, StateKind.TMPFS, StateKind.BIND})
_EVERYWHERE: Final = frozenset(
    os.makedev(*numbers) for numbers in ((1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2))
)
"""null, zero, full, random, urandom, tty, console, ptmx: every container has them in its /dev."""


class _Weight(NamedTuple):
    """What a leaf brings into a container, all below it included."""

    entries: int
    levels: int
    content_bytes: int
    first: bytes
    last: bytes
    """Names of its first and last entry."""


class ForeignSnapshots:
    """Looks at snapshots one after the other; what they share is looked at once."""

    def __init__(self, get: Get, sizes: Mapping[bytes, int], *, devices: bool) -> None:
        """``sizes``: of all objects that came. ``devices``: any device may be in a tree."""
        self._get = get
        self._sizes = sizes
        self._devices = devices
        self._limits = CaptureOptions()
        self._known: dict[StateKind, dict[bytes, _Weight]] = {kind: {} for kind in _TREES}

    def check(self, manifest: Manifest) -> None:
        """Raises: StoreDamaged: the message says what no capture would have stored."""
        trees = [(tree.kind, tree.path) for tree in manifest.trees]
        if [kind for kind, _ in trees].count(StateKind.ROOTFS) != 1 or len(set(trees)) != len(trees):
            raise StoreDamaged("it has not one root filesystem, or two trees of one place")
        if manifest.lower_dirs:
            raise StoreDamaged("it names directories of a host's image layers")
        for file in manifest.etc_files:
            if file.path not in _ETC_PATHS or not 0 <= file.mode <= 0o777:
                raise StoreDamaged(f"{file.path!r} (mode {file.mode:o}) is no file of the engine's below /etc")
            if max(file.uid, file.gid) > _MOST_ID or min(file.uid, file.gid) < 0 or abs(file.mtime_ns) > _MOST_TIME_NS:
                raise StoreDamaged(f"{file.path}: its owner or time is out of range")
            if self._sizes.get(_digest(file.digest), 0) > _MOST_ETC_BYTES:
                raise StoreDamaged(f"{file.path}: has more than {_MOST_ETC_BYTES} bytes")
        for image in manifest.processes.images if manifest.processes is not None else ():
            if not _IMAGE_NAME.fullmatch(image.name):
                raise StoreDamaged(f"{image.name!r} is no name of a process image")
            for block in image.blocks:
                _digest(block)
        for tree in manifest.trees:
            try:
                self._tree(tree)
            except StoreDamaged as error:
                raise StoreDamaged(f"{tree.kind} {tree.path}: {error}") from error

    def _tree(self, tree: StoredTree) -> None:
        if (tree.kind is StateKind.ROOTFS) is not (tree.path == "/"):
            raise StoreDamaged("only the root filesystem stands at /")
        if tree.kind not in _TREES or posixpath.normpath(tree.path) != tree.path or not tree.path.startswith("/"):
            raise StoreDamaged("no tree of that kind can stand there")
        known = self._known[tree.kind]
        root = self._list(_digest(tree.root))
        self._entry(root, tree.kind, is_root=True)
        for leaf in leaves_below(root, lambda digest: self._entries(digest, tree.kind), known):
            try:
                known[leaf.digest] = self._weight(leaf, known)
            except StoreDamaged as error:
                raise StoreDamaged(f"{leaf.path()[:200]}: {error}") from error
        whole = _below(root, known)
        for name, found, most in (
            ("entries", whole.entries, self._limits.max_entries),
            ("levels", whole.levels, self._limits.max_depth),
            ("bytes of content", whole.content_bytes, self._limits.max_content_bytes),
        ):
            if found > most:
                raise StoreDamaged(f"{found} {name}, a capture takes at most {most}")

    def _entries(self, digest: bytes, kind: StateKind) -> list[Entry]:
        """The entries of a leaf, each of which a capture may have stored."""
        entries = self._list(digest)
        for entry in entries:
            self._entry(entry, kind, is_root=False)
        names = [entry[0] for entry in entries]
        if names != sorted(set(names)):
            raise StoreDamaged(f"the names of object {digest.hex()} are out of order, or one stands twice")
        return entries

    def _weight(self, leaf: Leaf, known: Mapping[bytes, _Weight]) -> _Weight:
        entries, levels, content_bytes = 0, 0, 0
        for entry in leaf.entries:
            inside = _below(entry, known)
            entries += 1 + inside.entries
            levels = max(levels, inside.levels)
            content_bytes += inside.content_bytes + self._content_bytes(entry)
        return _Weight(entries, levels, content_bytes, leaf.entries[0][0], leaf.entries[-1][0])

    def _content_bytes(self, entry: Entry) -> int:
        """Bytes of a file that a restore would write.

        Raises: StoreDamaged: its segments do not lie one behind the other within it, or are no such objects.
        """
        if not stat.S_ISREG(entry[1]) or entry[PAYLOAD] is False:
            return 0
        size, position, total = entry[PAYLOAD][0], 0, 0
        for segment in self._segments(entry[PAYLOAD][1]):
            if not isinstance(segment, list) or [type(part) for part in segment] != [int, int, bytes]:
                raise StoreDamaged(f"{entry[0]!r}: a segment that is none")
            offset, length, digest = segment
            # At once: a list of segments may be named again and again.
            if offset < position or length <= 0 or offset + length > size:
                raise StoreDamaged(f"{entry[0]!r}: its segments do not lie one behind the other in {size} bytes")
            if self._sizes.get(digest) != length:
                raise StoreDamaged(f"{entry[0]!r}: object {digest.hex()} is not there or has not {length} bytes")
            position = offset + length
            total += length
        return total

    def _segments(self, segments: Any) -> Iterator[Any]:
        if isinstance(segments, list):
            yield from segments
            return
        for span in self._list(segments):
            if not _is_digest(span):
                raise StoreDamaged(f"object {segments.hex()} is no list of segments")
            yield from self._list(span)

    def _list(self, digest: bytes) -> list[Any]:
        """The list that is stored under that digest.

        Raises: StoreDamaged: it is none, or larger than any that a capture stores.
        """
        if self._sizes.get(digest, 0) > MOST_NODE_BYTES:
            raise StoreDamaged(f"object {digest.hex()} is too large for a node of a tree")
        try:
            found = unpack(self._get(digest))
        except ValueError as error:
            raise StoreDamaged(f"object {digest.hex()} is no node of a tree: {error}") from error
        if not isinstance(found, list) or not found:
            raise StoreDamaged(f"object {digest.hex()} is no node of a tree")
        return found

    def _entry(self, entry: Any, kind: StateKind, *, is_root: bool) -> None:
        """Raises: StoreDamaged: no walk of a container's tree can have found such an entry."""
        if not isinstance(entry, list) or len(entry) not in (8, 9):
            raise StoreDamaged("an entry that is none")
        name, mode, uid, gid, mtime_ns, xattrs, link, payload, *flags = entry
        _check_name(name, is_root=is_root)
        if any(type(number) is not int for number in (mode, uid, gid, mtime_ns, *flags)):
            raise StoreDamaged(f"{name!r}: an attribute that is no number")
        if mode != stat.S_IFMT(mode) | stat.S_IMODE(mode) or abs(mtime_ns) > _MOST_TIME_NS:
            raise StoreDamaged(f"{name!r}: mode {mode:o} or its time is out of range")
        if min(uid, gid) < 0 or max(uid, gid) > _MOST_ID or any(bits & ~KEPT for bits in flags):
            raise StoreDamaged(f"{name!r}: its owner or flags are out of range")
        if is_root and not stat.S_ISDIR(mode):
            raise StoreDamaged("the root is no directory")
        if link is not None and (not isinstance(link, bytes) or len(link) != 16 or stat.S_ISDIR(mode)):
            raise StoreDamaged(f"{name!r}: no such hard link")
        self._xattrs(name, xattrs, mode)
        if payload is not False and not self._is_payload(mode, payload, kind):
            raise StoreDamaged(f"{name!r}: what it holds does not fit its mode {mode:o}{_device(mode, payload)}")

    def _xattrs(self, name: bytes, xattrs: Any, mode: int) -> None:
        if xattrs is None:
            return
        if not isinstance(xattrs, list) or any(
            not isinstance(pair, list) or [type(part) for part in pair] != [str, bytes] for pair in xattrs
        ):
            raise StoreDamaged(f"{name!r}: extended attributes that are none")
        for key, value in xattrs:
            if meaning_of(key, value) is not Meaning.KEPT or (key.endswith(".opaque") and not stat.S_ISDIR(mode)):
                raise StoreDamaged(f"{name!r} carries {key}, which means nothing elsewhere or may not be set")
        if len({key for key, _ in xattrs}) != len(xattrs):
            raise StoreDamaged(f"{name!r} carries an attribute twice")
        if sum(len(os.fsencode(key)) + len(value) for key, value in xattrs) > self._limits.max_xattr_bytes:
            raise StoreDamaged(f"{name!r} carries more than {self._limits.max_xattr_bytes} bytes of attributes")

    def _is_payload(self, mode: int, payload: Any, kind: StateKind) -> bool:
        if stat.S_ISDIR(mode):
            return isinstance(payload, list) and all(_is_digest(digest) for digest in payload)
        if stat.S_ISREG(mode):
            if not isinstance(payload, list) or [type(part) for part in payload] not in ([int, list], [int, bytes]):
                return False
            return 0 <= payload[0] <= _MOST_TIME_NS and (isinstance(payload[1], list) or _is_digest(payload[1]))
        if stat.S_ISLNK(mode):
            return isinstance(payload, bytes) and 0 < len(payload) <= _MOST_TARGET_BYTES and b"\0" not in payload
        if stat.S_ISCHR(mode) and payload == 0 and type(payload) is int:
            return kind is StateKind.ROOTFS  # overlayfs' sign for a deleted entry
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            usual = stat.S_ISCHR(mode) and payload in _EVERYWHERE
            return type(payload) is int and 0 <= payload < 2**64 and (usual or self._devices)
        return (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)) and payload is None


def _below(entry: Entry, known: Mapping[bytes, _Weight]) -> _Weight:
    """What stands below an entry.

    Raises: StoreDamaged: its leaves are out of order.
    """
    leaves = [known[digest] for digest in reversed(below(entry))]
    if any(left.last >= right.first for left, right in pairwise(leaves)):
        raise StoreDamaged(f"the leaves of {entry[0]!r} are out of order, or a name stands twice")
    return _Weight(
        sum(leaf.entries for leaf in leaves),
        1 + max(leaf.levels for leaf in leaves) if leaves else 0,
        sum(leaf.content_bytes for leaf in leaves),
        b"",
        b"",
    )


def _check_name(name: Any, *, is_root: bool) -> None:
    if is_root and name == b"":
        return
    try:
        if is_root or not isinstance(name, bytes) or len(name) > _MOST_NAME_BYTES:
            raise ValueError
        beneath.check_name(name)
    except ValueError:
        raise StoreDamaged(f"{name!r} is no name of an entry") from None


def _device(mode: int, payload: Any) -> str:
    if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)) or type(payload) is not int or not 0 <= payload < 2**64:
        return ""
    return f" (device {os.major(payload)}:{os.minor(payload)})"


def _digest(text: str) -> bytes:
    if not _DIGEST.fullmatch(text):
        raise StoreDamaged(f"{text[:80]!r} is no digest")
    return bytes.fromhex(text)


def _is_digest(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) == 32
