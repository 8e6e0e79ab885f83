"""One line for each event, for ``log`` and for the progress of a run."""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.cli.render import one_line, size
from orchestrator.events import (
    CheckpointEvent,
    CollectEvent,
    EndEvent,
    EngineErrorEvent,
    Event,
    ModelCallEvent,
    ModelFailureEvent,
    ModelStartEvent,
    NoteEvent,
    RestoreEvent,
    ResumeEvent,
    RewindEvent,
    RewindIntentEvent,
    RunEvent,
    SubmissionEvent,
    ToolCallEvent,
    ToolStartEvent,
)

WIDTH = 100
"""Characters of foreign text in one line."""


class EventLine(NamedTuple):
    """An event for a person; ``text`` is visible text on one line."""

    label: str
    text: str
    style: str


def event_line(event: Event, width: int = WIDTH) -> EventLine:
    """What to show of the event."""
    if isinstance(event, ModelCallEvent):
        return EventLine("model", _model_call(event, width), "cyan")
    if isinstance(event, ToolCallEvent):
        return EventLine("tool", _tool_call(event, width), "red" if event.error or event.exit_code else "")
    if isinstance(event, CheckpointEvent):
        return EventLine("checkpoint", _checkpoint(event, width), "dim")
    if isinstance(event, SubmissionEvent):
        passed = event.failed is None
        text = f"{event.progress.satisfied}/{event.progress.total} criteria hold"
        failed = "" if event.failed is None else f"; first that does not: {one_line(event.failed, width)}"
        return EventLine("submission", text + failed, "green" if passed else "yellow")
    if isinstance(event, RewindEvent):
        text = f"back to breakpoint {event.breakpoint_id} in {event.restore_ms:.0f} ms: {one_line(event.memory, width)}"
        return EventLine("rewind", text, "magenta")
    if isinstance(event, RestoreEvent):
        return EventLine("restore", f"to breakpoint {event.breakpoint_id} in {event.restore_ms:.0f} ms", "magenta")
    return _other(event, width)


def _other(event: Event, width: int) -> EventLine:
    if isinstance(event, RunEvent):
        return EventLine("run", one_line(f"{event.run_id} in {event.container}, driver {event.driver}", width), "bold")
    if isinstance(event, RewindIntentEvent):
        return EventLine("intent", f"going back to breakpoint {event.breakpoint_id}", "dim")
    if isinstance(event, ModelStartEvent):
        return EventLine("asking", "a request is sent", "dim")
    if isinstance(event, ToolStartEvent):
        return EventLine("running", one_line(event.name, width), "dim")
    if isinstance(event, ResumeEvent):
        return EventLine("resume", one_line(_resume(event), width), "magenta")
    if isinstance(event, ModelFailureEvent):
        return EventLine("model", one_line(event.text, width), "red")
    if isinstance(event, EngineErrorEvent):
        return EventLine("engine", one_line(event.text, width), "red")
    if isinstance(event, CollectEvent):
        return EventLine("collect", f"gc removes {len(event.snapshots)} snapshots", "yellow")
    if isinstance(event, EndEvent):
        reason = f" ({event.reason})" if event.reason else ""
        text = f": {one_line(event.text, width)}" if event.text else ""
        return EventLine("end", f"{event.status}{reason}{text}", "green" if event.status == "succeeded" else "yellow")
    assert isinstance(event, NoteEvent)
    return EventLine("note", one_line(event.text, width), "yellow")


def _resume(event: ResumeEvent) -> str:
    old, new = (event.previous_container_id or "")[:12], event.container_id[:12]
    where = f"in container {new}" if old in ("", new) else f"container {old} → {new}"
    raised = ", ".join(f"{name} {value:g}" for name, value in event.limits.items())
    return f"the run goes on, {where}" + (f"; limits raised: {raised}" if raised else "")


def _model_call(event: ModelCallEvent, width: int) -> str:
    answer = next((message for message in reversed(event.messages) if message.get("role") == "assistant"), {})
    content = answer.get("content")
    text = content if isinstance(content, str) else ""
    functions = [call.get("function") or {} for call in answer.get("tool_calls") or [] if isinstance(call, dict)]
    calls = ", ".join(str(function.get("name")) for function in functions)
    tokens = event.usage.total_tokens if event.usage else None
    numbers = f"{'?' if tokens is None else tokens} tokens, {event.latency_ms / 1000:.1f} s"
    tries = f", {event.attempts} tries" if event.attempts > 1 else ""
    shown = " ".join(
        part for part in (one_line(text.strip(), width), f"→ {one_line(calls, width)}" if calls else "") if part
    )
    if event.call is not None and event.call.incomplete:
        tries += ", incomplete"
    if event.call is not None and "raised" in event.response:
        error = event.response["raised"].get("$error") or event.response["raised"].get("$text") or {}
        shown = f"raised {one_line(str(error.get('type')), width)}"
    return f"{shown or '(empty answer)'}  [{numbers}{tries}]"


def _tool_call(event: ToolCallEvent, width: int) -> str:
    if event.error in ("stopped", "limit_time"):
        ended = f"cut short: {event.error}"
    elif event.error is not None:
        ended = f"not run: {one_line(event.error, width)}"
    elif event.timed_out:
        ended = "timed out"
    elif event.exit_code is not None:
        ended = f"exit {event.exit_code}"
    else:
        ended = "done"
    changed = f", {event.files_changed_count} files changed" if event.files_changed_count else ""
    name, arguments = one_line(event.name, 40), one_line(event.arguments, width)
    tries = f", try {event.attempt}" if event.attempt > 1 else ""
    return f"{name} {arguments}  [{ended}, {event.duration_ms:.0f} ms{changed}{tries}]"


def _checkpoint(event: CheckpointEvent, width: int) -> str:
    head = f"{event.breakpoint_id}"
    if event.checkpoint_kind != "model":
        head += f" ({event.checkpoint_kind})"
    if event.after is None:
        return f"{head}: nothing captured: {one_line(event.error or '', width)}"
    note = f": {one_line(event.note, width)}" if event.note else ""
    partial = "" if event.coverage.complete else ", coverage incomplete"
    waited = f", waited {event.waited_ms:.0f} ms" if event.waited_ms >= 1 else ""
    return (
        f"{head}{note}  [{event.capture_ms:.0f} ms, frozen {event.frozen_ms:.0f} ms{waited}, "
        f"{size(event.stored_bytes)} stored{partial}]"
    )
