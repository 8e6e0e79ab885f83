"""Everything in a data directory read and compared: the store byte by byte, then each run's log against it.

What the store's own check takes out of it is missing from then on, so that a capture can store it again; ``verify``
then says, run by run, which breakpoints that touches.
"""

from __future__ import annotations

import os

from pydantic import BaseModel, ConfigDict

from orchestrator.context_log import ContextLog
from orchestrator.data_dir import DataDir
from orchestrator.errors import HostError, LogDamaged, TaskError
from orchestrator.run_dir import RunDir
from orchestrator.stored import driver_of
from orchestrator.verify import Problem, Unrestorable, verify
from snapshot_drivers.errors import UnsupportedHost
from snapshot_drivers.store.fsck import StoreCheck, StoreChecker


class PackDamage(BaseModel):
    """A pack that was not as it was written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pack: str
    reason: str
    rescued: int
    """Objects of it that were whole and lie in another pack now."""
    moved_to: str | None
    """``None``: it was left in the store."""


class RunDamage(BaseModel):
    """A run that is not whole."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    problems: list[Problem]
    breakpoints: list[Unrestorable]
    """Those that cannot be restored because of it."""


class FileSystemCheck(BaseModel):
    """What ``fsck`` answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    whole: bool
    packs: int
    objects: int
    content_bytes: int
    snapshots: int
    lost_objects: int
    """Damaged objects that are whole nowhere: the next capture that meets their content stores them again."""
    damaged_packs: list[PackDamage]
    damaged_manifests: dict[str, str]
    """Snapshots whose manifest cannot be read, with the reason."""
    cache_remade: bool
    runs: int
    damaged_runs: list[RunDamage]


def fsck(place: DataDir, *, repair: bool = True) -> FileSystemCheck:
    """All of it has been read. ``repair``: damaged packs are put aside, so that their content can be stored again.

    Raises: HostError: the store cannot be read at all, or a damaged pack not be put aside.
    """
    try:
        store = StoreChecker(place.store, repair=repair).run()
    except OSError as error:
        raise HostError(f"the store {place.store} cannot be checked: {error}") from error
    runs = place.runs()
    damaged = [found for run in runs if (found := _damage(place, run)) is not None]
    return FileSystemCheck(
        whole=store.is_whole and not damaged,
        packs=store.packs,
        objects=store.objects,
        content_bytes=store.content_bytes,
        snapshots=store.snapshots,
        lost_objects=len(store.lost),
        damaged_packs=_packs(store),
        damaged_manifests=store.bad_manifests,
        cache_remade=store.cache_remade,
        runs=len(runs),
        damaged_runs=damaged,
    )


def _packs(store: StoreCheck) -> list[PackDamage]:
    return [
        PackDamage(
            pack=pack.pack_id,
            reason=pack.text,
            rescued=pack.rescued,
            moved_to=str(pack.moved_to) if pack.moved_to is not None else None,
        )
        for pack in store.damaged
    ]


def _damage(place: DataDir, run: RunDir) -> RunDamage | None:
    """What is wrong with the run; ``None``: nothing."""
    if not os.path.lexists(run.events_path):
        return None  # its launch wrote no line, so there is nothing that could be damaged
    try:
        log = ContextLog.open(run.events_path, run.run_id)
        driver = driver_of(run, log.events, place.store)
    except (LogDamaged, HostError, TaskError, UnsupportedHost) as error:
        problem = Problem(file=str(run.path), line=None, text=str(error))
        return RunDamage(run_id=run.run_id, problems=[problem], breakpoints=[])
    try:
        found = verify(run, log, driver)
    finally:
        driver.close()
    if found.whole:
        return None
    return RunDamage(run_id=run.run_id, problems=found.problems, breakpoints=found.not_restorable)
