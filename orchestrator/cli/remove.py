"""Commands that remove: rm (a run and all that is its own), clean (containers that nobody drives)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel, ConfigDict

from orchestrator.cli.answer import print_json, say, warn
from orchestrator.cli.options import DataDirPath, Json, Run, connect, existing_data_dir
from orchestrator.context_log import ContextLog
from orchestrator.errors import Busy, HostError, LogDamaged, TaskError, UsageError
from orchestrator.events import EndEvent
from orchestrator.lineage import head, left_open
from snapshot_drivers.errors import UnsupportedHost

if TYPE_CHECKING:
    from orchestrator.data_dir import DataDir
    from orchestrator.engine import Engine
    from orchestrator.events import Event
    from orchestrator.run_dir import RunDir
    from snapshot_drivers.base import SnapshotDriver


class Removed(BaseModel):
    """What was removed of one run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    containers: list[str]
    volumes: list[str]
    snapshots: int = 0


class Kept(BaseModel):
    """A run whose containers were left."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    containers: list[str]
    reason: str


def rm(run: Run, json: Json = False, data_dir: DataDirPath = None) -> None:
    """Remove a run: containers, volumes, log, and the snapshots that no other run needs."""
    from snapshot_drivers.commit.engine import snapshot_of

    place = existing_data_dir(data_dir)
    found = place.find(run)
    with found.lock():
        engine = connect()
        removed = _remove_from_engine(engine, place, found.run_id)
        engine.release_image(found.run_id)
        others = _snapshots_of_others(place, found)
        snapshots = _snapshots_of(found) - others
        driver = _driver(place, found) if snapshots else None
        # The log goes first: a snapshot that no line names is garbage, a line without its snapshot is damage.
        found.remove()
        if driver is not None:
            for snapshot_id in sorted(snapshots):
                driver.forget(snapshot_id)
            driver.close()
            removed = removed.model_copy(update={"snapshots": len(snapshots)})
        # Also those that a process left which died before a line named them.
        for tag in engine.list_our_image_tags(run_id=found.run_id, data_dir=place.root):
            if snapshot_of(tag) not in others:
                engine.remove_image(tag)
    if json:
        print_json(removed)
    else:
        say(f"removed run {removed.run_id}: {_counts(removed)}, {removed.snapshots} snapshots")
        if removed.snapshots:
            say("their content goes with the next: orchestrator gc")


def clean(
    everything: Annotated[
        bool, typer.Option("--all", help="Also those that were left running on purpose (manual, restored by hand).")
    ] = False,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Remove the containers of runs that nobody drives. Runs and checkpoints stay."""
    place = existing_data_dir(data_dir)
    engine = connect()
    removed: list[Removed] = []
    kept: list[Kept] = []
    for run_id in sorted(_runs_on_engine(engine, place)):
        reason = _why_keep(place, run_id, everything)
        if reason is None:
            try:
                removed.append(_remove_unlocked(engine, place, run_id))
                continue
            except Busy:
                reason = "it is being driven"
        names = [container.name for container in engine.list_ours(run_id=run_id, data_dir=place.root)]
        kept.append(Kept(run_id=run_id, containers=names, reason=reason))
    if json:
        print_json({"removed": removed, "kept": kept})
        return
    for one in removed:
        say(f"removed {one.run_id}: {_counts(one)}")
    for other in kept:
        say(f"kept {other.run_id}: {other.reason}")
    if not removed and not kept:
        say("There is nothing to clean.")


def _runs_on_engine(engine: Engine, place: DataDir) -> set[str]:
    """Ids of the runs of this data directory that have containers or volumes on the engine."""
    found = {container.run_id for container in engine.list_ours(data_dir=place.root)}
    if engine.list_our_volumes(data_dir=place.root):
        known = (run.run_id for run in place.runs())
        found |= {run_id for run_id in known if engine.list_our_volumes(run_id=run_id, data_dir=place.root)}
    return found


def _why_keep(place: DataDir, run_id: str, everything: bool) -> str | None:
    try:
        run = place.run(run_id)
    except UsageError:
        return None
    if run.is_locked():
        return "it is being driven"
    if everything:
        return None
    remedy = f"(remove it with: orchestrator clean --all, or: orchestrator rm {run_id})"
    try:
        log = ContextLog.open(run.events_path, run_id)
    except (LogDamaged, HostError):
        # Without a log its launch was cut off; with one that cannot be read nobody knows what it is kept for.
        return f"its log cannot be read {remedy}" if os.path.lexists(run.events_path) else None
    if not log.events and any(damage.lost and not damage.torn for damage in log.damage):
        return f"its log cannot be read {remedy}"
    return f"it was left running on purpose {remedy}" if left_open(log.events) else None


def _remove_unlocked(engine: Engine, place: DataDir, run_id: str) -> Removed:
    try:
        run = place.run(run_id)
    except UsageError:
        return _remove_from_engine(engine, place, run_id)
    with run.lock():
        removed = _remove_from_engine(engine, place, run_id)
        if left_open(_events_of(run)):
            _end(run)
        return removed


def _end(run: RunDir) -> None:
    """The run is not open any more: its log says that the operator ended it. Called with its lock held."""
    with ContextLog.open(run.events_path, run.run_id, writer=True) as log:
        at = head(log.events)
        if at is not None:
            text = "its container was removed by clean"
            log.append(EndEvent(step=at.step, parent_seq=at.seq, status="stopped", reason="user", text=text))


def _remove_from_engine(engine: Engine, place: DataDir, run_id: str) -> Removed:
    """Everything on the engine that carries the run's labels is gone, and with a record its cgroups too."""
    from orchestrator.workload import (
        remove_cgroups,
        remove_container,
        remove_containers,
        remove_copies,
        remove_volume,
        remove_volumes,
    )

    containers = engine.list_ours(run_id=run_id, data_dir=place.root)
    volumes = engine.list_our_volumes(run_id=run_id, data_dir=place.root)
    # A launch that was cut off early has no record: what its containers belong to is known to the engine alone.
    inspected = [engine.find(container.container_id) or {} for container in containers]
    groups = {found.get("HostConfig", {}).get("CgroupParent") for found in inspected}
    try:
        config = place.run(run_id).read_record().container
    except (UsageError, LogDamaged):
        config = None
    if config is not None:
        remove_copies(engine, config)
        remove_containers(engine, config)
        remove_volumes(engine, config)
    for container in containers:
        remove_container(engine, container.container_id)
    for group in groups - {None, ""}:
        remove_cgroups(str(group))
    for volume in volumes:
        remove_volume(engine, volume)
    return Removed(run_id=run_id, containers=[container.name for container in containers], volumes=volumes)


def _events_of(run: RunDir) -> list[Event]:
    try:
        return ContextLog.open(run.events_path, run.run_id).events
    except (LogDamaged, HostError):
        return []


def _snapshots_of(run: RunDir) -> set[str]:
    from orchestrator.retention import named

    return named(_events_of(run))


def _snapshots_of_others(place: DataDir, removed: RunDir) -> set[str]:
    """The snapshots that other runs name; of a run that cannot be read in full, nobody knows, so all are kept."""
    from orchestrator.retention import named

    found: set[str] = set()
    for run in place.runs():
        if run.run_id == removed.run_id:
            continue
        try:
            log: ContextLog | None = ContextLog.open(run.events_path, run.run_id)
        except (LogDamaged, HostError):
            if not os.path.lexists(run.events_path):
                continue  # its launch wrote no line, so it names no snapshot
            log = None
        if log is None or any(damage.lost and not damage.torn for damage in log.damage):
            warn(f"run {run.run_id} has damaged lines, which may name snapshots of this run: all snapshots are kept")
            return _snapshots_of(removed)
        found |= named(log.events)
    return found


def _driver(place: DataDir, run: RunDir) -> SnapshotDriver | None:
    """The run's driver; ``None``: it cannot be told, so its snapshots stay as garbage."""
    from orchestrator.stored import driver_of

    try:
        return driver_of(run, _events_of(run), place.store)
    except (TaskError, UnsupportedHost) as error:
        warn(f"the snapshots stay in the store: {error}")
        return None


def _counts(removed: Removed) -> str:
    return f"{len(removed.containers)} containers, {len(removed.volumes)} volumes"
