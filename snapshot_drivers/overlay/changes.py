"""What differs between two snapshots, in the container's own terms: overlayfs' signs are read against the image's
layers.

A whiteout is a deletion, an opaque directory hides what the image has there, a copied-up directory is no change by
itself. Two stored trees are compared by their digests, so the cost follows the difference.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from snapshot_drivers.base import Change, StateKind
from snapshot_drivers.errors import UnknownSnapshot
from snapshot_drivers.overlay.image import Image, Parts, image_parts, is_metacopy
from snapshot_drivers.store.manifest import Manifest, StoredTree
from snapshot_drivers.tree import Get, Node, children_of, decode_root


def changes_between(older: Manifest | None, newer: Manifest, get: Get) -> Iterator[Change]:
    """All changes, tree by tree, each in path order; ``None`` is the pristine image with empty volumes.

    Raises: StoreDamaged.
    """
    before = {(tree.kind, tree.path): tree for tree in older.trees} if older else {}
    for tree in newer.trees:
        image = Image(newer.lower_dirs if tree.kind is StateKind.ROOTFS else ())
        found = _Comparison(tree, get, image).run(before.pop((tree.kind, tree.path), None))
        yield from sorted(found, key=lambda change: change.path)
    for gone in before.values():
        yield Change(status="D", path=gone.path, kind=gone.kind)
    files = {file.path: file for file in older.etc_files} if older else {}
    for file in newer.etc_files:
        known = files.get(file.path)
        if known is not None and known.model_copy(update={"mtime_ns": file.mtime_ns}) != file:
            yield Change(status="M" if known.digest != file.digest else "m", path=file.path, kind=StateKind.ETC)


@dataclass(frozen=True)
class _Pair:
    """One directory on both sides, and where in the image stands what shows through it; ``None``: nothing does."""

    parts: Parts
    old: Node | None
    new: Node | None
    old_image: Parts | None
    new_image: Parts | None


_Seen = tuple[int, int, int]


class _Comparison:
    """One tree on both sides."""

    def __init__(self, tree: StoredTree, get: Get, image: Image) -> None:
        self._tree = tree
        self._get = get
        self._image = image

    def run(self, older: StoredTree | None) -> Iterator[Change]:
        new = decode_root(bytes.fromhex(self._tree.root), self._get)
        old = decode_root(bytes.fromhex(older.root), self._get) if older else None
        work = [_Pair((), old, new, (), ())]
        while work:
            pair = work.pop()
            before, after = self._entries(pair)
            deeper: list[_Pair] = []
            for name in sorted(before.keys() | after.keys() | self._uncovered(pair)):
                yield from self._compare(pair, name, before.get(name), after.get(name), deeper)
            work += reversed(deeper)

    def _entries(self, pair: _Pair) -> tuple[Mapping[bytes, Node], Mapping[bytes, Node]]:
        """The entries of both sides, without the leaves that they share: equal leaves hold equal entries."""
        old, new = _digests(pair.old), _digests(pair.new)
        shared = set(old) & set(new) if pair.old_image == pair.new_image else set()
        return self._read(old, shared), self._read(new, shared)

    def _read(self, digests: tuple[bytes, ...], leave_out: set[bytes]) -> Mapping[bytes, Node]:
        directory = Node(b"", stat.S_IFDIR, 0, 0, 0)
        directory.digests = tuple(digest for digest in digests if digest not in leave_out)
        return children_of(directory, self._get)

    def _uncovered(self, pair: _Pair) -> set[bytes]:
        """What the image has there, where it does not show on both sides alike."""
        if pair.old_image == pair.new_image:
            return set()
        shown = [parts for parts in (pair.old_image, pair.new_image) if parts is not None]
        return {name for parts in shown for name in self._image.entries(parts)}

    def _compare(
        self, pair: _Pair, name: bytes, old: Node | None, new: Node | None, deeper: list[_Pair]
    ) -> Iterator[Change]:
        parts = (*pair.parts, name)
        was = self._seen(old, name, pair.old_image)
        now = self._seen(new, name, pair.new_image)
        if was is None and now is None:
            return
        if was is None or now is None:
            yield self._change("A" if was is None else "D", parts)
        elif stat.S_IFMT(was[0]) != stat.S_IFMT(now[0]):
            yield self._change("T", parts)
        elif not stat.S_ISDIR(now[0]):
            # Where one side shows the image's own file, the other is a copy of it that was made to be changed.
            if _content(old, name, pair.old_image) != _content(new, name, pair.new_image):
                yield self._change("M", parts)
            elif old is None or new is None or old.attributes() != new.attributes():
                yield self._change("m", parts)
        elif was != now:
            yield self._change("m", parts)
        old_directory = old if old is not None and old.is_directory else None
        new_directory = new if new is not None and new.is_directory else None
        if old_directory is not None or new_directory is not None:
            old_image = _image_below(old_directory, name, pair.old_image, was)
            new_image = _image_below(new_directory, name, pair.new_image, now)
            deeper.append(_Pair(parts, old_directory, new_directory, old_image, new_image))

    def _seen(self, node: Node | None, name: bytes, image: Parts | None) -> _Seen | None:
        """Mode and owner of what the container sees at a path; ``None``: nothing."""
        if node is not None:
            return None if node.is_whiteout else (node.mode, node.uid, node.gid)
        found = None if image is None else self._image.find((*image, name))
        return None if found is None else (found.st_mode, found.st_uid, found.st_gid)

    def _change(self, status: str, parts: Parts) -> Change:
        path = os.fsdecode(b"/".join(parts))
        return Change(status=status, path=f"{self._tree.path.rstrip('/')}/{path}", kind=self._tree.kind)


def _digests(directory: Node | None) -> tuple[bytes, ...]:
    return (directory.digests or ()) if directory is not None else ()


def _content(node: Node | None, name: bytes, image: Parts | None) -> tuple[Any, ...]:
    """What stands for the content of something that is no directory: of its own, or its place in the image."""
    if node is not None and not is_metacopy(node.xattrs):
        return node.content()
    return image_parts(node.xattrs if node is not None else (), name, image), node.link if node is not None else None


def _image_below(directory: Node | None, name: bytes, above: Parts | None, seen: _Seen | None) -> Parts | None:
    if seen is None or not stat.S_ISDIR(seen[0]):
        return None
    return image_parts(directory.xattrs if directory is not None else (), name, above)


def file_content(manifest: Manifest, path: str, get: Get) -> Iterator[bytes] | None:
    """Content of a regular file as the container saw it, from the snapshot or else from the image.

    Raises: StoreDamaged; UnknownSnapshot: the path is not absolute.
    """
    if not path.startswith("/"):
        raise UnknownSnapshot(f"not an absolute path: {path!r}")
    for stored in manifest.etc_files:
        if stored.path == path:
            return iter([get(bytes.fromhex(stored.digest))])
    trees = sorted(manifest.trees, key=lambda tree: len(tree.path), reverse=True)
    tree = next(one for one in trees if path.startswith(one.path.rstrip("/") + "/"))
    parts = tuple(part for part in os.fsencode(path[len(tree.path.rstrip("/")) :]).split(b"/") if part)
    if b"." in parts or b".." in parts:
        return None
    node = decode_root(bytes.fromhex(tree.root), get)
    image: Parts | None = ()
    for index, part in enumerate(parts):
        if not node.is_directory:
            return None
        child = children_of(node, get).get(part)
        if child is None:
            return _of_image(manifest, tree, (*image, *parts[index:]) if image is not None else None)
        image, node = image_parts(child.xattrs, part, image), child
    if is_metacopy(node.xattrs) and tree.kind is StateKind.ROOTFS:
        return _of_image(manifest, tree, image)
    return _pieces(node, get) if node.is_regular and not node.unreadable else None


def _of_image(manifest: Manifest, tree: StoredTree, parts: Parts | None) -> Iterator[bytes] | None:
    if parts is None or tree.kind is not StateKind.ROOTFS:
        return None
    file = Image(manifest.lower_dirs).open_file(parts)
    return _read_and_close(file) if file is not None else None


def _pieces(node: Node, get: Get) -> Iterator[bytes]:
    position = 0
    for segment in node.segments:
        yield from _zeros(segment.offset - position)
        yield get(segment.digest)
        position = segment.offset + segment.length
    yield from _zeros(node.size - position)


def _zeros(count: int) -> Iterator[bytes]:
    while count > 0:
        yield bytes(min(count, 1 << 20))
        count -= 1 << 20


def _read_and_close(descriptor: int) -> Iterator[bytes]:
    with os.fdopen(descriptor, "rb") as file:
        while piece := file.read(1 << 20):
            yield piece
