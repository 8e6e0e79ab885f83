"""Commands that take a task: launch, validate."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.answer import INTERRUPTED, print_json, say
from orchestrator.cli.options import DataDirPath, Json, TaskPath, TrustTask, connect
from orchestrator.cli.options import data_dir as data_dir_of
from orchestrator.cli.render import money, seconds

if TYPE_CHECKING:
    from orchestrator.runner import RunResult
    from orchestrator.task import LoadedTask

EXIT_CODES = {"succeeded": 0, "running": 0, "interrupted": INTERRUPTED}


def validate(task: TaskPath, trust_task: TrustTask = False, json: Json = False, data_dir: DataDirPath = None) -> None:
    """Check a task file; nothing is started."""
    loaded = _load(task, trust_task, None, data_dir)
    if json:
        print_json({"valid": True, "task": loaded.spec.redacted()})
    else:
        say(f"{task}: valid: task {loaded.spec.name}, {len(loaded.spec.checklist)} criteria")


def launch(
    task: TaskPath,
    driver: Annotated[str | None, typer.Option(help="Snapshot driver instead of the task's.")] = None,
    model: Annotated[str | None, typer.Option(help="Model instead of the task's, as LiteLLM names it.")] = None,
    run_id: Annotated[str | None, typer.Option(help="Id of the new run (default: made from the task's name).")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the container when the run has ended.")] = False,
    trust_task: TrustTask = False,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Run a task: an agent in a container, with a breakpoint before each model request."""
    from orchestrator.adapters.launched import drive_launched
    from orchestrator.cli.live import progress
    from orchestrator.control import listening
    from orchestrator.model import Model
    from orchestrator.runner import hold, run
    from orchestrator.session import Session

    loaded = _load(task, trust_task, model, data_dir)
    spec = loaded.spec
    place = data_dir_of(data_dir).open()
    place.install_helpers()
    signal.signal(signal.SIGTERM, interrupt)
    engine = connect()
    # Before the run begins: its script may be missing, and the import of LiteLLM is none of the run's time.
    asks = spec.agent.kind == "function-calling" and spec.model is not None
    asked = Model(spec.model, loaded.source_dir) if asks and spec.model is not None else None
    with (
        progress(as_json=json, criteria=len(spec.checklist), step_limit=spec.limits.steps) as observer,
        Session.create(
            loaded, place, engine, run_id=run_id, driver=driver, keep=keep or None, observer=observer
        ) as session,
        listening(session) as desk,
    ):
        if asked is not None:
            result = run(session, asked, observer, desk, session.begin)
        elif spec.agent.recorded:
            result = drive_launched(session, desk, session.begin, loaded.source_dir)
        else:
            result = hold(session, desk)
    if json:
        print_json(result)
    else:
        show(result)
    raise typer.Exit(EXIT_CODES.get(result.status, 1))


def _load(task: Path, trust_task: bool, model: str | None, given: Path | None) -> LoadedTask:
    from orchestrator.task import load_task

    return load_task(task, environ=os.environ, trust=trust_task, model=model, protected=[data_dir_of(given).root])


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """A request to terminate ends the run as Ctrl-C does: interrupted, the container stays."""
    raise KeyboardInterrupt


def show(result: RunResult) -> None:
    """The result for a person."""
    reason = f" ({result.reason})" if result.reason else ""
    cost = "unknown" if result.cost_usd is None else money(result.cost_usd, 0)
    satisfied = f", {result.progress.satisfied}/{result.progress.total} criteria" if result.progress else ""
    say()
    say(f"run {result.run_id}: {result.status}{reason}{satisfied}")
    say(
        f"{result.breakpoints} breakpoints, {result.rewinds} rewinds, {seconds(result.duration_s)}, cost {cost}, "
        + (f"container {result.container}" if result.container else "container removed")
    )
    say(f"see: orchestrator breakpoints {result.run_id}   ·   orchestrator restore {result.run_id} BREAKPOINT")
