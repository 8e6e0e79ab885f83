"""What differs between two snapshots, in the container's own terms: overlayfs' signs are read against the image's
layers.

A whiteout is a deletion, an opaque directory hides what the image has there, a copied-up directory is no change by
itself. Two stored trees are compared by their digests, so the cost follows the difference.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshot_drivers import beneath
from snapshot_drivers.base import Change, StateKind
from snapshot_drivers.errors import UnknownSnapshot
from snapshot_drivers.store.manifest import Manifest, StoredTree
from snapshot_drivers.tree import Get, Node, children_of, decode_root

# The container may set user.overlay.* itself; on a mount without `userxattr` the kernel does not read that.
_OPAQUE = ("trusted.overlay.opaque", b"y")


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


class Image:
    """The image's layers as a merged, read-only look-up; empty where they are not on this host."""

    def __init__(self, lower_dirs: tuple[str, ...]) -> None:
        """Topmost layer first."""
        self._layers = [Path(path) for path in lower_dirs]

    def find(self, parts: tuple[bytes, ...]) -> os.stat_result | None:
        """Attributes of an entry of the image, ``None`` where it has none."""
        for layer in self._layers:
            found, final = _look_in(layer, parts)
            if found is not None or final:
                return found
        return None

    def names(self, parts: tuple[bytes, ...]) -> list[bytes]:
        """Names that the image has in one of its directories."""
        found: dict[bytes, bool] = {}
        for layer in self._layers:
            directory, final = _list_in(layer, parts)
            for name, attributes in directory:
                found.setdefault(name, not (stat.S_ISCHR(attributes.st_mode) and attributes.st_rdev == 0))
            if final:
                break
        return sorted(name for name, there in found.items() if there)


def _look_in(layer: Path, parts: tuple[bytes, ...]) -> tuple[os.stat_result | None, bool]:
    """What one layer says of a path, and whether its word is final (a whiteout, or below an opaque directory)."""
    descriptor = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    place = beneath.Descent(descriptor)
    opaque = False
    try:
        for part in parts[:-1]:
            found = os.stat(part, dir_fd=place.fd, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                return None, True
            place.down(part)
            opaque = opaque or _is_opaque(place.fd)
        found = os.stat(parts[-1], dir_fd=place.fd, follow_symlinks=False)
        gone = stat.S_ISCHR(found.st_mode) and found.st_rdev == 0
        return (None, True) if gone else (found, True)
    except OSError:
        return None, opaque
    finally:
        place.close()
        os.close(descriptor)


def _list_in(layer: Path, parts: tuple[bytes, ...]) -> tuple[list[tuple[bytes, os.stat_result]], bool]:
    descriptor = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    place = beneath.Descent(descriptor)
    opaque = False
    try:
        for part in parts:
            place.down(part)
            opaque = opaque or _is_opaque(place.fd)
        return beneath.list_directory(place.fd), opaque
    except OSError:
        return [], opaque
    finally:
        place.close()
        os.close(descriptor)


def _is_opaque(descriptor: int) -> bool:
    return _OPAQUE in beneath.read_xattrs(descriptor, looked=False)


@dataclass(frozen=True)
class _Pair:
    """One directory on both sides; ``hidden``: the image is not seen through it, on the older or the newer side."""

    parts: tuple[bytes, ...]
    old: Node | None
    new: Node | None
    old_hidden: bool
    new_hidden: bool


class _Comparison:
    """One tree on both sides."""

    def __init__(self, tree: StoredTree, get: Get, image: Image) -> None:
        self._tree = tree
        self._get = get
        self._image = image

    def run(self, older: StoredTree | None) -> Iterator[Change]:
        new = decode_root(bytes.fromhex(self._tree.root), self._get)
        old = decode_root(bytes.fromhex(older.root), self._get) if older else None
        work = [_Pair((), old, new, False, False)]
        while work:
            pair = work.pop()
            if _same_entries(pair.old, pair.new) and pair.old_hidden == pair.new_hidden:
                continue
            deeper: list[_Pair] = []
            for name in self._names(pair):
                yield from self._compare(pair, name, deeper)
            work += reversed(deeper)

    def _names(self, pair: _Pair) -> list[bytes]:
        old = children_of(pair.old, self._get) if pair.old is not None else {}
        new = children_of(pair.new, self._get) if pair.new is not None else {}
        names = old.keys() | new.keys()
        if pair.old_hidden != pair.new_hidden:
            names = names | set(self._image.names(pair.parts))
        return sorted(names)

    def _compare(self, pair: _Pair, name: bytes, deeper: list[_Pair]) -> Iterator[Change]:
        parts = (*pair.parts, name)
        old = children_of(pair.old, self._get).get(name) if pair.old is not None else None
        new = children_of(pair.new, self._get).get(name) if pair.new is not None else None
        was = self._seen(old, parts, hidden=pair.old_hidden)
        now = self._seen(new, parts, hidden=pair.new_hidden)
        if was is None and now is None:
            return
        if was is None or now is None:
            yield self._change("A" if was is None else "D", parts)
        elif stat.S_IFMT(was[0]) != stat.S_IFMT(now[0]):
            yield self._change("T", parts)
        elif not stat.S_ISDIR(now[0]):
            # Where one side shows the image's own file, the other is a copy of it that was made to be changed.
            if old is None or new is None:
                if old is not new:
                    yield self._change("M", parts)
            elif old.content() != new.content():
                yield self._change("M", parts)
            elif old.attributes() != new.attributes():
                yield self._change("m", parts)
        elif was != now:
            yield self._change("m", parts)
        old_directory = old if old is not None and old.is_directory else None
        new_directory = new if new is not None and new.is_directory else None
        if old_directory is not None or new_directory is not None:
            deeper.append(
                _Pair(
                    parts,
                    old_directory,
                    new_directory,
                    pair.old_hidden or was is None or not stat.S_ISDIR(was[0]) or _hides(old_directory),
                    now is None or pair.new_hidden or not stat.S_ISDIR(now[0]) or _hides(new_directory),
                )
            )

    def _seen(self, node: Node | None, parts: tuple[bytes, ...], *, hidden: bool) -> tuple[int, int, int] | None:
        """Mode and owner of what the container sees at a path; ``None``: nothing."""
        if node is not None:
            return None if node.is_whiteout else (node.mode, node.uid, node.gid)
        found = None if hidden else self._image.find(parts)
        return None if found is None else (found.st_mode, found.st_uid, found.st_gid)

    def _change(self, status: str, parts: tuple[bytes, ...]) -> Change:
        path = os.fsdecode(b"/".join(parts))
        return Change(status=status, path=f"{self._tree.path.rstrip('/')}/{path}", kind=self._tree.kind)


def _same_entries(old: Node | None, new: Node | None) -> bool:
    return old is not None and new is not None and old.digests == new.digests


def _hides(directory: Node | None) -> bool:
    return directory is not None and _OPAQUE in directory.xattrs


def file_content(manifest: Manifest, path: str, get: Get) -> Iterator[bytes] | None:
    """Content of a regular file as the container saw it, from the snapshot or else from the image.

    Raises: StoreDamaged; UnknownSnapshot: the path is not absolute.
    """
    if not path.startswith("/"):
        raise UnknownSnapshot(f"not an absolute path: {path!r}")
    for file in manifest.etc_files:
        if file.path == path:
            return iter([get(bytes.fromhex(file.digest))])
    trees = sorted(manifest.trees, key=lambda tree: len(tree.path), reverse=True)
    tree = next(one for one in trees if path.startswith(one.path.rstrip("/") + "/"))
    parts = tuple(part for part in os.fsencode(path[len(tree.path.rstrip("/")) :]).split(b"/") if part)
    node = decode_root(bytes.fromhex(tree.root), get)
    hidden = False
    for part in parts:
        hidden = hidden or _hides(node)
        child = children_of(node, get).get(part) if node.is_directory else None
        if child is None:
            image = Image(manifest.lower_dirs if tree.kind is StateKind.ROOTFS and not hidden else ())
            return _image_file(manifest.lower_dirs, parts) if image.find(parts) is not None else None
        node = child
    return _pieces(node, get) if node.is_regular and not node.unreadable else None


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


def _image_file(lower_dirs: tuple[str, ...], parts: tuple[bytes, ...]) -> Iterator[bytes] | None:
    for layer in lower_dirs:
        descriptor = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        place = beneath.Descent(descriptor)
        try:
            for part in parts[:-1]:
                place.down(part)
            with beneath.closing(beneath.look(place.fd, parts[-1])) as looked:
                return _read_and_close(beneath.open_regular(looked))
        except OSError:
            continue
        finally:
            place.close()
            os.close(descriptor)
    return None


def _read_and_close(descriptor: int) -> Iterator[bytes]:
    with os.fdopen(descriptor, "rb") as file:
        while piece := file.read(1 << 20):
            yield piece
