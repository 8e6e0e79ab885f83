"""The ``overlay`` driver: commits the delta of the writable layer, volumes and memory file systems in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from snapshot_drivers import namespaces
from snapshot_drivers.base import CaptureOptions, Change, RestoreReport, Snapshot, Staged, Target
from snapshot_drivers.freezer import Freezer
from snapshot_drivers.known_mounts import KnownMounts
from snapshot_drivers.overlay.capture import Capture, Companion, Index
from snapshot_drivers.overlay.changes import changes_between, file_content
from snapshot_drivers.overlay.index_file import load_index, save_index
from snapshot_drivers.overlay.restore import StagedRestore
from snapshot_drivers.overlay.tracker import HELPER_NAME
from snapshot_drivers.overlay.tracking import MANY_ENTRIES, Tracking
from snapshot_drivers.overlay.verify import Verifier
from snapshot_drivers.recent import Recent
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import ManifestStore


class OverlayDriver:
    """See ``base.SnapshotDriver``. Needs root on the engine's host, an engine on overlay2, and the ``enter`` helper."""

    name = "overlay"

    def __init__(self, store: Path, *, tracker_from_entries: int | None = MANY_ENTRIES) -> None:
        """``store`` is the store directory, with the static helpers in ``bin`` beside it; nothing is started yet.

        ``tracker_from_entries``: from how many entries on the kernel is asked which of them changed, so that the others
        need not be looked at; ``None``: never.
        """
        self._store = store
        self._helper = store.parent / "bin" / namespaces.HELPER_NAME
        self._content = ContentStore(store)
        self._manifests = ManifestStore(store)
        self._freezers = Recent[Freezer]()
        self._indexes: dict[str, Index] = {}
        self._trackings = Recent[Tracking]()
        self._mounts = Recent[KnownMounts]()
        self._tracker_from = tracker_from_entries

    def capture(
        self,
        target: Target,
        parent_id: str | None,
        options: CaptureOptions,
        *,
        companion: Companion | None = None,
    ) -> Snapshot:
        """See ``base.SnapshotDriver.capture``; ``companion`` adds what is no file."""
        capture = Capture(
            target,
            options.model_copy(update={"lenient": False}),  # the same look as any other
            content=self._content,
            manifests=self._manifests,
            freezer=self._freezer(target),
            open_mounts=self._open_mounts,
            index=self._index(target),
            tracking=self._tracking(target),
            companion=companion,
        )
        snapshot, self._indexes[target.container_id] = capture.run(parent_id)
        return snapshot

    def stage(self, target: Target, snapshot_id: str, options: CaptureOptions) -> Staged:
        """See ``base.SnapshotDriver.stage``."""
        staged = StagedRestore(
            target,
            self._manifests.read(snapshot_id),
            options,
            content=self._content,
            freezer=self._freezer(target),
            open_mounts=self._open_mounts,
            index=self._index(target),
            tracking=self._tracking(target),
        )
        return _Remembering(staged, self._indexes, target.container_id, self._known_mounts(target))

    def load(self, snapshot_id: str) -> Snapshot:
        """See ``base.SnapshotDriver.load``."""
        return self._manifests.read(snapshot_id).snapshot

    def diff(self, older_id: str | None, newer_id: str) -> Iterator[Change]:
        """See ``base.SnapshotDriver.diff``."""
        older = self._manifests.read(older_id) if older_id is not None else None
        return changes_between(older, self._manifests.read(newer_id), self._content.read)

    def read_file(self, snapshot_id: str, path: str) -> Iterator[bytes] | None:
        """See ``base.SnapshotDriver.read_file``."""
        return file_content(self._manifests.read(snapshot_id), path, self._content.read)

    def verify(self, snapshot_ids: Iterable[str], *, content: bool = False) -> dict[str, list[str]]:
        """See ``base.SnapshotDriver.verify``."""
        self._content.distrust()
        verifier = Verifier(self._content, self._manifests, rehash=content)
        return {snapshot_id: verifier.problems(snapshot_id) for snapshot_id in snapshot_ids}

    def forget(self, snapshot_id: str) -> None:
        """See ``base.SnapshotDriver.forget``."""
        self._manifests.delete(snapshot_id)

    def close(self) -> None:
        """See ``base.SnapshotDriver.close``; the index is kept for the next process."""
        for container_id, index in self._indexes.items():
            save_index(self._store, container_id, index)
        self._indexes.clear()
        self._mounts.close()
        self._freezers.close()
        self._trackings.close()
        self._content.close()

    def _open_mounts(self, target: Target, paths: list[str]) -> namespaces.OpenedMounts:
        if target.init_pid is None:
            return namespaces.OpenedMounts({}, [])
        return self._known_mounts(target).open(target.init_pid, paths)

    def _known_mounts(self, target: Target) -> KnownMounts:
        container_id = target.container_id
        return self._mounts.of(container_id, lambda: KnownMounts(container_id, self._helper))

    def _freezer(self, target: Target) -> Freezer:
        return self._freezers.of(target.freeze_group, lambda: Freezer(target.freeze_group))

    def _tracking(self, target: Target) -> Tracking:
        helper = self._helper.with_name(HELPER_NAME)
        return self._trackings.of(target.container_id, lambda: Tracking(helper, from_entries=self._tracker_from))

    def _index(self, target: Target) -> Index:
        if target.container_id not in self._indexes:
            self._indexes[target.container_id] = load_index(self._store, target.container_id)
        return self._indexes[target.container_id]


class _Remembering:
    """A staged restore that leaves the driver an index of what it proved."""

    def __init__(
        self, staged: StagedRestore, indexes: dict[str, Index], container_id: str, mounts: KnownMounts
    ) -> None:
        self._staged = staged
        self._indexes = indexes
        self._container_id = container_id
        self._mounts = mounts
        self.snapshot = staged.snapshot

    def apply(self, *, verify: str = "difference") -> RestoreReport:
        self._indexes[self._container_id] = Index()
        self._mounts.close()
        try:
            report = self._staged.apply(verify=verify)
        finally:
            self._mounts.close()  # the container may be a copy of which nobody hears again
        self._indexes[self._container_id] = self._staged.index
        return report

    def discard(self) -> None:
        self._staged.discard()
