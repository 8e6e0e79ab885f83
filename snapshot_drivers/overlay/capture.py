"""Take a snapshot: freeze, store what changed in every tree, thaw, commit the pack, then the manifest."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

from snapshot_drivers.base import (
    CaptureOptions,
    Coverage,
    CoverageItem,
    CoverageState,
    Snapshot,
    StateKind,
    Target,
)
from snapshot_drivers.crash_points import reached
from snapshot_drivers.errors import CaptureError, ContainerNotRunning
from snapshot_drivers.freezer import Freezer
from snapshot_drivers.leases import Leases
from snapshot_drivers.overlay.etc_files import capture_etc
from snapshot_drivers.overlay.held import Held
from snapshot_drivers.overlay.layers import Layers, find_layers
from snapshot_drivers.overlay.paths import PathSet, covers
from snapshot_drivers.overlay.scan import ScannedTree
from snapshot_drivers.overlay.sources import OpenMounts, Source, Sources, open_sources, without
from snapshot_drivers.overlay.tracking import Tracking
from snapshot_drivers.running import not_captured, process
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.limits import StoreLimits
from snapshot_drivers.store.manifest import Manifest, ManifestStore, StoredFile, StoredTree, new_snapshot_id
from snapshot_drivers.store.reach import is_stored
from snapshot_drivers.store.writer import PackWriter

HELPERS_MOUNT: Final = "/.orchestrator"
"""Where the product's own helpers are mounted in a container: read-only, and no part of its state."""
_FREEZES_S: Final = (5.0, 5.0, 60.0)
"""How long each look may hold the container still. What a look was let go for is known at the next, which is short; a
tree that takes longer even then is worth a longer hold: a snapshot of one moment is what is asked for."""
_FILES_ONLY: Final = "the overlay driver takes files only; it will not run after a restore"


@dataclass
class Index:
    """What the last capture or restore of this run knows of the container's trees; only ever makes a walk cheaper."""

    trees: dict[tuple[StateKind, str], ScannedTree] = field(default_factory=dict)
    mapped: frozenset[bytes] = frozenset()
    """Container paths that were mapped shared and writable then."""
    upper: Path | None = None
    """The upper directory it belongs to."""
    store_state: str = ""
    """State of the store in which every object of the trees was there (``ContentStore.hold``); empty: not known."""


class Companion(Protocol):
    """Takes along what is no file, in the same snapshot."""

    def store(self, put: Callable[[bytes], bytes]) -> list[CoverageItem]:
        """What it holds is in the pack; called once the files have been looked at. Its word on the processes."""

    def seal(self, manifest: Manifest) -> Manifest:
        """The manifest as it is to be written."""


@dataclass
class _Taken:
    """What one frozen look at the container gave."""

    trees: list[tuple[Source, ScannedTree]]
    left_out: list[CoverageItem]
    etc_files: tuple[StoredFile, ...]
    mapped: frozenset[bytes]
    processes: list[CoverageItem]


def skip_set(options: CaptureOptions, mount: str, *own: str) -> PathSet:
    """Paths of one tree that no walk enters; ``own``: what the product itself has there now."""
    return PathSet.of([*options.excluded, HELPERS_MOUNT, *own], mount, passing=options.volatile)


class Capture:
    """One capture of one container."""

    def __init__(
        self,
        target: Target,
        options: CaptureOptions,
        *,
        content: ContentStore,
        manifests: ManifestStore,
        freezer: Freezer,
        open_mounts: OpenMounts,
        index: Index,
        tracking: Tracking | None = None,
        companion: Companion | None = None,
    ) -> None:
        """``index`` is that of the run's last capture or restore; no tree of it is changed."""
        self._companion = companion
        self._target = without(target, options.excluded)
        self._options = options
        self._content = content
        self._manifests = manifests
        self._freezer = freezer
        self._open_mounts = open_mounts
        self._index = index
        self._tracking = tracking or Tracking.without()

    def run(self, parent_id: str | None) -> tuple[Snapshot, Index]:
        """The snapshot exists; the index fits the container as it was captured.

        Raises: CaptureError, LimitExceeded, ContainerNotRunning, EngineError.
        """
        try:
            with self._content.hold() as store_state:
                return self._run(parent_id, store_state)
        except OSError as error:
            raise CaptureError(f"cannot capture container {self._target.container_id[:12]}: {error}") from error

    def _run(self, parent_id: str | None, store_state: str) -> tuple[Snapshot, Index]:
        began = time.perf_counter()
        layers = find_layers(self._target)
        index = self._trusted(layers, store_state)
        entries = sum(tree.entries for tree in index.trees.values())
        self._tracking.prepare(layers.upper, self._target.engine_root, entries)
        snapshot_id = new_snapshot_id()
        problems: list[CoverageItem] = []
        with (
            self._content.writer(
                snapshot_id, StoreLimits(self._options.store_quota_bytes, self._options.min_free_bytes)
            ) as writer,
            open_sources(self._target, layers, self._open_mounts) as sources,
        ):
            if self._target.init_pid is None:
                taken, frozen_ms = self._look(sources, writer, index, stand_still=True), 0.0
                reason = "the container did not run, so nothing could be seen of what ran in it"
                problems.append(process("processes", CoverageState.EXCLUDED, reason))
            else:
                taken, frozen_ms = self._look_frozen(sources, writer, index, problems)
            if self._companion is not None:
                taken.processes = self._companion.store(writer.put)
        reached("after-pack")
        captured = [
            CoverageItem(kind=tree.kind, path=tree.path, state=CoverageState.CAPTURED)
            for tree, _ in taken.trees
            if not covers(self._options.volatile, tree.path)
        ] + [CoverageItem(kind=StateKind.ETC, path=file.path, state=CoverageState.CAPTURED) for file in taken.etc_files]
        snapshot = Snapshot(
            snapshot_id=snapshot_id,
            parent_id=parent_id,
            driver="overlay",
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            coverage=Coverage.of(
                [
                    *captured,
                    *taken.left_out,
                    *_problems(taken),
                    *_excluded(self._options, taken),
                    *taken.processes,
                    *problems,
                ]
            ),
            root_digest=_digest(taken),
            entries=sum(scanned.entries for _, scanned in taken.trees),
            stored_bytes=writer.stored_bytes,
            capture_ms=1e3 * (time.perf_counter() - began),
            frozen_ms=frozen_ms,
        )
        manifest = self._manifest(snapshot, taken, layers)
        if self._companion is not None:
            manifest = self._companion.seal(manifest)
        self._manifests.write(manifest)
        reached("after-manifest")
        trees = {(tree.kind, tree.path): scanned for tree, scanned in taken.trees}
        self._tracking.rebase(trees, self._options)
        return manifest.snapshot, Index(trees, taken.mapped, layers.upper, store_state)

    def _trusted(self, layers: Layers, store_state: str) -> Index:
        """The index, without trees that are not stored as a whole any more: what is taken over unread must be there."""
        if self._index.upper != layers.upper:
            return Index()
        if self._index.store_state == store_state:
            return self._index
        trees = {key: tree for key, tree in self._index.trees.items() if is_stored(tree.digest, self._content)}
        return replace(self._index, trees=trees)

    def _look_frozen(
        self, sources: Sources, writer: PackWriter, index: Index, problems: list[CoverageItem]
    ) -> tuple[_Taken, float]:
        """Look at the frozen container; if the watchdog let it go meanwhile, again with what was learned."""
        frozen_ms = 0.0
        for deadline_s in _FREEZES_S:
            with self._freezer.frozen(deadline_s=deadline_s) as freeze:
                taken = self._look(sources, writer, index, stand_still=freeze.complete)
                reached("frozen")
            frozen_ms += freeze.frozen_ms
            if freeze.complete and freeze.held:
                return taken, frozen_ms
            if not self._freezer.pids():
                raise ContainerNotRunning(f"container {self._target.container_id[:12]} stopped during the capture")
            index = Index({(tree.kind, tree.path): scanned for tree, scanned in taken.trees}, taken.mapped)
        reason = "the container could not be kept frozen, so files may be of different moments"
        problems.append(process("freeze", CoverageState.UNKNOWN, reason))
        return taken, frozen_ms

    def _look(self, sources: Sources, writer: PackWriter, index: Index, *, stand_still: bool) -> _Taken:
        pids = self._freezer.pids() if self._target.init_pid is not None else []
        self._tracking.look()
        if not stand_still:
            self._tracking.doubt()  # a call that waits may hold a file that has no number
        held = Held(pids, index.mapped, stand_still=stand_still)
        leases = held.leases(others=sources.are_shared)
        return _Taken(
            trees=[(source, self._scan(source, writer, index, held, leases)) for source in sources.trees],
            left_out=list(sources.left_out),
            etc_files=capture_etc(self._target, writer.put),
            mapped=held.mapped,
            processes=not_captured(pids, _FILES_ONLY),
        )

    def _scan(self, source: Source, writer: PackWriter, index: Index, held: Held, leases: Leases) -> ScannedTree:
        return self._tracking.walk(
            source,
            put=writer.put,
            options=self._options,
            skip=skip_set(self._options, source.path),
            index=index.trees.get((source.kind, source.path)),
            held=held,
            leases=leases,
        )

    def _manifest(self, snapshot: Snapshot, taken: _Taken, layers: Layers) -> Manifest:
        return Manifest(
            snapshot=snapshot,
            image_id=self._target.image_id,
            layer_ids=self._target.layer_ids,
            architecture=self._target.architecture,
            run_id=self._target.run_id,
            lower_dirs=layers.image,
            trees=tuple(
                StoredTree(
                    kind=tree.kind, path=tree.path, name=tree.name, root=scanned.digest.hex(), entries=scanned.entries
                )
                for tree, scanned in taken.trees
            ),
            etc_files=taken.etc_files,
        )


def _problems(taken: _Taken) -> list[CoverageItem]:
    return [
        CoverageItem(
            kind=tree.kind,
            path=tree.path.rstrip("/")
            + problem.path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"),
            state=CoverageState.MISSING,
            reason=problem.reason,
        )
        for tree, scanned in taken.trees
        for problem in scanned.problems
    ]


def _excluded(options: CaptureOptions, taken: _Taken) -> list[CoverageItem]:
    emptied = "volatile by the task: emptied on restore"
    return [
        CoverageItem(kind=tree.kind, path=tree.path, state=CoverageState.EXCLUDED, reason=emptied)
        for tree, _ in taken.trees
        if covers(options.volatile, tree.path)
    ] + [
        CoverageItem(kind=StateKind.ROOTFS, path=path, state=CoverageState.EXCLUDED, reason=reason)
        for paths, reason in (
            (options.excluded, "excluded by the task: left as it is"),
            (options.volatile, "volatile by the task: deleted on restore"),
        )
        for path in paths
    ]


def _digest(taken: _Taken) -> str:
    parts = [[tree.kind, tree.path, scanned.digest.hex()] for tree, scanned in taken.trees]
    for file in taken.etc_files:
        parts.append([StateKind.ETC, file.path, f"{file.digest} {file.mode:o} {file.uid}:{file.gid}"])
    return hashlib.sha256(json.dumps(sorted(parts)).encode()).hexdigest()
