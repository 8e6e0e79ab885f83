"""A driver that takes nothing: a run without checkpoints, to compare one with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from snapshot_drivers.base import CaptureOptions, Change, Coverage, Snapshot, Staged, Target
from snapshot_drivers.errors import UnknownSnapshot
from snapshot_drivers.store.manifest import new_snapshot_id


class NoSnapshots:
    """See ``base.SnapshotDriver``. Its snapshots hold nothing and cannot be restored."""

    name = "none"

    def __init__(self, store: Path) -> None:
        self._taken: dict[str, Snapshot] = {}

    def capture(self, target: Target, parent_id: str | None, options: CaptureOptions) -> Snapshot:
        """Nothing is looked at."""
        snapshot = Snapshot(
            snapshot_id=new_snapshot_id(),
            parent_id=parent_id,
            driver=self.name,
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            coverage=Coverage.of([]),
            root_digest="",
            entries=0,
            stored_bytes=0,
            capture_ms=0,
            frozen_ms=0,
        )
        self._taken[snapshot.snapshot_id] = snapshot
        return snapshot

    def stage(self, target: Target, snapshot_id: str, options: CaptureOptions) -> Staged:
        """There is nothing to restore."""
        raise UnknownSnapshot(f"{snapshot_id} holds nothing")

    def load(self, snapshot_id: str) -> Snapshot:
        """As it was taken."""
        if snapshot_id not in self._taken:
            raise UnknownSnapshot(f"{snapshot_id} holds nothing")
        return self._taken[snapshot_id]

    def diff(self, older_id: str | None, newer_id: str) -> Iterator[Change]:
        """Nothing is known to differ."""
        return iter(())

    def read_file(self, snapshot_id: str, path: str) -> Iterator[bytes] | None:
        """It holds none."""
        return None

    def verify(self, snapshot_ids: Iterable[str], *, content: bool = False) -> dict[str, list[str]]:
        """Nothing can be damaged."""
        return {snapshot_id: [] for snapshot_id in snapshot_ids}

    def forget(self, snapshot_id: str) -> None:
        """It is gone."""
        self._taken.pop(snapshot_id, None)

    def close(self) -> None:
        """Holds nothing open."""
