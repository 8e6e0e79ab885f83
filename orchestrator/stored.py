"""The snapshots of a recorded run: the driver that holds them, and whether it still does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.errors import TaskError
from orchestrator.events import Event, RunEvent
from orchestrator.run_dir import RunDir
from orchestrator.task import load_recorded
from snapshot_drivers.base import SnapshotDriver
from snapshot_drivers.errors import StoreDamaged, UnknownSnapshot
from snapshot_drivers.registry import make_driver


def driver_of(run: RunDir, events: Sequence[Event], store: Path) -> SnapshotDriver:
    """The driver of a run, as its first line says, else as its task does; the caller closes it.

    Raises: TaskError: neither can be read. UnsupportedHost: there is no such driver here.
    """
    first = next((event for event in events if isinstance(event, RunEvent)), None)
    snapshots = first.task.get("snapshots") if first is not None else None
    if first is not None and isinstance(snapshots, dict):
        return make_driver(str(snapshots.get("driver") or first.driver), store, snapshots.get("options"))
    try:
        spec = load_recorded(run.task_path, source_dir=run.path, environ={}).spec.snapshots
    except TaskError:
        if first is None:
            raise
        return make_driver(first.driver, store)
    return make_driver(first.driver if first is not None else spec.driver, store, spec.options)


def why_lost(driver: SnapshotDriver, snapshot_id: str) -> str | None:
    """Why there is no such snapshot any more; ``None``: there is (its content is not looked at)."""
    try:
        driver.load(snapshot_id)
    except (UnknownSnapshot, StoreDamaged) as error:
        return str(error)
    return None
