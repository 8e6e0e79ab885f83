"""Opens recorded runs: new ones, and those that another process has left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from orchestrator.control import listening
from orchestrator.data_dir import DataDir, default_root
from orchestrator.desk import Desk
from orchestrator.ending import Ending
from orchestrator.engine import Engine
from orchestrator.errors import UsageError
from orchestrator.launcher import CutShort
from orchestrator.observer import Observer
from orchestrator.recording.run import RecordedRun, RunEnded
from orchestrator.resume import news_of_restart, put_at_head
from orchestrator.runner import finish
from orchestrator.session import Session
from orchestrator.task import LoadedTask, load_task, load_task_data


@contextmanager
def recorded_run(
    task: str | os.PathLike[str] | Mapping[str, Any],
    *,
    run_id: str | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    keep: bool | None = None,
    trust: bool = False,
    observer: Observer | None = None,
    engine: Engine | None = None,
) -> Iterator[RecordedRun]:
    """A new run of ``task`` (a file, or its keys) is open while the block runs, and has ended with it.

    ``data_dir``: the command line's unless given. ``keep``: the container stays. ``trust``: as ``--trust-task``.

    Raises: TaskError, Refused: the task is wrong. UsageError: the run id is taken. HostError, SnapshotError.
    """
    place = DataDir(Path(data_dir) if data_dir is not None else default_root(os.environ)).open()
    place.install_helpers()
    loaded = _loaded(task, place, trust)
    with ExitStack() as resources:
        session = resources.enter_context(
            Session.create(loaded, place, engine or _connect(resources), run_id=run_id, keep=keep, observer=observer)
        )
        desk = resources.enter_context(listening(session))
        yield resources.enter_context(driven(session, desk, session.begin))


@contextmanager
def resumed_run(
    run_id: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    raise_limits: Mapping[str, int | float] | None = None,
    observer: Observer | None = None,
    engine: Engine | None = None,
) -> Iterator[RecordedRun]:
    """A run that was interrupted, or taken back by hand, is open again; its harness begins with what is in the log.

    Raises: UsageError: no such run, or not of a harness. Busy: somebody drives it. LogDamaged, RestoreRefused,
        HostError, SnapshotError.
    """
    place = DataDir(Path(data_dir) if data_dir is not None else default_root(os.environ)).open()
    place.install_helpers()
    with ExitStack() as resources:
        session = resources.enter_context(
            Session.open(
                place, run_id, engine or _connect(resources), environ=os.environ, observer=observer, resume=True
            )
        )
        if not session.spec.agent.recorded:
            raise UsageError(f"run {run_id} has no harness of its own: go on with: orchestrator resume {run_id}")
        desk = resources.enter_context(listening(session))
        yield resources.enter_context(driven(session, desk, lambda: take_up(session, raise_limits or {})))


@contextmanager
def driven(session: Session, desk: Desk, begin: Callable[[], str | None]) -> Iterator[RecordedRun]:
    """The run, begun, open while the block runs, and ended with it. ``begin`` answers news for the agent, if any.

    Raises: RunEnded: it was stopped during its set-up. Otherwise as ``begin``.
    """
    session.cut = desk.cut
    desk.do("the container is being set up")
    try:
        news = begin()
    except CutShort as cut:
        desk.result = finish(session, Ending("stopped", "user", "the operator stopped the run"))
        raise RunEnded("the run was stopped while it was being set up") from cut
    run = RecordedRun(session, desk, news=news)
    try:
        yield run
        if run.execution is None:
            raise UsageError("nothing was recorded: call the harness with run.drive(…) inside the block")
    except BaseException as error:
        run.close(error)
        raise
    run.close(None)


def take_up(session: Session, raised: Mapping[str, int | float]) -> str | None:
    """The container is where the run stands; answers what the agent has to be told of it."""
    point = put_at_head(session, raised)
    return None if point is None else news_of_restart(session, point)


def _loaded(task: str | os.PathLike[str] | Mapping[str, Any], place: DataDir, trust: bool) -> LoadedTask:
    if isinstance(task, Mapping):
        data = {"agent": {"kind": "python"}, **task}
        return load_task_data(data, source_dir=Path.cwd(), environ=os.environ, trust=trust, protected=[place.root])
    loaded = load_task(Path(task), environ=os.environ, trust=trust, agent="python", protected=[place.root])
    if not loaded.spec.agent.recorded:
        raise UsageError(f"{task}: a {loaded.spec.agent.kind} agent has no harness of its own: leave agent out")
    return loaded


def _connect(resources: ExitStack) -> Engine:
    engine = Engine.connect(os.environ.get("DOCKER_HOST") or None)
    resources.callback(engine.close)
    return engine
