"""Commands that work on a run from outside: checkpoint, restore, exec."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.answer import print_json, say, warn
from orchestrator.cli.options import DataDirPath, Json, Run, connect, existing_data_dir
from orchestrator.cli.render import size

if TYPE_CHECKING:
    from orchestrator.session import Session

_EXEC_FAILED = 1
"""Exit code where the command itself has none (it was killed at its time limit)."""


class Verify(StrEnum):
    """How much of a restored tree is compared with the snapshot."""

    DIFFERENCE = "difference"
    FULL = "full"


def checkpoint(
    run: Run,
    note: Annotated[str | None, typer.Option(help="What to remember it by.")] = None,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Take a breakpoint of a run now, by hand."""
    with _session(data_dir, run) as session:
        row = session.checkpoint(note)
    if json:
        print_json(row)
        return
    coverage = "" if row.coverage.complete else ", coverage incomplete (see: orchestrator breakpoints --json)"
    say(f"breakpoint {row.breakpoint_id}: captured in {row.capture_ms:.0f} ms, {size(row.stored_bytes)}{coverage}")


def restore(
    run: Run,
    breakpoint_id: Annotated[int, typer.Argument(metavar="BREAKPOINT", help="An id that 'breakpoints' lists.")],
    verify: Annotated[Verify, typer.Option(help="Compare what was touched, or the whole tree.")] = Verify.DIFFERENCE,
    accept_partial: Annotated[
        bool, typer.Option("--accept-partial", help="Go on although the snapshot does not hold everything.")
    ] = False,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Take a run back to a breakpoint: its container and its conversation."""
    with _session(data_dir, run, recreate=True) as session:
        result = session.restore(breakpoint_id, verify=verify.value, accept_partial=accept_partial)
    if json:
        print_json(result)
        return
    say(
        f"run {result.run_id} stands at breakpoint {result.breakpoint_id} again "
        f"({result.restore_ms:.0f} ms, verified: {result.verified})"
    )
    if result.previous_container not in (None, result.container):
        say(f"container: {result.previous_container} → {result.container}")
    else:
        say(f"container: {result.container}")
    for name in result.processes.missing:
        warn(f"not running after the restore: {name}")


def execute(
    run: Run,
    command: Annotated[list[str], typer.Argument(metavar="-- CMD", help="The command and its arguments.")],
    timeout_s: Annotated[float | None, typer.Option(help="Seconds until it is killed (default: the task's).")] = None,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Run a command in a run's container, as the agent would; its output and exit code are passed on."""
    with _session(data_dir, run) as session:
        done = session.exec(command, timeout_s=timeout_s)
    if json:
        print_json(
            {
                "run_id": session.run_id,
                "exit_code": done.exit_code,
                "output": done.output.decode("utf-8", "surrogateescape"),
                "truncated_bytes": done.truncated_bytes,
                "timed_out": done.timed_out,
                "duration_ms": done.duration_ms,
                "left_running": done.left_running,
            }
        )
    else:
        sys.stdout.buffer.write(done.output)
        sys.stdout.flush()
        if done.timed_out:
            warn("the command ran into its time limit and was killed: give more with --timeout-s")
    raise typer.Exit(_EXEC_FAILED if done.exit_code is None else done.exit_code)


@contextmanager
def _session(given: Path | None, name: str, *, recreate: bool = False) -> Iterator[Session]:
    """The run that ``name`` means, open and locked; ``recreate``: with a container, should it be gone."""
    from orchestrator.session import Session

    place = existing_data_dir(given)
    run_id = place.find(name).run_id
    with Session.open(place, run_id, connect(), environ=os.environ, recreate=recreate) as session:
        yield session
