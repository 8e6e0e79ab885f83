"""An open run: its directory and lock, log, container, driver, and what one can do with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from orchestrator import __version__
from orchestrator.agent_messages import first_messages
from orchestrator.checkpointer import Checkpointer
from orchestrator.checks import Probe, Scratch, Submission, run_checklist
from orchestrator.container import Container
from orchestrator.container_config import ContainerConfig
from orchestrator.context_log import ContextLog
from orchestrator.daemons import start_daemons
from orchestrator.data_dir import DataDir, new_run_id
from orchestrator.engine import Engine
from orchestrator.errors import LogDamaged, OrchestratorError
from orchestrator.events import CheckpointEvent, EndEvent, RunEvent
from orchestrator.fork import scratch_copy
from orchestrator.guests import Guests
from orchestrator.journal import Journal
from orchestrator.launcher import Cut, ExecResult, never
from orchestrator.lineage import BreakpointRow, checkpoints, row_of
from orchestrator.observer import Observer
from orchestrator.reattach import reattach, reattach_to_resume
from orchestrator.restored import RestoredProcesses, RestoreResult, restored_processes
from orchestrator.resume_point import last_container_id
from orchestrator.rewind import Rewinder
from orchestrator.run_container import RunContainer
from orchestrator.run_dir import RunDir
from orchestrator.run_record import RunRecord
from orchestrator.setup import run_setup
from orchestrator.stored import why_lost
from orchestrator.task import Limits, LoadedTask, load_recorded, recorded_text
from orchestrator.tools import schemas
from snapshot_drivers.base import Coverage, SnapshotDriver
from snapshot_drivers.errors import SnapshotError
from snapshot_drivers.registry import make_driver

_DAEMONS_SHOW_S = 0.3

CHECK_HELPER = "enter"
"""The static helper for probes, in the data directory's ``bin``."""


class Session:
    """One run, locked, with everything to drive it. Closing it never removes containers."""

    def __init__(
        self,
        loaded: LoadedTask,
        log: ContextLog,
        container: RunContainer,
        driver: SnapshotDriver,
        *,
        check: Callable[[Session], Submission],
        observer: Observer,
        resources: ExitStack,
        container_is_new: bool = False,
    ) -> None:
        """From its parts; ``create`` and ``open`` make them. It gives ``resources`` back when it is closed.

        ``check`` runs the checklist. ``container_is_new``: the run had another one, which is gone.
        """
        self.spec = loaded.spec
        self.keep = loaded.spec.keep
        self.run_id = log.run_id
        self.log = log
        self.container = container
        self.driver = driver
        self.observer = observer
        self.journal = Journal(log, observer, loaded.secrets)
        self.guests = Guests()
        self.cut: Cut = never
        """Asked while a command or a check runs: why it has to end now. The driver sets it."""
        snapshots = self.spec.snapshots
        self.checkpointer = Checkpointer(
            driver,
            container,
            self.journal,
            snapshots.capture_options(),
            on_failure=snapshots.on_failure,
            guests=self.guests,
        )
        self.rewinder = Rewinder(
            self.checkpointer,
            after_restore=self.start_daemons,
            previous_container=None if container_is_new else container.name,
        )
        self._env = self.spec.env_for_exec(loaded.secrets)
        self._check = check
        self._resources = resources
        resources.callback(self.checkpointer.close)

    @classmethod
    def create(
        cls,
        loaded: LoadedTask,
        data_dir: DataDir,
        engine: Engine,
        *,
        run_id: str | None = None,
        driver: str | None = None,
        keep: bool | None = None,
        observer: Observer | None = None,
    ) -> Session:
        """A new run: its container runs, pristine; ``begin`` comes next.

        ``driver`` and ``keep`` stand instead of the task's.

        Raises: UsageError: the run id is taken. SnapshotError, HostError.
        """
        loaded = _overridden(loaded, driver, keep)
        spec, observer = loaded.spec, observer or Observer()
        with ExitStack() as resources:
            made_driver = make_driver(spec.snapshots.driver, data_dir.store, spec.driver_options())
            resources.callback(made_driver.close)
            directory = data_dir.create_run(run_id or new_run_id(spec.name), task_text=recorded_text(spec))
            resources.enter_context(directory.lock())
            observer.status("making the container")
            try:
                container = Container.create(engine, data_dir, directory.run_id, spec, source_dir=loaded.source_dir)
            except (OrchestratorError, SnapshotError):
                directory.remove()
                raise
            directory.write_record(_record(directory, loaded, container.config))
            log = resources.enter_context(ContextLog.open(directory.events_path, directory.run_id, writer=True))
            check = _checklist(container, data_dir.bin / CHECK_HELPER)
            return cls(
                loaded, log, container, made_driver, check=check, observer=observer, resources=resources.pop_all()
            )

    @classmethod
    def open(
        cls,
        data_dir: DataDir,
        run_id: str,
        engine: Engine,
        *,
        environ: Mapping[str, str],
        observer: Observer | None = None,
        recreate: bool = False,
        resume: bool = False,
    ) -> Session:
        """A run that nobody drives, taken up; a rewind or restore that a crash cut off has been finished.

        ``recreate``: a container that is gone is made again, on pristine layers, and one that has stopped is started.
        ``resume``: for ``resume.take_up``, which does the rest: a container is there, and nothing is finished yet.

        Raises: UsageError: no such run. Busy: somebody drives it. LogDamaged. ContainerNotRunning: the container is
            gone. ContainerLost: what was cut off can neither be finished nor undone. SnapshotError, HostError.
        """
        directory = data_dir.run(run_id)
        with ExitStack() as resources:
            resources.enter_context(directory.lock())
            record = directory.read_record()
            loaded = load_recorded(directory.task_path, source_dir=Path(record.source_dir), environ=environ)
            driver = make_driver(record.driver, data_dir.store, loaded.spec.driver_options())
            resources.callback(driver.close)
            log = resources.enter_context(ContextLog.open(directory.events_path, run_id, writer=True))
            if resume:
                if not log.events and any(not damage.torn for damage in log.damage):
                    raise LogDamaged(f"{directory.events_path}: no line of it can be read, so the run cannot go on")
                container, is_new = reattach_to_resume(engine, record.container, log.events)
            else:
                container, is_new = reattach(engine, record.container, log.events, recreate=recreate)
            session = cls(
                loaded,
                log,
                container,
                driver,
                check=_checklist(container, data_dir.bin / CHECK_HELPER),
                observer=observer or Observer(),
                resources=resources.pop_all(),
                container_is_new=is_new,
            )
        try:
            if not resume:
                session.rewinder.finish_unfinished()
        except (OrchestratorError, SnapshotError):
            session.close()
            raise
        return session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The lock, the log and the driver are given back; the container stays as it is. Repeatable."""
        self._resources.close()

    def begin(self) -> None:
        """The run's first line stands in the log, and the task's set-up is done.

        Raises: as ``set_up``.
        """
        self.journal.add(
            RunEvent(
                step=0,
                parent_seq=None,
                task=self.spec.redacted(),
                tools=[] if self.spec.agent.recorded else schemas(self.spec.strategy),
                driver=self.driver.name,
                container=self.container.name,
                container_id=self.container.container_id,
                messages=[] if self.spec.agent.recorded else first_messages(self.spec),
            )
        )
        self.set_up()

    def set_up(self) -> None:
        """The task's set-up commands have run in a fresh container, and its daemons run.

        If it fails, the log says so, and the container is gone unless it is kept.

        Raises: TaskError: a setup command failed. HostError: a daemon does not run. EngineError. CutShort: the run has
            to end now; nothing is in the log yet.
        """
        self.observer.status("setting up the container")
        try:
            run_setup(self.spec, self.container, self._env, redacted=self.journal.redacted, cut=self.cut)
            self.start_daemons()
        except (OrchestratorError, SnapshotError) as error:
            with suppress(SnapshotError):
                self._abandon(str(error))
            raise

    def limit(self, limits: Limits) -> None:
        """The run's limits are these from now on."""
        self.spec = self.spec.model_copy(update={"limits": limits})

    def _abandon(self, why: str) -> None:
        self.journal.add(EndEvent(**self.journal.place(), status="failed", reason=None, text=why))
        if not self.keep:
            self.remove_container()

    def exec(
        self, command: str | Sequence[str], *, timeout_s: float | None = None, cut: Cut | None = None
    ) -> ExecResult:
        """A command has run in the container as the agent's do (a text: for the shell). ``cut``: instead of the run's.

        Raises: EngineError.
        """
        return self.container.exec(
            command,
            user=self.spec.user,
            env=self._env,
            cwd=self.spec.workdir,
            timeout_s=timeout_s or self.spec.limits.tool_timeout_s,
            output_limit_bytes=self.spec.limits.tool_output_bytes,
            cut=cut or self.cut,
        )

    def exec_as_guest(
        self, command: str | Sequence[str], *, timeout_s: float | None = None, cut: Cut = never
    ) -> ExecResult:
        """The operator's command has run beside the agent's; its effects belong to the next snapshot.

        May be called from any thread.

        Raises: EngineError.
        """
        with self.guests.visit():
            return self.exec(command, timeout_s=timeout_s, cut=cut)

    def submit(self) -> Submission:
        """The checklist has been run on the container as it is.

        Raises: EngineError, HostError. CutShort: the run has to end now.
        """
        self.observer.status("running the checklist")
        return self._check(self)

    def start_daemons(self) -> None:
        """The task's daemons run; call it when nothing else does.

        Raises: HostError: one of them does not. EngineError.
        """
        start_daemons(self.spec.daemons, self.container)

    def checkpoint(self, note: str | None = None) -> BreakpointRow:
        """A checkpoint of this moment, taken by hand.

        Raises: SnapshotError, HostError.
        """
        taken = self.checkpointer.checkpoint("manual", note=note)
        # It is the head now, and the one before it is its parent: the rest of the log says nothing about it.
        above = (
            event for event in self.journal.way_back() if isinstance(event, CheckpointEvent) and event is not taken
        )
        parent = next(above, None)
        return row_of(taken, parent_id=parent.breakpoint_id if parent else None, live=True, head=True)

    def restore(self, breakpoint_id: int, *, verify: str = "difference", accept_partial: bool = False) -> RestoreResult:
        """Container and conversation are at ``breakpoint_id``.

        Raises: UsageError, RestoreRefused, SnapshotError, HostError: as ``Rewinder.restore``.
        """
        self.observer.status(f"restoring breakpoint {breakpoint_id}")
        previous_id = last_container_id(self.log.events)
        done = self.rewinder.restore(breakpoint_id, verify=verify, accept_partial=accept_partial)
        return RestoreResult(
            run_id=self.run_id,
            breakpoint_id=breakpoint_id,
            container=done.container,
            previous_container=done.previous_container,
            container_id=self.container.container_id,
            previous_container_id=previous_id,
            restore_ms=done.restore_ms,
            verified=done.verified,
            processes=self._restored_processes(self._row_of(breakpoint_id).coverage),
        )

    def remove_container(self) -> None:
        """The run's containers, own volumes, networks and cgroups are gone; its checkpoints stay.

        Raises: EngineError.
        """
        self.observer.status("removing the container")
        self.container.remove()

    def is_stored(self, snapshot_id: str) -> bool:
        """The snapshot still exists."""
        return why_lost(self.driver, snapshot_id) is None

    def _restored_processes(self, coverage: Coverage) -> RestoredProcesses:
        """Those of ``coverage``, told apart; a daemon that was just started may need a moment to show what it is."""
        deadline = time.monotonic() + (_DAEMONS_SHOW_S if self.spec.daemons else 0.0)
        while True:
            found = restored_processes(coverage, self.container.commands())
            if not found.missing or time.monotonic() >= deadline:
                return found
            time.sleep(0.05)

    def _row_of(self, breakpoint_id: int) -> BreakpointRow:
        return next(row for row in checkpoints(self.log.events) if row.breakpoint_id == breakpoint_id)


def _overridden(loaded: LoadedTask, driver: str | None, keep: bool | None) -> LoadedTask:
    """The task with what the command line says instead."""
    spec = loaded.spec
    if driver is not None:
        spec = spec.model_copy(update={"snapshots": spec.snapshots.model_copy(update={"driver": driver})})
    if keep is not None:
        spec = spec.model_copy(update={"keep": keep})
    return replace(loaded, spec=spec)


def _record(directory: RunDir, loaded: LoadedTask, config: ContainerConfig) -> RunRecord:
    return RunRecord(
        run_id=directory.run_id,
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        orchestrator_version=__version__,
        task_name=loaded.spec.name,
        driver=loaded.spec.snapshots.driver,
        source_dir=str(loaded.source_dir),
        container=config,
    )


def _checklist(container: Container, helper: Path) -> Callable[[Session], Submission]:
    """Runs the task's criteria on that container, or on copies of it."""

    def check(session: Session) -> Submission:
        scratch = Scratch(lambda network: scratch_copy(session.checkpointer, container, network), session.cut)
        probe = Probe(container, helper, session.cut)
        return run_checklist(session.spec.checklist, probe=probe.run, scratch=scratch.run, cut=session.cut)

    return check
