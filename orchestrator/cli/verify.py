"""The command that looks for damage: verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.answer import print_json, say, warn
from orchestrator.cli.options import DataDirPath, Json, Run, existing_data_dir
from orchestrator.context_log import ContextLog

if TYPE_CHECKING:
    from orchestrator.verify import Problem, Verification

_DAMAGED = 4


def verify(
    run: Run,
    content: Annotated[bool, typer.Option("--content", help="Read and hash all stored content again.")] = False,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Check a run: each line of its log, each snapshot that it names; and say what can still be restored."""
    from orchestrator.stored import driver_of
    from orchestrator.verify import verify as look

    place = existing_data_dir(data_dir)
    found = place.find(run)
    log = ContextLog.open(found.events_path, found.run_id)
    driver = driver_of(found, log.events, place.store)
    try:
        result = look(found, log, driver, content=content)
    finally:
        driver.close()
    if json:
        print_json(result)
    else:
        _show(result)
    raise typer.Exit(0 if result.whole else _DAMAGED)


def _show(result: Verification) -> None:
    for problem in result.problems:
        say(f"{_place(problem)}: {problem.text}")
    for note in result.notes:
        warn(f"{_place(note)}: {note.text}")
    for lost in result.not_restorable:
        say(f"breakpoint {lost.breakpoint_id} cannot be restored: {lost.reason} ({lost.file}:{lost.line})")
    say(f"restorable breakpoints: {_ranges(result.restorable)}")
    if result.partial:
        say(f"of these with --accept-partial only: {_ranges(result.partial)}")
    checked = "read and hashed" if result.content else "present (their content is read with --content)"
    verdict = "whole" if result.whole else f"DAMAGED in {len(result.problems)} places"
    say(f"run {result.run_id}: {verdict}: {result.lines} lines, {result.snapshots} snapshots {checked}")


def _place(problem: Problem) -> str:
    return problem.file if problem.line is None else f"{problem.file}:{problem.line}"


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3, 5``; ``none``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found) or "none"
