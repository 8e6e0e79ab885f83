"""Where a run goes on in another process: pure functions over its events, so that resuming twice changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.events import (
    CheckpointEvent,
    Event,
    ModelCallEvent,
    NoteEvent,
    RestoreEvent,
    ResumeEvent,
    RewindEvent,
    RunEvent,
    SubmissionEvent,
    ToolCallEvent,
    ToolStartEvent,
)
from orchestrator.live_path import head, live_path


class OpenStep(NamedTuple):
    """A logged answer whose consequences are not all in the log."""

    answer: ModelCallEvent
    answered: int
    """How many of its calls have their line."""
    submission: SubmissionEvent | None
    """Of the next call: the checklist has been run for it, only the call's own line is missing."""


class ResumePoint(NamedTuple):
    """What the head of a run asks of the process that takes it up."""

    before_first_step: bool
    """Nothing was asked or captured yet: the container is made and set up anew."""
    snapshot_id: str | None
    """The container's state at the head; ``None``: it was not captured."""
    at_breakpoint: bool
    """The head is a checkpoint: the request is sent (again) from there, without another one."""
    step: OpenStep | None
    programs_told: bool
    """The conversation's last words say already that no program runs any more."""


def resume_point(events: Sequence[Event]) -> ResumePoint:
    """Where the run stands, as its log says.

    Raises: LogDamaged: the live path cannot be read.
    """
    at = head(events)
    if at is None:
        return ResumePoint(True, None, False, None, False)
    path = live_path(events, at.seq)
    last = next((event for event in reversed(path) if not isinstance(event, NoteEvent)), at)
    return ResumePoint(
        before_first_step=isinstance(last, RunEvent),
        snapshot_id=last.after,
        at_breakpoint=isinstance(at, CheckpointEvent),
        step=_open_step(path),
        programs_told=isinstance(at, RewindEvent) or (isinstance(at, NoteEvent) and at.text == RESTARTED),
    )


RESTARTED = "the agent is told that its programs ended with the process that drove the run"
"""Text of the note whose message says so."""


def _open_step(path: Sequence[Event]) -> OpenStep | None:
    answered = 0
    submission: SubmissionEvent | None = None
    for event in reversed(path):
        if isinstance(event, ToolCallEvent):
            answered += 1
        elif isinstance(event, SubmissionEvent):
            submission = event if answered == 0 else submission
        elif isinstance(event, ModelCallEvent):
            calls = len(event.messages[0].get("tool_calls") or []) if event.messages else 0
            nudge_is_missing = calls == 0 and event is path[-1]
            return OpenStep(event, answered, submission) if answered < calls or nudge_is_missing else None
        elif not isinstance(event, NoteEvent):
            return None
    return None


def tries(events: Sequence[Event], answer_seq: int, position: int) -> int:
    """How often the call at that place of the answer was begun, tries that a crash cut off included."""
    after = itertools.takewhile(lambda event: event.seq != answer_seq, reversed(events))
    return sum(
        isinstance(event, ToolStartEvent) and (event.answer_seq, event.position) == (answer_seq, position)
        for event in after
    )


def last_container_id(events: Sequence[Event]) -> str | None:
    """The engine's id of the container that the run last had; ``None``: its log does not say."""
    kinds = RunEvent | RewindEvent | RestoreEvent | ResumeEvent
    ids = (event.container_id for event in reversed(events) if isinstance(event, kinds))
    return next((found for found in ids if found is not None), None)
