"""The command that goes on with a run: resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.answer import print_json, say
from orchestrator.cli.launch import EXIT_CODES, interrupt, show
from orchestrator.cli.options import DataDirPath, Json, Run, connect, existing_data_dir
from orchestrator.cli.run_view import summarise
from orchestrator.context_log import ContextLog
from orchestrator.errors import UsageError
from orchestrator.events import EndEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.events import Event
    from orchestrator.observer import Observer
    from orchestrator.run_dir import RunDir
    from orchestrator.runner import RunResult
    from orchestrator.session import Session
    from orchestrator.task import Limits, TaskSpec

RAISABLE = ("steps", "wall_time_s", "cost_usd", "stuck_submissions")
_SHOWN = 12


def resume(
    run: Run,
    raise_limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help=f"A higher limit for the run; names: {', '.join(RAISABLE)}."),
    ] = None,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Go on with a run after a crash, an interrupt or a limit, from where it stands, in its container or a new one."""
    from orchestrator.cli.live import progress
    from orchestrator.resume_point import last_container_id
    from orchestrator.session import Session

    place = existing_data_dir(data_dir)
    found = place.find(run)
    events = _events_of(found)
    raised = _raised(raise_limit or [])
    if _has_succeeded(events):
        _say_succeeded(found, as_json=json)
        return
    record = found.read_record()
    spec = _spec_of(found, events)
    _refuse_unless_resumable(found, events, spec, raised)
    place.install_helpers()
    signal.signal(signal.SIGTERM, interrupt)
    with (
        progress(as_json=json, criteria=len(spec.checklist), step_limit=spec.limits.steps) as observer,
        Session.open(place, found.run_id, connect(), environ=os.environ, observer=observer, resume=True) as session,
    ):
        previous_id = last_container_id(session.log.events)
        result = _go_on(session, observer, Path(record.source_dir), raised)
        new_id = session.container.container_id
    if json:
        ids = {"container_id": new_id, "previous_container_id": previous_id}
        print_json({**result.model_dump(), **ids})
    else:
        show(result)
        if previous_id not in (None, new_id):
            say(f"container: {str(previous_id)[:_SHOWN]} → {new_id[:_SHOWN]}")
        else:
            say(f"container: {new_id[:_SHOWN]}")
    raise typer.Exit(EXIT_CODES.get(result.status, 1))


def _go_on(session: Session, observer: Observer, source_dir: Path, raised: dict[str, int | float]) -> RunResult:
    from orchestrator.adapters.launched import drive_launched
    from orchestrator.control import listening
    from orchestrator.model import Model
    from orchestrator.recording.opening import take_up as take_up_recorded
    from orchestrator.resume import take_up
    from orchestrator.runner import run as drive

    if session.spec.agent.recorded:
        with listening(session) as desk:
            return drive_launched(session, desk, lambda: take_up_recorded(session, raised), source_dir)
    assert session.spec.model is not None  # the task was checked: an agent of ours has one
    model = Model(session.spec.model, source_dir)
    if model.script is not None:
        model.script.take_up(session.log.events)
    with listening(session) as desk:
        return drive(session, model, observer, desk, lambda: take_up(session, raised))


def _events_of(run: RunDir) -> Sequence[Event]:
    if not run.events_path.exists():
        return []  # cut off before its first line, or by somebody who is just making it
    return ContextLog.open(run.events_path, run.run_id).events


def _raised(given: list[str]) -> dict[str, int | float]:
    """The limits that are wanted, by name. Raises: UsageError."""
    raised: dict[str, int | float] = {}
    for item in given:
        name, _, text = item.partition("=")
        if name not in RAISABLE:
            raise UsageError(f"--raise-limit {item}: there is no limit {name!r}; there are: {', '.join(RAISABLE)}")
        try:
            raised[name] = int(text) if name in ("steps", "stuck_submissions") else float(text)
        except ValueError:
            raise UsageError(f"--raise-limit {item}: {text!r} is no number: write {name}=NUMBER") from None
    return raised


def _has_succeeded(events: Sequence[Event]) -> bool:
    from orchestrator.lineage import status

    return status(events, locked=False).status == "succeeded"


def _say_succeeded(run: RunDir, *, as_json: bool) -> None:
    from orchestrator.runner import RunResult

    summary = summarise(run)
    if as_json:
        print_json(summary.model_dump(include=set(RunResult.model_fields)))
    else:
        say(f"run {run.run_id} has succeeded: there is nothing to resume (see: orchestrator show {run.run_id})")


def _spec_of(run: RunDir, events: Sequence[Event]) -> TaskSpec:
    """The task with its limits as they were raised so far."""
    from orchestrator.ending import limits_now
    from orchestrator.task import load_recorded

    record = run.read_record()
    loaded = load_recorded(run.task_path, source_dir=Path(record.source_dir), environ=os.environ)
    return loaded.spec.model_copy(update={"limits": limits_now(loaded.spec.limits, events)})


def _refuse_unless_resumable(
    run: RunDir, events: Sequence[Event], spec: TaskSpec, raised: dict[str, int | float]
) -> None:
    """Raises: UsageError: nobody drives such a run, or it has ended at a limit that stays as it is."""
    from datetime import datetime

    from orchestrator.ending import ending
    from orchestrator.lineage import head, live_path
    from orchestrator.task import Limits

    if spec.agent.kind == "python" and spec.agent.entry is None:
        raise UsageError(
            f"run {run.run_id} is recorded from a program of yours: start that again, with "
            f"orchestrator.resumed_run({run.run_id!r}) in place of recorded_run(…)"
        )
    if spec.agent.kind == "manual":
        raise UsageError(
            f"run {run.run_id} has a manual agent, so nothing would go on by itself: use exec, checkpoint, and restore "
            "(which starts its container again)"
        )
    for name, value in raised.items():
        now = getattr(spec.limits, name)
        if now is None or value <= now:
            raise UsageError(f"--raise-limit {name}={value:g}: the run's limit is {now or 'none'}: give more than that")
    higher = Limits.model_validate({**spec.limits.model_dump(), **raised})
    at = head(events)
    if at is None or not isinstance(events[-1], EndEvent):
        return
    end = ending(events, live_path(events, at.seq), higher, datetime.fromisoformat(events[-1].at))
    if end is not None and end.status != "succeeded":
        raise UsageError(
            f"run {run.run_id} has ended at a limit ({end.reason}: {end.text}): give it more, for example "
            f"--raise-limit {_example(end.reason, higher)}"
        )


def _example(reason: str | None, limits: Limits) -> str:
    names = {"limit_steps": "steps", "limit_cost": "cost_usd", "limit_time": "wall_time_s"}
    name = names.get(reason or "", "stuck_submissions")
    return f"{name}={2 * (getattr(limits, name) or 1):g}"
