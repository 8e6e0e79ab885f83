"""A snapshot in the form in which it leaves its host: it means the same above equal layers anywhere.

Overlayfs keeps notes in ``trusted.overlay.*``. Some are of use only where they were made (file handles, counters) and
are left out, as are the labels of security modules. An opaque directory and protected attributes mean the same
anywhere. Redirects and metadata-only copies take content from the layers below by a path or handle: a snapshot with one
of these stays where it is, since nobody else could tell whether it shows the content that it should.

Source: Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Final

from snapshot_drivers.base import Coverage, CoverageItem, CoverageState, Snapshot, StateKind
from snapshot_drivers.errors import RestoreRefused
from snapshot_drivers.overlay.leaves import PAYLOAD, XATTRS, Entry, below, leaves_below, stored_entry
from snapshot_drivers.store.manifest import Manifest, StoredTree
from snapshot_drivers.tree import Get, Put, pack, unpack

MOST_NODE_BYTES: Final = 8 << 20
"""Of a node of a tree that leaves its host or comes from elsewhere."""

_OVERLAY: Final = "trusted.overlay."
_OF_ITS_HOST: Final = frozenset(_OVERLAY + name for name in ("origin", "impure", "nlink", "uuid", "upper"))
_KEPT: Final = frozenset({"security.capability", "system.posix_acl_access", "system.posix_acl_default"})
_NO_PROCESSES: Final = "its memory was left out of the archive; it will not run after a restore"


class Meaning(Enum):
    """What becomes of an extended attribute that leaves its host."""

    KEPT = "kept"
    LEFT_OUT = "left out"
    BOUND = "bound"
    """The entry cannot leave its host."""


def meaning_of(name: str, value: bytes) -> Meaning:
    """What an extended attribute means elsewhere."""
    if name.startswith(_OVERLAY):
        if name in _OF_ITS_HOST:
            return Meaning.LEFT_OUT
        anywhere = (name == f"{_OVERLAY}opaque" and value == b"y") or (
            name == f"{_OVERLAY}protattr" and 0 < len(value) <= 2 and not value.strip(b"ai")
        )
        return Meaning.KEPT if anywhere else Meaning.BOUND
    return Meaning.KEPT if name in _KEPT or name.startswith("user.") else Meaning.LEFT_OUT


class Porter:
    """Makes snapshots portable; what they share is looked at once."""

    def __init__(self, get: Get, put: Put) -> None:
        """``put`` takes the nodes of trees, changed or not."""
        self._get = get
        self._store = put
        self._ported: dict[bytes, bytes] = {}
        self.left_out: Counter[str] = Counter()
        """Attributes that were left out, by name; those of overlayfs itself are no part of the state."""

    def ported(self, manifest: Manifest, *, processes: bool) -> Manifest:
        """The manifest in its portable form. ``processes``: their images go with it.

        Raises: StoreDamaged. RestoreRefused: it cannot leave this host.
        """
        changes: dict[str, object] = {"lower_dirs": (), "trees": tuple(self._tree(tree) for tree in manifest.trees)}
        if not processes:
            changes |= {"processes": None, "snapshot": without_processes(manifest.snapshot)}
        return manifest.model_copy(update=changes)

    def _tree(self, tree: StoredTree) -> StoredTree:
        root = stored_entry(bytes.fromhex(tree.root), self._get)
        for leaf in leaves_below(root, lambda digest: list(unpack(self._get(digest))), self._ported):
            self._ported[leaf.digest] = self._put([self._entry(entry, tree, leaf.path) for entry in leaf.entries])
        return tree.model_copy(update={"root": self._put(self._entry(root, tree, lambda: "/")).hex()})

    def _put(self, value: object) -> bytes:
        node = pack(value)
        if len(node) > MOST_NODE_BYTES:
            raise RestoreRefused(f"a directory with {len(node)} bytes of attributes at once is not taken elsewhere")
        return self._store(node)

    def _entry(self, entry: Entry, tree: StoredTree, directory: Callable[[], str]) -> Entry:
        ported = list(entry)
        kept = []
        if bound := _bound(entry, directory):
            raise RestoreRefused(
                f"{tree.kind} {tree.path}: {bound}: its content lies in the layers of this host (overlayfs with "
                "redirect_dir or metacopy), so it cannot be taken elsewhere"
            )
        for name, value in entry[XATTRS] or ():
            if meaning_of(name, value) is Meaning.KEPT:
                kept.append([name, value])
            elif not name.startswith(_OVERLAY):
                self.left_out[name] += 1
        ported[XATTRS] = kept or None
        if below(entry):
            ported[PAYLOAD] = [self._ported[digest] for digest in entry[PAYLOAD]]
        return ported


def bound_entry(manifest: Manifest, get: Get) -> str | None:
    """An entry of the root filesystem whose content lies in the directories of the layers; ``None``: there is none.

    Raises: StoreDamaged.
    """
    seen: set[bytes] = set()
    for tree in manifest.trees:
        if tree.kind is StateKind.ROOTFS:
            root = stored_entry(bytes.fromhex(tree.root), get)
            for leaf in leaves_below(root, lambda digest: list(unpack(get(digest))), seen):
                seen.add(leaf.digest)
                for entry in leaf.entries:
                    if bound := _bound(entry, leaf.path):
                        return bound
    return None


def _bound(entry: Entry, directory: Callable[[], str]) -> str:
    for name, value in entry[XATTRS] or ():
        if meaning_of(name, value) is Meaning.BOUND:
            return f"{directory().rstrip('/')}/{entry[0].decode('utf-8', 'backslashreplace')} carries {name}"
    return ""


def without_processes(snapshot: Snapshot) -> Snapshot:
    """The snapshot, its coverage saying that the processes are not in it."""
    return snapshot.model_copy(update={"coverage": covering_no_processes(snapshot.coverage)})


def covering_no_processes(coverage: Coverage) -> Coverage:
    """The coverage of a snapshot from which the processes were taken."""
    items = [
        CoverageItem(kind=item.kind, path=item.path, state=CoverageState.EXCLUDED, reason=_NO_PROCESSES)
        if item.kind is StateKind.PROCESS and item.state is CoverageState.CAPTURED
        else item
        for item in coverage.items
    ]
    return Coverage.of(items)
