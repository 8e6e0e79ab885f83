"""Which objects snapshots need: found by walking their trees, each part once however many share it."""

from __future__ import annotations

import stat
from typing import Any

from snapshot_drivers.errors import StoreDamaged
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import Manifest
from snapshot_drivers.tree import Get, unpack


class Reach:
    """Collects digests, snapshot by snapshot. Without recursion: directories may be nested as deep as one likes."""

    def __init__(self, get: Get) -> None:
        """``get`` reads one object, verified."""
        self._get = get
        self.needed: set[bytes] = set()
        """Digests of all objects that were met: nodes of trees, lists of segments, content."""

    def add(self, manifest: Manifest) -> None:
        """All that the snapshot needs.

        Raises: StoreDamaged: something above the content is missing or damaged, so what it needs is not known.
        """
        for tree in manifest.trees:
            self.add_tree(bytes.fromhex(tree.root))
        self.needed.update(bytes.fromhex(file.digest) for file in manifest.etc_files)
        for image in manifest.processes.images if manifest.processes is not None else ():
            self.needed.update(bytes.fromhex(block) for block in image.blocks)

    def add_tree(self, root: bytes) -> None:
        """All that one tree needs. Raises: StoreDamaged."""
        leaves = self._below(self._read(root)) if self._is_new(root) else []
        while leaves:
            leaf = leaves.pop()
            if self._is_new(leaf):
                for entry in self._read(leaf):
                    leaves += self._below(entry)

    def _below(self, entry: list[Any]) -> list[bytes]:
        """The leaves that an entry names; what else it names is noted."""
        mode, payload = entry[1], entry[7]
        if stat.S_ISDIR(mode) and payload:
            return list(payload)
        if stat.S_ISREG(mode) and payload:
            segments = payload[1]
            if isinstance(segments, bytes):
                segments = self._spans(segments) if self._is_new(segments) else []
            self.needed.update(digest for _, _, digest in segments)
        return []

    def _spans(self, digest: bytes) -> list[Any]:
        return [segment for span in self._read(digest) if self._is_new(span) for segment in self._read(span)]

    def _is_new(self, digest: bytes) -> bool:
        if digest in self.needed:
            return False
        self.needed.add(digest)
        return True

    def _read(self, digest: bytes) -> Any:
        try:
            return unpack(self._get(digest))
        except (ValueError, TypeError) as error:
            raise StoreDamaged(f"object {digest.hex()} is no node of a tree: {error}") from error


def is_stored(root: bytes, content: ContentStore) -> bool:
    """The whole tree is in the store: no object of it is missing, none of its nodes damaged."""
    reach = Reach(content.read)
    try:
        reach.add_tree(root)
    except StoreDamaged:
        return False
    return content.has_all(reach.needed)
