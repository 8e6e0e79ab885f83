"""What the agent may rewind to: the breakpoints of the live path, with what happened since each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from pydantic import BaseModel, ConfigDict

from orchestrator.events import (
    CheckpointEvent,
    Event,
    ModelCallEvent,
    Progress,
    RewindEvent,
    SubmissionEvent,
    ToolCallEvent,
)
from orchestrator.live_path import OFFERED_KINDS, head, live_path

MAX_CANDIDATES = 80
"""As in AgentRewind (arXiv 2608.14380)."""
MAX_PATHS = 20
ABOUT_TO_CHARS = 200


class Candidate(BaseModel):
    """One breakpoint of the live path, as ``backtrack_candidates`` answers it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    breakpoint_id: int
    step: int
    about_to: str
    """What the model did next: the beginning of its text, else of its tool calls. Empty: nothing yet."""
    tools_since: dict[str, int]
    """How often each tool was used on the live path since."""
    files_changed_since: int
    """Different paths, as far as they were recorded."""
    files: list[str]
    """At most 20 of these paths."""
    progress: Progress | None
    """The checklist at that moment; ``None``: nothing had been submitted."""
    earlier_failures: list[str]
    """Memories of the rewinds that went back to it, oldest first."""


def candidates(
    events: Sequence[Event], is_stored: Callable[[str], bool] = lambda _snapshot_id: True
) -> list[Candidate]:
    """At most 80 restorable checkpoints of the live path, newest first; ``is_stored``: whether a snapshot still exists.

    Raises: LogDamaged: the live path cannot be read.
    """
    at = head(events)
    if at is None:
        return []
    path = live_path(events, at.seq)
    about_to = _first_calls(events)
    failures: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, RewindEvent):
            failures.setdefault(event.breakpoint_id, []).append(event.memory)
    progress_at = _progress_along(path)
    tools: Counter[str] = Counter()
    files: dict[str, None] = {}
    unlisted = 0
    next_call: ModelCallEvent | None = None
    found: list[Candidate] = []
    for event in reversed(path):
        if isinstance(event, ToolCallEvent):
            tools[event.name] += 1
            files.update(dict.fromkeys(change.path for change in event.files_changed))
            unlisted += max(0, event.files_changed_count - len(event.files_changed))
        elif isinstance(event, ModelCallEvent):
            next_call = event
        elif is_candidate(event) and is_stored(event.after or ""):
            call = about_to.get(event.breakpoint_id, next_call)
            found.append(
                Candidate(
                    breakpoint_id=event.breakpoint_id,
                    step=event.step,
                    about_to=_intention(call) if call is not None else "",
                    tools_since=dict(sorted(tools.items())),
                    files_changed_since=len(files) + unlisted,
                    files=sorted(files)[:MAX_PATHS],
                    progress=event.progress or progress_at.get(event.seq),
                    earlier_failures=failures.get(event.breakpoint_id, []),
                )
            )
            if len(found) == MAX_CANDIDATES:
                break
    return found


def is_candidate(event: Event) -> TypeGuard[CheckpointEvent]:
    """It is a checkpoint that the agent may go back to: on the run's own way, with a snapshot."""
    return isinstance(event, CheckpointEvent) and event.checkpoint_kind in OFFERED_KINDS and event.after is not None


def _first_calls(events: Sequence[Event]) -> dict[int, ModelCallEvent]:
    """The first model call of each breakpoint, abandoned or not."""
    calls: dict[int, ModelCallEvent] = {}
    for event in events:
        if isinstance(event, ModelCallEvent):
            calls.setdefault(event.breakpoint_id, event)
    return calls


def _progress_along(path: Sequence[Event]) -> dict[int, Progress]:
    """The progress known at each event of the path, by its number."""
    known: dict[int, Progress] = {}
    at: Progress | None = None
    for event in path:
        if isinstance(event, SubmissionEvent):
            at = event.progress
        if at is not None:
            known[event.seq] = at
    return known


def _intention(call: ModelCallEvent) -> str:
    """The beginning of the answer's text, else of its tool calls."""
    answer: dict[str, Any] = next((item for item in reversed(call.messages) if item.get("role") == "assistant"), {})
    text = _text(answer.get("content")).strip()
    if not text:
        functions = [item.get("function") or {} for item in answer.get("tool_calls") or [] if isinstance(item, dict)]
        text = "; ".join(f"{function.get('name')} {function.get('arguments')}" for function in functions)
    return text[:ABOUT_TO_CHARS]


def _text(content: object) -> str:
    """The text of a message's content, which is a text or a list of parts."""
    if isinstance(content, list):
        return " ".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
