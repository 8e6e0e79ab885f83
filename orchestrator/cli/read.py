"""Commands that only read: runs, show, breakpoints, log."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.answer import print_json, print_json_line, say, warn
from orchestrator.cli.event_lines import event_line
from orchestrator.cli.follow import later_events
from orchestrator.cli.options import DataDirPath, Json, Run, existing_data_dir
from orchestrator.cli.render import console, money, one_line, seconds, show_table, size, styled, visible
from orchestrator.cli.run_view import RunSummary, RunView, details_of, read_run, stored_rows, summarise, summary_of
from orchestrator.errors import UsageError
from orchestrator.events import Event, Message, Progress
from orchestrator.lineage import BreakpointRow, head, live_path, messages, way_back


def runs(json: Json = False, data_dir: DataDirPath = None) -> None:
    """List all runs, oldest first."""
    summaries = [summarise(run) for run in existing_data_dir(data_dir).runs()]
    if json:
        print_json(summaries)
        return
    for row in summaries:
        if row.error is not None:
            warn(f"run {row.run_id}: {row.error}")
    if not summaries:
        say("There are no runs yet. Start one with: orchestrator launch TASK")
        return
    show_table(
        ["RUN", "TASK", "STATUS", "PROGRESS", "STEPS", "BREAKPOINTS", "REWINDS", "COST", "CREATED"],
        [
            [
                row.run_id,
                row.task or "?",
                _status(row),
                _progress(row.progress),
                str(row.steps),
                str(row.breakpoints),
                str(row.rewinds),
                money(row.cost_usd or 0.0, row.cost_unknown),
                row.created_at[:19],
            ]
            for row in summaries
        ],
        right=frozenset({"STEPS", "BREAKPOINTS", "REWINDS"}),
    )


def show(run: Run, json: Json = False, data_dir: DataDirPath = None) -> None:
    """Show one run: how it stands, what it has used."""
    view = read_run(existing_data_dir(data_dir), run)
    summary, details = summary_of(view), details_of(view)
    if json:
        print_json(summary.model_dump() | details)
        return
    usage = details["usage"]
    assert isinstance(usage, dict)
    tokens = str(usage["total_tokens"] or 0)
    lines = [
        ("run", summary.run_id),
        ("task", summary.task or "?"),
        ("status", _status(summary)),
        ("said last", one_line(str(details["text"])) if details["text"] else "-"),
        ("progress", _progress(summary.progress)),
        ("stands at", "-" if details["head"] is None else f"breakpoint {details['head']}"),
        ("breakpoints", f"{summary.breakpoints}, {summary.rewinds} rewinds"),
        ("steps", f"{summary.steps}, {details['tool_calls']} tool calls, {details['submissions']} submissions"),
        ("cost", money(summary.cost_usd or 0.0, summary.cost_unknown)),
        ("tokens", tokens + (f" + {details['usage_unknown']} calls unknown" if details["usage_unknown"] else "")),
        ("driven for", seconds(summary.duration_s)),
        ("created", summary.created_at),
        ("driver", summary.driver or "?"),
        ("container", summary.container or "?"),
        ("directory", str(details["path"])),
    ]
    for label, text in lines:
        say(f"{label:<12} {text}")
    if details["unfinished"] is not None:
        warn(f"a rewind to breakpoint {details['unfinished']} was cut off: the next start finishes it")


def breakpoints(
    run: Run,
    live: Annotated[bool, typer.Option("--live", help="Only those of the live path.")] = False,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """List a run's breakpoints: where it may be restored to."""
    place = existing_data_dir(data_dir)
    view = read_run(place, run)
    rows = stored_rows(place, view)
    rows = [row for row in rows if row.live or not live]
    if json:
        print_json(rows)
        return
    show_table(
        ["", "ID", "PARENT", "KIND", "STEP", "PROGRESS", "FILES", "CAPTURE", "STORED", "COVERAGE", "NOTE"],
        [_breakpoint_cells(row) for row in rows],
        right=frozenset({"ID", "PARENT", "STEP", "FILES", "CAPTURE", "STORED"}),
    )
    say("\n● the run stands here   │ live path   (others were abandoned)")


def log(
    run: Run,
    live: Annotated[bool, typer.Option("--live", help="Only the live path.")] = False,
    conversation: Annotated[bool, typer.Option("--messages", help="The live conversation in full instead.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new events while the run goes on.")
    ] = False,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Show a run's events, oldest first; with --follow and --json one event a line."""
    if follow:
        if live or conversation:
            raise UsageError("--follow shows all events as they come: leave --live and --messages out")
        _follow(read_run(existing_data_dir(data_dir), run), as_json=json)
        return
    view = read_run(existing_data_dir(data_dir), run)
    at = head(view.events)
    events = view.events
    if (live or conversation) and at is not None:
        events = live_path(view.events, at.seq)
    if conversation:
        _show_conversation(messages(events), as_json=json)
    elif json:
        print_json(events)
    else:
        _show_events(view, events)


def _follow(view: RunView, *, as_json: bool) -> None:
    out = console()
    for event in later_events(view):
        if as_json:
            print_json_line(event)
            continue
        line = event_line(event)
        out.print(styled(f"{event.at[11:19]} {event.step:>3}  {line.label:<10} {line.text}", line.style))
        out.file.flush()


def _show_events(view: RunView, events: list[Event]) -> None:
    at = head(view.events)
    on_path = {event.seq for event in way_back(view.events, at.seq)} if at is not None else set()
    out = console()
    for event in events:
        line = event_line(event)
        mark = "│" if event.seq in on_path else " "
        out.print(styled(f"{event.at[11:19]} {mark} {event.step:>3}  {line.label:<10} {line.text}", line.style))


def _show_conversation(conversation: list[Message], *, as_json: bool) -> None:
    if as_json:
        print_json(conversation)
        return
    out = console()
    for message in conversation:
        out.print(styled(f"── {message.get('role')} ──", "bold"))
        content = message.get("content")
        if content:
            out.print(styled(content if isinstance(content, str) else repr(content)))
        for call in message.get("tool_calls") or []:
            function = call.get("function") or {}
            out.print(styled(f"→ {function.get('name')} {function.get('arguments')}", "cyan"))


def _breakpoint_cells(row: BreakpointRow) -> list[str]:
    return [
        "●" if row.head else "│" if row.live else " ",
        str(row.breakpoint_id),
        "-" if row.parent_id is None else str(row.parent_id),
        row.kind,
        str(row.step),
        _progress(row.progress),
        str(row.files_changed),
        f"{row.capture_ms:.0f} ms",
        size(row.stored_bytes),
        _state(row),
        one_line(row.damaged or row.note or "", 60),
    ]


def _state(row: BreakpointRow) -> str:
    if row.damaged:
        return "DAMAGED"
    if row.collected:
        return "collected"
    if row.snapshot_id is None:
        return "no snapshot"
    return "complete" if row.coverage.complete else "partial"


def _status(summary: RunSummary) -> str:
    return visible(summary.status + (f" ({summary.reason})" if summary.reason else ""))


def _progress(progress: Progress | None) -> str:
    return "-" if progress is None else f"{progress.satisfied}/{progress.total}"
