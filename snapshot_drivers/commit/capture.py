"""Take a snapshot: the engine commits the container, then the record is written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from snapshot_drivers.base import (
    CaptureOptions,
    Coverage,
    CoverageItem,
    CoverageState,
    Snapshot,
    StateKind,
    Target,
)
from snapshot_drivers.commit.changes import DELETED, Changes, stacked, without_directories
from snapshot_drivers.commit.engine import REPOSITORY, ImageEngine, snapshot_of
from snapshot_drivers.commit.record import ImageRecord, Records, state_digest
from snapshot_drivers.crash_points import reached
from snapshot_drivers.errors import CaptureError, LimitExceeded, StoreDamaged, UnknownSnapshot
from snapshot_drivers.left_out import mount_left_out
from snapshot_drivers.store.manifest import new_snapshot_id

HELPERS_MOUNT: Final = "/.orchestrator"
_SHOWN: Final = 20
_SHOWN_CHARS: Final = 200
_NOT_AN_IMAGES: Final = (
    "an image holds no sockets, no parts of a second, no holes and no extended attributes but file capabilities"
)
_WHITEOUT: Final = ".wh."
_NO_NAME: Final = "in an image, names that begin so stand for what was deleted"
_VOLUME: Final = "docker commit holds no volumes and binds: it is left as it is"
_IN_MEMORY: Final = "docker commit holds no memory file systems: it is empty after a restore"
_ETC: Final = "the engine's own file, in no image: it is left as it is"
_PROCESS: Final = "the commit driver takes files only; it will not run after a restore"


class Capture:
    """One capture of one container."""

    def __init__(self, target: Target, options: CaptureOptions, *, engine: ImageEngine, records: Records) -> None:
        self._target = target
        self._options = options
        self._engine = engine
        self._records = records

    def run(self, parent_id: str | None) -> Snapshot:
        """The snapshot exists.

        Raises: CaptureError: also where the task excludes paths, which an image cannot. LimitExceeded.
            ContainerNotRunning. EngineError.
        """
        if self._options.excluded or self._options.volatile:
            raise CaptureError(
                "the commit driver takes the root filesystem as a whole: take excluded and volatile paths out of the "
                "task's snapshots, or choose another driver"
            )
        began = time.perf_counter()
        container_id, snapshot_id = self._target.container_id, new_snapshot_id()
        processes = list(self._processes())
        committing = time.perf_counter()
        image_id = self._engine.commit(container_id, snapshot_id)
        frozen_ms = 1e3 * (time.perf_counter() - committing) if self._target.init_pid is not None else 0.0
        reached("after-pack")
        try:
            below = self._engine.image(self._engine.image_of(container_id))
            changes = stacked(self._changes_of(below.tags), self._changes())
            image = self._engine.image(image_id)
        except BaseException:
            self._engine.remove(f"{REPOSITORY}:{snapshot_id}")
            raise
        is_stored = image.layer_ids == self._layers_of(parent_id)
        snapshot = Snapshot(
            snapshot_id=snapshot_id,
            parent_id=parent_id,
            driver="commit",
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            coverage=Coverage.of([*self._coverage(), *_hidden(changes), *processes]),
            root_digest=state_digest(image.layer_ids),
            entries=len(changes),
            stored_bytes=0 if is_stored else max(0, image.size - below.size),
            capture_ms=1e3 * (time.perf_counter() - began),
            frozen_ms=frozen_ms,
        )
        self._records.write(
            ImageRecord(
                snapshot=snapshot,
                image_id=image.image_id,
                layer_ids=image.layer_ids,
                base_image_id=self._target.image_id,
                changes=changes,
            )
        )
        reached("after-manifest")
        return snapshot

    def _changes(self) -> Changes:
        """Relative to the image of the container as it is now. Raises: LimitExceeded."""
        found = self._engine.changes(self._target.container_id)
        if len(found) > self._options.max_entries:
            raise LimitExceeded(
                f"the container has more changed entries than max_entries ({self._options.max_entries})"
            )
        return without_directories(found, HELPERS_MOUNT)

    def _changes_of(self, tags: tuple[str, ...]) -> Changes:
        """Those of the snapshot whose image has one of these tags; none: it is the run's own image."""
        for tag in tags:
            if (name := snapshot_of(tag)) is not None:
                try:
                    return self._records.read(name).changes
                except (UnknownSnapshot, StoreDamaged):
                    continue
        return ()

    def _layers_of(self, parent_id: str | None) -> tuple[str, ...]:
        if parent_id is None:
            return ()
        try:
            return self._records.read(parent_id).layer_ids
        except (UnknownSnapshot, StoreDamaged):
            return ()

    def _processes(self) -> Iterator[CoverageItem]:
        if self._target.init_pid is None:
            reason = "the container did not run, so nothing could be seen of what ran in it"
            yield CoverageItem(kind=StateKind.PROCESS, path="processes", state=CoverageState.EXCLUDED, reason=reason)
            return
        found = [line.partition(" ") for line in map(str.strip, self._engine.processes(self._target.container_id))]
        others = [
            f"pid {pid} {' '.join(command.split())[:_SHOWN_CHARS]}"
            for pid, _, command in found
            if pid != str(self._target.init_pid) and not command.strip().startswith(f"{HELPERS_MOUNT}/")
        ]
        if len(others) > _SHOWN:
            others = [*others[:_SHOWN], f"{len(others) - _SHOWN} more processes"]
        for text in others:
            yield CoverageItem(kind=StateKind.PROCESS, path=text, state=CoverageState.EXCLUDED, reason=_PROCESS)

    def _coverage(self) -> Iterator[CoverageItem]:
        yield CoverageItem(kind=StateKind.ROOTFS, path="/", state=CoverageState.CAPTURED)
        yield CoverageItem(kind=StateKind.ROOTFS, path="/", state=CoverageState.EXCLUDED, reason=_NOT_AN_IMAGES)
        for path, _ in self._target.etc_files:
            yield CoverageItem(kind=StateKind.ETC, path=path, state=CoverageState.EXCLUDED, reason=_ETC)
        for mount in self._target.mounts:
            yield mount_left_out(mount, in_memory=_IN_MEMORY, otherwise=_VOLUME)


def _hidden(changes: Changes) -> Iterator[CoverageItem]:
    """Files whose names a layer keeps for what it deletes: the engine takes them for that."""
    for path, kind in changes:
        if kind != DELETED and path.rpartition("/")[2].startswith(_WHITEOUT):
            yield CoverageItem(kind=StateKind.ROOTFS, path=path, state=CoverageState.MISSING, reason=_NO_NAME)
