"""Put a snapshot back: its image is looked at, then a container of it takes the place of the present one."""

from __future__ import annotations

import time
from pathlib import Path

from snapshot_drivers.base import Coverage, RestoreReport, Target
from snapshot_drivers.commit.engine import REPOSITORY, ImageEngine, NoImage
from snapshot_drivers.commit.flat import flat_image
from snapshot_drivers.commit.record import ImageRecord
from snapshot_drivers.crash_points import reached
from snapshot_drivers.errors import RestoreError, RestoreRefused, SnapshotError, StoreDamaged
from snapshot_drivers.pieces import digest_of, plain


class StagedImage:
    """A restore that is ready to be carried out (see ``base.Staged``)."""

    def __init__(
        self, target: Target, record: ImageRecord, *, engine: ImageEngine, most_layers: int, directory: Path
    ) -> None:
        """Checks, and puts layers together where there are more than ``most_layers`` of them.

        ``directory``: where that is done. Raises: RestoreRefused, StoreDamaged, EngineError.
        """
        self.snapshot = record.snapshot
        self._target = target
        self._record = record
        self._engine = engine
        name = record.snapshot.snapshot_id
        if record.base_image_id != target.image_id or record.layer_ids[: len(target.layer_ids)] != target.layer_ids:
            raise RestoreRefused(
                f"snapshot {name} stands on image {record.base_image_id}, the container on {target.image_id}: restore "
                "it into a container of its own image"
            )
        if problems := image_problems(engine, record):
            raise StoreDamaged(problems[0])
        self._image_id = record.image_id
        if len(record.layer_ids) > most_layers:
            self._image_id = flat_image(engine, record, target.layer_ids, directory)
        reached("restore-staged")

    def apply(self, *, verify: str = "difference") -> RestoreReport:
        """See ``base.Staged.apply``; ``full`` has every byte of the image read before the container is touched."""
        began = time.perf_counter()
        name = self.snapshot.snapshot_id
        if verify == "full" and (problems := content_problems(self._engine, self._record, set())):
            raise RestoreError(f"{problems[0]}; the container was not touched")
        try:
            target = self._target.lifecycle.replace(self._image_id)
            reached("restore-started")
            image_id = self._engine.image_of(target.container_id)
        except SnapshotError as error:
            raise RestoreError(f"restoring {name} failed half-way: {error}") from error
        if image_id != self._image_id:
            raise RestoreError(f"the new container stands on image {image_id}, not on that of {name}")
        return RestoreReport(
            target=target,
            restore_ms=1e3 * (time.perf_counter() - began),
            touched=len(self._record.changes),
            verified=verify,
            coverage=Coverage.of(list(self.snapshot.coverage.items)),
        )

    def discard(self) -> None:
        """An image of layers put together stays with its snapshot: the next restore finds it."""


def image_problems(engine: ImageEngine, record: ImageRecord) -> list[str]:
    """Why the image of a snapshot is not there as it was made; none: it is."""
    name = record.snapshot.snapshot_id
    try:
        image = engine.image(f"{REPOSITORY}:{name}")
    except NoImage:
        return [f"the engine has lost the image {REPOSITORY}:{name} of the snapshot: it was removed by hand"]
    if image.image_id != record.image_id or image.layer_ids != record.layer_ids:
        return [f"{REPOSITORY}:{name} names another image ({image.image_id}) than the snapshot's ({record.image_id})"]
    return []


def content_problems(engine: ImageEngine, record: ImageRecord, whole: set[str]) -> list[str]:
    """The same, with every byte of it read; ``whole``: layers that need not be looked at, added to.

    Raises: EngineError: the engine does not answer.
    """
    if problems := image_problems(engine, record):
        return problems
    wanted = set(record.layer_ids) - whole
    try:
        if wanted:
            for _, content in engine.saved(record.image_id):
                found = digest_of(plain(content))
                wanted.discard(found)
                whole |= {found} & set(record.layer_ids)
    except (SnapshotError, OSError) as error:
        return [f"image {record.image_id} cannot be read: {error}"]
    return [f"layer {layer} of image {record.image_id} is not what was stored" for layer in sorted(wanted)]
