"""Garbage collection over a data directory: which snapshots go, by each run's retention, and then their content.

A run is looked at with its lock held. One that is driven keeps what it has: it may be about to restore any of its
snapshots. Its log says that snapshots are removed before they are. A snapshot that no log names is garbage, unless the
run that took it is driven (its line may be on the way) or it is young (an archive may be on its way in).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from pydantic import BaseModel, ConfigDict

from orchestrator.collected import collected
from orchestrator.context_log import ContextLog
from orchestrator.data_dir import DataDir
from orchestrator.errors import Busy, HostError, LogDamaged, TaskError
from orchestrator.events import CollectEvent
from orchestrator.lineage import head
from orchestrator.resume_point import last_container_id
from orchestrator.retention import named, retained
from orchestrator.run_dir import RunDir
from orchestrator.snapshot_spec import Retention
from orchestrator.stored import driver_of, why_lost
from orchestrator.task import load_recorded
from snapshot_drivers.base import SnapshotDriver
from snapshot_drivers.errors import StoreDamaged, UnknownSnapshot, UnsupportedHost
from snapshot_drivers.overlay.index_file import clear_indexes
from snapshot_drivers.store.collect import Collector
from snapshot_drivers.store.manifest import ManifestStore

GRACE_S = 3600.0
"""A snapshot that no line names is garbage when it is older."""


class CollectedRun(BaseModel):
    """A run of which snapshots were removed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    snapshots: int
    kept: int


class Collection(BaseModel):
    """What ``gc`` answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    runs: list[CollectedRun]
    driven: list[str]
    """Runs of which nothing was removed because they are driven."""
    unreadable: list[str]
    """Runs with damaged lines, or of a driver that is not here: all that they may name is kept, and so is everything
    that no log names."""
    unnamed: int
    """Removed snapshots that no log named."""
    bytes_before: int
    bytes_after: int
    packs_before: int
    packs_after: int
    temporary_files: int
    damaged_packs: list[str]


class GarbageCollection:
    """One collection."""

    def __init__(self, place: DataDir, *, retention: Retention | None = None, grace_s: float = GRACE_S) -> None:
        """``retention`` stands instead of the tasks' own."""
        self._place = place
        self._manifests = ManifestStore(place.store)
        self._retention = retention
        self._grace_s = grace_s
        self._named: dict[str, set[str]] = {}
        """By run: the snapshots that its log names, or those that are kept of them."""
        self._driven: list[str] = []
        self._unreadable: list[str] = []
        self._containers: set[str] = set()

    def run(self, *, accept_damage: bool = False) -> Collection:
        """Snapshots that nobody keeps are gone, and so is the content that only they needed.

        Raises: StoreDamaged: of a snapshot nobody knows what it needs (``accept_damage``). HostError: the disk is full
            or cannot be read; what was done stands, and the same can be done again.
        """
        try:
            return self._run(accept_damage)
        except OSError as error:
            raise HostError(f"the store {self._place.store} cannot be collected any further: {error}") from error

    def _run(self, accept_damage: bool) -> Collection:
        runs = self._place.runs()
        for run in runs:
            self._look_at(run)
        done = [found for run in runs if (found := self._collect_run(run)) is not None]
        unnamed = self._unnamed() if not self._unreadable else []
        self._manifests.delete(*unnamed)
        clear_indexes(self._place.store, keep=self._containers)
        content = Collector(self._place.store, accept_damage=accept_damage).run()
        return Collection(
            runs=done,
            driven=self._driven,
            unreadable=self._unreadable,
            unnamed=len(unnamed),
            bytes_before=content.bytes_before,
            bytes_after=content.bytes_after,
            packs_before=content.packs_before,
            packs_after=content.packs_after,
            temporary_files=content.temporary_files,
            damaged_packs=list(content.damaged_packs),
        )

    def _look_at(self, run: RunDir) -> None:
        if not os.path.lexists(run.events_path):
            return  # its launch wrote no line, so it names no snapshot
        try:
            log = ContextLog.open(run.events_path, run.run_id)
        except (LogDamaged, HostError):
            self._unreadable.append(run.run_id)
            return
        if any(damage.lost and not damage.torn for damage in log.damage):
            self._unreadable.append(run.run_id)
        self._named[run.run_id] = named(log.events)
        if container_id := last_container_id(log.events):
            self._containers.add(container_id)

    def _collect_run(self, run: RunDir) -> CollectedRun | None:
        """What the run's retention does not keep is gone, and its log says so."""
        if run.run_id not in self._named or run.run_id in self._unreadable:
            return None
        try:
            with run.lock(), ContextLog.open(run.events_path, run.run_id, writer=True) as log:
                names, kept = named(log.events), retained(log.events, self._retention or _retention_of(run))
                others = set().union(*(names for other, names in self._named.items() if other != run.run_id))
                unwanted = names - kept - others
                gone = unwanted & set(self._manifests.ids())
                with self._elsewhere(run, log, unwanted - gone) as (driver, elsewhere):
                    self._named[run.run_id] = names - gone - elsewhere
                    if not gone and not elsewhere:
                        return None
                    _say(log, sorted((gone | elsewhere) - collected(log.events).keys()))
                    self._manifests.delete(*gone)
                    for snapshot_id in elsewhere:
                        driver.forget(snapshot_id)
                return CollectedRun(run_id=run.run_id, snapshots=len(gone) + len(elsewhere), kept=len(kept))
        except Busy:
            self._driven.append(run.run_id)
        except (LogDamaged, TaskError, UnsupportedHost):
            self._unreadable.append(run.run_id)
        return None

    @contextmanager
    def _elsewhere(self, run: RunDir, log: ContextLog, unwanted: set[str]) -> Iterator[tuple[SnapshotDriver, set[str]]]:
        """Those of the snapshots that the run's driver keeps in a place of its own, and the driver."""
        driver = driver_of(run, log.events, self._place.store)
        try:
            yield driver, {name for name in unwanted if why_lost(driver, name) is None}
        finally:
            driver.close()

    def _unnamed(self) -> list[str]:
        """Snapshots of which no log knows and no log will."""
        known = set().union(*self._named.values())
        limit = datetime.now(UTC) - timedelta(seconds=self._grace_s)
        found = []
        for snapshot_id in self._manifests.ids():
            if snapshot_id in known:
                continue
            try:
                manifest = self._manifests.read(snapshot_id)
                created_at = datetime.fromisoformat(manifest.snapshot.created_at)
            except (UnknownSnapshot, StoreDamaged, ValueError):
                continue  # fsck says more
            if manifest.run_id not in self._driven and created_at < limit:
                found.append(snapshot_id)
        return found


def _retention_of(run: RunDir) -> Retention | None:
    """What the run's task says; nothing that can be read: everything is kept."""
    try:
        return load_recorded(run.task_path, source_dir=run.path, environ={}).spec.snapshots.retention
    except TaskError:
        return None


def _say(log: ContextLog, gone: list[str]) -> None:
    """The log says that these snapshots are removed; some may have been said by a collection that was killed."""
    at = head(log.events)
    if gone and at is not None:
        log.append(CollectEvent(step=at.step, parent_seq=at.seq, snapshots=gone))
