"""Whether snapshots are whole: manifests, tree nodes and content objects, each looked at once however many share it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from snapshot_drivers.errors import StoreDamaged, UnknownSnapshot
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import ManifestStore
from snapshot_drivers.tree import Node, decode_entry, unpack

MOST_PROBLEMS: Final = 10
"""Problems of one snapshot that are told in full; the rest is counted."""


class Verifier:
    """Looks at snapshots one after the other and remembers the parts that are whole."""

    def __init__(self, content: ContentStore, manifests: ManifestStore, *, rehash: bool) -> None:
        """``rehash``: content objects are read and hashed too; without it they only have to be there.

        Nodes of the trees are always read and hashed.
        """
        self._content = content
        self._manifests = manifests
        self._rehash = rehash
        self._whole: set[bytes] = set()
        """Objects that are whole themselves and in all that they name."""

    def problems(self, snapshot_id: str) -> list[str]:
        """What is wrong with the snapshot; nothing: it can be restored as far as its store goes."""
        try:
            manifest = self._manifests.read(snapshot_id)
        except (UnknownSnapshot, StoreDamaged) as error:
            return [str(error)]
        found: list[str] = []
        for tree in manifest.trees:
            found += self._tree(bytes.fromhex(tree.root), tree.path)
        for file in manifest.etc_files:
            try:
                self._object(bytes.fromhex(file.digest))
            except StoreDamaged as error:
                found.append(f"{file.path}: {error}")
        for image in manifest.processes.images if manifest.processes is not None else ():
            for block in image.blocks:
                try:
                    self._object(bytes.fromhex(block))
                except StoreDamaged as error:
                    found.append(f"processes, {image.name}: {error}")
        rest = len(found) - MOST_PROBLEMS
        return found if rest <= 0 else [*found[:MOST_PROBLEMS], f"and {rest} more such places"]

    def _tree(self, root: bytes, mount: str) -> Iterator[str]:
        """The problems of one tree. Without recursion: directories may be nested as deep as a container likes."""
        if root in self._whole:
            return
        try:
            top = _Leaf(root, [unpack(self._content.read(root))])
        except (StoreDamaged, ValueError, TypeError) as error:
            yield f"{mount}: {error}"
            return
        way = [top]
        while way:
            leaf = way[-1]
            try:
                below = self._next(leaf)
            except (StoreDamaged, ValueError, TypeError) as error:
                leaf.whole = False
                yield f"{_path(mount, way)}: {error}"
                continue
            if below is not None:
                way.append(below)
                continue
            way.pop()
            if leaf.whole:
                self._whole.add(leaf.digest)
            elif way:
                way[-1].whole = False

    def _next(self, leaf: _Leaf) -> _Leaf | None:
        """The next leaf to look at below this one; ``None``: it is done.

        Raises: StoreDamaged: something that it names is missing or damaged. ValueError, TypeError: it is no such thing.
        """
        while True:
            while leaf.below:
                digest = leaf.below.pop()
                if digest not in self._whole:
                    return _Leaf(digest, unpack(self._content.read(digest)))
            stored = next(leaf.entries, None)
            if stored is None:
                return None
            leaf.name = stored[0]
            node = decode_entry(stored, self._content.read)
            leaf.below = list(reversed(node.digests or ()))
            self._file(node)

    def _file(self, node: Node) -> None:
        for segment in node.segments:
            self._object(segment.digest)

    def _object(self, digest: bytes) -> None:
        if digest in self._whole:
            return
        if self._rehash or digest not in self._content:
            self._content.read(digest)
        self._whole.add(digest)


class _Leaf:
    """A run of entries of one directory that is being looked at."""

    __slots__ = ("below", "digest", "entries", "name", "whole")

    def __init__(self, digest: bytes, entries: list[Any]) -> None:
        self.digest = digest
        self.entries = iter(entries)
        self.below: list[bytes] = []
        """Leaves of the entry at hand that are still to be looked at."""
        self.name = b""
        self.whole = True


def _path(mount: str, way: list[_Leaf]) -> str:
    """The entry at hand; the first name is the root's own."""
    names = b"/".join(leaf.name for leaf in way[1:])
    return f"{mount.rstrip('/')}/{names.decode('utf-8', 'backslashreplace')}"
