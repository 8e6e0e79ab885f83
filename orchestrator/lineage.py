"""A run's breakpoints and its status, worked out from its events alone; the door to all that is derived from the log.

Conversation and candidates belong to the live path (``live_path``, ``candidates``); steps, cost, time, submissions and
the stuck count belong to the whole log (``totals``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from orchestrator.candidates import Candidate, candidates
from orchestrator.errors import UsageError
from orchestrator.events import (
    CheckpointEvent,
    EndEvent,
    Event,
    ModelCallEvent,
    Progress,
    RestoreEvent,
    RunEvent,
    SubmissionEvent,
    ToolCallEvent,
)
from orchestrator.live_path import head, live_path, memories_to_inject, messages, unfinished_intent
from orchestrator.totals import Totals, totals
from snapshot_drivers.base import Coverage

__all__ = [
    "BreakpointRow",
    "Candidate",
    "RunStatus",
    "Totals",
    "TreeNode",
    "candidates",
    "checkpoint_events",
    "checkpoints",
    "find_checkpoint",
    "head",
    "is_manual",
    "left_open",
    "live_path",
    "memories_to_inject",
    "messages",
    "next_breakpoint_id",
    "status",
    "totals",
    "tree",
    "unfinished_intent",
]


class BreakpointRow(BaseModel):
    """One checkpoint as ``breakpoints --json`` shows it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    breakpoint_id: int
    parent_id: int | None
    """The checkpoint before it on its own path."""
    kind: str
    """``model``, ``manual`` or ``before_rewind``."""
    step: int
    created_at: str
    driver: str
    snapshot_id: str | None
    """``None``: nothing was captured (``note`` says why), so it cannot be restored."""
    live: bool
    """It lies on the live path."""
    head: bool
    """The run stands at it: the newest checkpoint of the live path."""
    note: str | None
    progress: Progress | None
    files_changed: int
    capture_ms: float
    waited_ms: float
    stored_bytes: int
    coverage: Coverage


class TreeNode(NamedTuple):
    """A checkpoint and those that were taken after it."""

    row: BreakpointRow
    children: list[TreeNode]


class RunStatus(NamedTuple):
    """DESIGN's ``status`` and ``reason``."""

    status: str
    reason: str | None


def checkpoint_events(events: Sequence[Event]) -> list[CheckpointEvent]:
    """All checkpoints in the order in which they were taken."""
    return [event for event in events if isinstance(event, CheckpointEvent)]


def find_checkpoint(events: Sequence[Event], breakpoint_id: int) -> CheckpointEvent:
    """The checkpoint of that number.

    Raises: UsageError: there is none; the message names those that there are.
    """
    found = checkpoint_events(events)
    for event in found:
        if event.breakpoint_id == breakpoint_id:
            return event
    known = f"there are {found[0].breakpoint_id} to {found[-1].breakpoint_id}" if found else "there are none"
    raise UsageError(f"no breakpoint {breakpoint_id} in this run: {known} (see: orchestrator breakpoints RUN)")


def next_breakpoint_id(events: Sequence[Event]) -> int:
    """The number of the next checkpoint; numbers are never used again."""
    return max((event.breakpoint_id for event in checkpoint_events(events)), default=-1) + 1


def checkpoints(events: Sequence[Event]) -> list[BreakpointRow]:
    """A row for each checkpoint, oldest first. What a damaged line hides makes no error: ``live`` ends there."""
    by_seq = {event.seq: event for event in events}
    at = head(events)
    live: set[int] = set()
    while at is not None and at.seq not in live:
        live.add(at.seq)
        at = by_seq.get(at.parent_seq) if at.parent_seq is not None else None
    nearest: dict[int, int | None] = {}
    for event in events:
        above = nearest.get(event.parent_seq) if event.parent_seq is not None else None
        nearest[event.seq] = event.breakpoint_id if isinstance(event, CheckpointEvent) else above
    found = checkpoint_events(events)
    stands_at = max((event.seq for event in found if event.seq in live), default=None)
    return [
        BreakpointRow(
            breakpoint_id=event.breakpoint_id,
            parent_id=nearest.get(event.parent_seq) if event.parent_seq is not None else None,
            kind=event.checkpoint_kind,
            step=event.step,
            created_at=event.at,
            driver=event.driver,
            snapshot_id=event.after,
            live=event.seq in live,
            head=event.seq == stands_at,
            note=event.note if event.error is None else event.error,
            progress=event.progress,
            files_changed=event.files_changed_count,
            capture_ms=event.capture_ms,
            waited_ms=event.waited_ms,
            stored_bytes=event.stored_bytes,
            coverage=event.coverage,
        )
        for event in found
    ]


def tree(rows: Sequence[BreakpointRow]) -> list[TreeNode]:
    """The rows by their parents; usually one root."""
    nodes = {row.breakpoint_id: TreeNode(row, []) for row in rows}
    roots: list[TreeNode] = []
    for node in nodes.values():
        parent = nodes.get(node.row.parent_id) if node.row.parent_id is not None else None
        (parent.children if parent is not None else roots).append(node)
    return roots


def status(events: Sequence[Event], locked: bool) -> RunStatus:
    """Where the run stands in DESIGN's words. ``locked``: somebody holds its lock.

    A run of a manual agent is ``running`` until it is ended, and again after a restore. Another run that nobody drives
    and that did not end is ``interrupted``; a restore by hand does not change how it ended.
    """
    if locked:
        return RunStatus("running", None)
    manual = is_manual(events)
    ended: EndEvent | None = None
    for event in events:
        if isinstance(event, EndEvent):
            ended = event
        elif isinstance(event, ModelCallEvent | ToolCallEvent | SubmissionEvent) or (
            manual and isinstance(event, RestoreEvent)
        ):
            ended = None
    if ended is not None:
        return RunStatus(ended.status, ended.reason)
    return RunStatus("running" if manual else "interrupted", None)


def is_manual(events: Sequence[Event]) -> bool:
    """The run's agent is a person or a script, not a model."""
    first = next((event for event in events if isinstance(event, RunEvent)), None)
    agent = first.task.get("agent") if first is not None else None
    return isinstance(agent, dict) and agent.get("kind") == "manual"


def left_open(events: Sequence[Event]) -> bool:
    """The container was left running on purpose: a manual agent that was not ended, or a restore by hand at the end."""
    open_now = is_manual(events)
    for event in events:
        if isinstance(event, EndEvent | ModelCallEvent):
            open_now = False
        elif isinstance(event, RestoreEvent):
            open_now = True
    return open_now
