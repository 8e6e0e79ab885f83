"""Commands that change a run from outside, driven or not: checkpoint, restore, rewind, stop, exec."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.answer import print_json, say, warn
from orchestrator.cli.options import DataDirPath, Json, Run, existing_data_dir
from orchestrator.cli.reach import WAIT_S, Wait, reach
from orchestrator.cli.render import seconds, size
from orchestrator.cli.run_view import summarise
from orchestrator.context_log import ContextLog
from orchestrator.errors import UsageError
from orchestrator.events import EndEvent
from orchestrator.lineage import head
from snapshot_drivers.errors import ContainerNotRunning

if TYPE_CHECKING:
    from orchestrator.cli.run_view import RunSummary
    from orchestrator.run_dir import RunDir

_EXEC_FAILED = 1
"""Exit code where the command itself has none (it was killed at its time limit)."""

Breakpoint = Annotated[int, typer.Argument(metavar="BREAKPOINT", help="An id that 'breakpoints' lists.")]


class Verify(StrEnum):
    """How much of a restored tree is compared with the snapshot."""

    DIFFERENCE = "difference"
    FULL = "full"


def checkpoint(
    run: Run,
    note: Annotated[str | None, typer.Option(help="What to remember it by.")] = None,
    wait: Wait = WAIT_S,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Take a breakpoint of a run now, by hand; of a driven one before its next step."""
    from orchestrator.lineage import BreakpointRow
    from orchestrator.wishes import CheckpointWish

    place = existing_data_dir(data_dir)
    row = reach(
        place,
        place.find(run),
        CheckpointWish(note=note),
        BreakpointRow,
        lambda session: session.checkpoint(note),
        wait_s=wait,
    )
    if json:
        print_json(row)
        return
    coverage = "" if row.coverage.complete else ", coverage incomplete (see: orchestrator breakpoints --json)"
    say(f"breakpoint {row.breakpoint_id}: captured in {row.capture_ms:.0f} ms, {size(row.stored_bytes)}{coverage}")


def restore(
    run: Run,
    breakpoint_id: Breakpoint,
    verify: Annotated[Verify, typer.Option(help="Compare what was touched, or the whole tree.")] = Verify.DIFFERENCE,
    accept_partial: Annotated[
        bool, typer.Option("--accept-partial", help="Go on although the snapshot does not hold everything.")
    ] = False,
    wait: Wait = WAIT_S,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Take a run back to a breakpoint: its container and its conversation. A driven run goes on from there."""
    from orchestrator.restored import RestoreResult
    from orchestrator.wishes import RestoreWish

    place = existing_data_dir(data_dir)
    result = reach(
        place,
        place.find(run),
        RestoreWish(breakpoint_id=breakpoint_id, verify=verify.value, accept_partial=accept_partial),
        RestoreResult,
        lambda session: session.restore(breakpoint_id, verify=verify.value, accept_partial=accept_partial),
        wait_s=wait,
        recreate=True,
    )
    if json:
        print_json(result)
        return
    say(
        f"run {result.run_id} stands at breakpoint {result.breakpoint_id} again "
        f"({result.restore_ms:.0f} ms, verified: {result.verified})"
    )
    new_id = result.container_id
    if result.previous_container_id not in (None, new_id):
        say(f"container: {result.container}, made again: {str(result.previous_container_id)[:12]} → {new_id[:12]}")
    else:
        say(f"container: {result.container} ({new_id[:12]})")
    for name in result.processes.missing:
        warn(f"not running after restore: {name}")


def rewind(
    run: Run,
    breakpoint_id: Breakpoint,
    memory: Annotated[str, typer.Option(help="What the agent is to know of the abandoned path.")],
    wait: Wait = WAIT_S,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Rewind a run as its agent would: back to a breakpoint, with a memory added to its conversation."""
    from orchestrator import desk
    from orchestrator.wishes import RewindWish, Rewound

    if not memory.strip():
        raise UsageError("--memory is empty: say what the agent is to know (or use: orchestrator restore)")
    place = existing_data_dir(data_dir)
    result = reach(
        place,
        place.find(run),
        RewindWish(breakpoint_id=breakpoint_id, memory=memory),
        Rewound,
        lambda session: desk.rewind(session, breakpoint_id, memory),
        wait_s=wait,
        recreate=True,
    )
    if json:
        print_json(result)
        return
    say(
        f"run {result.run_id} was rewound to breakpoint {result.breakpoint_id} "
        f"({result.restore_ms:.0f} ms, verified: {result.verified}); its agent has the memory"
    )


def stop(run: Run, wait: Wait = WAIT_S, json: Json = False, data_dir: DataDirPath = None) -> None:
    """End a run: what it is doing is cut short, its last state is in a checkpoint, its container goes unless kept."""
    from orchestrator import runner
    from orchestrator.wishes import StopWish

    place = existing_data_dir(data_dir)
    found = place.find(run)
    if (summary := _ended(found)) is None:
        try:
            result = reach(place, found, StopWish(), runner.RunResult, runner.stop, wait_s=wait)
            answer = result.model_dump()
        except ContainerNotRunning:
            _end(found)
            summary = _ended(found)
    if summary is not None:
        answer = summary.model_dump(include=set(runner.RunResult.model_fields))
    if json:
        print_json(answer)
        return
    reason = f" ({answer['reason']})" if answer["reason"] else ""
    say(f"run {answer['run_id']}: {answer['status']}{reason} after {seconds(answer['duration_s'])}")


def execute(
    run: Run,
    command: Annotated[list[str], typer.Argument(metavar="-- CMD", help="The command and its arguments.")],
    timeout_s: Annotated[float | None, typer.Option(help="Seconds until it is killed (default: the task's).")] = None,
    wait: Wait = WAIT_S,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Run a command in a run's container, as the agent would; its output and exit code are passed on."""
    from orchestrator.control import executed
    from orchestrator.wishes import Executed, ExecWish

    place = existing_data_dir(data_dir)
    done = reach(
        place,
        place.find(run),
        ExecWish(command=command, timeout_s=timeout_s),
        Executed,
        lambda session: executed(session.run_id, session.exec(command, timeout_s=timeout_s)),
        wait_s=wait,
    )
    if json:
        print_json(done)
    else:
        sys.stdout.buffer.write(done.output.encode("utf-8", "surrogateescape"))
        sys.stdout.flush()
        if done.timed_out:
            warn("the command ran into its time limit and was killed: give more with --timeout-s")
    raise typer.Exit(_EXEC_FAILED if done.exit_code is None else done.exit_code)


def _ended(run: RunDir) -> RunSummary | None:
    """The run in one row; ``None``: it has not ended."""
    summary = summarise(run)
    return None if summary.status in ("running", "interrupted") else summary


def _end(run: RunDir) -> None:
    """The log of a run whose container is gone says that its operator ended it."""
    with run.lock(), ContextLog.open(run.events_path, run.run_id, writer=True) as log:
        at = head(log.events)
        if at is not None:
            text = "the operator stopped the run; its container was gone"
            log.append(EndEvent(step=at.step, parent_seq=at.seq, status="stopped", reason="user", text=text))
