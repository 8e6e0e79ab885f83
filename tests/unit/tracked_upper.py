"""An upper directory below a real overlay, captured and restored by what a tracker reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from snapshot_drivers.base import Snapshot, StateKind
from snapshot_drivers.overlay.audit import Audit
from snapshot_drivers.overlay.capture import Capture, Index
from snapshot_drivers.overlay.scan import ScannedTree
from snapshot_drivers.overlay.tracker import Tracker
from snapshot_drivers.overlay.tracking import Tracking
from tests.built_helpers import built_helpers
from tests.unit.mounted_upper import MountedUpper

KEY = (StateKind.ROOTFS, "/")


class TrackedUpper(MountedUpper):
    """Everything happens in ``merged``; each capture goes by the last one's index, and by the tracker's word."""

    def __init__(self, top: Path, *, make_audit: Any = Audit) -> None:
        super().__init__(top)
        self.tracking = Tracking(built_helpers() / "tracker", from_entries=0, make_audit=make_audit)
        self.index = Index()
        self.start()

    def _parts(self) -> dict[str, Any]:
        return {**super()._parts(), "tracking": self.tracking}

    def take(self) -> Snapshot:
        snapshot, self.index = self.capture(self.index)
        return snapshot

    def go_back(self, snapshot: Snapshot) -> None:
        with self.staged(snapshot.snapshot_id, self.index) as staged:
            staged.apply()
            self.index = staged.index

    def whole(self) -> Snapshot:
        """A capture that looks at every entry and reads every file."""
        parts = {**super()._parts(), "manifests": self.manifests, "index": Index()}
        return Capture(self.target(), self.options, **parts).run(None)[0]

    @property
    def tree(self) -> ScannedTree:
        return self.index.trees[KEY]

    @property
    def tracker(self) -> Tracker:
        assert self.tracking.tracker is not None
        return self.tracking.tracker

    def close(self) -> None:
        self.tracking.close()
        self.kill()
        self.content.close()
