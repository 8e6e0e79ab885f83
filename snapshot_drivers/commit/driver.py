"""The ``commit`` driver: the engine's own commit, and a new container for each restore.

It asks the engine for everything and opens no path of the engine's host, so it works on any storage driver, through a
remote engine, and without root. Slow, since the engine packs all that changed at each commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from snapshot_drivers.base import CaptureOptions, Change, Snapshot, Staged, Target
from snapshot_drivers.commit.capture import Capture
from snapshot_drivers.commit.changes import differences
from snapshot_drivers.commit.engine import DEFAULT_ENGINE, FLAT, REPOSITORY, ImageEngine, NoImage
from snapshot_drivers.commit.record import DIRECTORY, Records
from snapshot_drivers.commit.restore import StagedImage, content_problems, image_problems
from snapshot_drivers.errors import EngineError, StoreDamaged, UnknownSnapshot, UnsupportedHost


class CommitDriver:
    """See ``base.SnapshotDriver``. Needs nothing but an engine."""

    name = "commit"

    def __init__(self, store: Path, *, engine: str = DEFAULT_ENGINE, most_layers: int = 100) -> None:
        """``engine``: address of the engine that runs the container. ``most_layers``: more are put together.

        Raises: UnsupportedHost: such an image could not be made (engines end at about 125 layers).
        """
        if not 2 <= most_layers <= 120:
            raise UnsupportedHost(f"snapshots.options.most_layers: {most_layers} is no number from 2 to 120")
        self._engine = ImageEngine(engine)
        self._records = Records(store)
        self._directory = store / DIRECTORY
        self._most_layers = most_layers

    def capture(self, target: Target, parent_id: str | None, options: CaptureOptions) -> Snapshot:
        """See ``base.SnapshotDriver.capture``."""
        return Capture(target, options, engine=self._engine, records=self._records).run(parent_id)

    def stage(self, target: Target, snapshot_id: str, options: CaptureOptions) -> Staged:  # noqa: ARG002 it has none
        """See ``base.SnapshotDriver.stage``."""
        record = self._records.read(snapshot_id)
        return StagedImage(
            target, record, engine=self._engine, most_layers=self._most_layers, directory=self._directory
        )

    def load(self, snapshot_id: str) -> Snapshot:
        """See ``base.SnapshotDriver.load``."""
        return self._records.read(snapshot_id).snapshot

    def diff(self, older_id: str | None, newer_id: str) -> Iterator[Change]:
        """See ``base.SnapshotDriver.diff``; a path that differs from the image in both alike is not named."""
        older = self._records.read(older_id).changes if older_id is not None else ()
        for status, path in differences(older, self._records.read(newer_id).changes):
            yield Change(status=status, path=path)

    def read_file(self, snapshot_id: str, path: str) -> Iterator[bytes] | None:
        """See ``base.SnapshotDriver.read_file``."""
        image_id = self._records.read(snapshot_id).image_id
        try:
            return self._engine.read_file(image_id, path)
        except NoImage as error:
            raise StoreDamaged(f"the image of {snapshot_id} is gone: {error}") from error

    def verify(self, snapshot_ids: Iterable[str], *, content: bool = False) -> dict[str, list[str]]:
        """See ``base.SnapshotDriver.verify``."""
        whole: set[str] = set()
        return {snapshot_id: self._problems(snapshot_id, whole, content) for snapshot_id in snapshot_ids}

    def forget(self, snapshot_id: str) -> None:
        """See ``base.SnapshotDriver.forget``; its image goes where no container and no other image needs it.

        Raises: EngineError: the image is still there.
        """
        try:
            self._records.delete(snapshot_id)
        except UnknownSnapshot:
            return
        for tag in (snapshot_id, f"{snapshot_id}{FLAT}"):
            self._engine.remove(f"{REPOSITORY}:{tag}")

    def close(self) -> None:
        """See ``base.SnapshotDriver.close``."""
        self._engine.close()

    def _problems(self, snapshot_id: str, whole: set[str], content: bool) -> list[str]:
        try:
            record = self._records.read(snapshot_id)
            return content_problems(self._engine, record, whole) if content else image_problems(self._engine, record)
        except (UnknownSnapshot, StoreDamaged, EngineError, UnsupportedHost) as error:
            return [str(error)]
