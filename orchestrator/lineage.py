"""A run's breakpoints and its status, worked out from its events alone; the door to all that is derived from the log.

Conversation and candidates belong to the live path (``live_path``, ``candidates``); steps, cost, time, submissions and
the stuck count belong to the whole log (``totals``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from orchestrator.candidates import Candidate, candidates
from orchestrator.collected import collected
from orchestrator.errors import LogDamaged, UsageError
from orchestrator.events import (
    CheckpointEvent,
    EndEvent,
    Event,
    ModelCallEvent,
    Progress,
    RestoreEvent,
    ResumeEvent,
    RewindEvent,
    RunEvent,
    SubmissionEvent,
    ToolCallEvent,
)
from orchestrator.live_path import (
    broken_ways,
    head,
    live_path,
    memories_to_inject,
    messages,
    unfinished_intent,
    way_back,
)
from orchestrator.totals import Totals, totals
from snapshot_drivers.base import Coverage

__all__ = [
    "BreakpointRow",
    "Candidate",
    "RunStatus",
    "Totals",
    "TreeNode",
    "broken_way",
    "broken_ways",
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
    "way_back",
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
    collected: str | None = None
    """When ``gc`` removed its snapshot, by the retention of the run: it cannot be restored any more."""
    damaged: str | None = None
    """Why it cannot be restored although it was whole once: its context cannot be read, or its snapshot is gone."""


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

    Raises: UsageError: there is none; the message names those that there are. LogDamaged: there was one.
    """
    found = checkpoint_events(events)
    for event in found:
        if event.breakpoint_id == breakpoint_id:
            return event
    if 0 <= breakpoint_id < max((event.breakpoint_id for event in found), default=0):
        raise LogDamaged(
            f"breakpoint {breakpoint_id}: its line in the log cannot be read (see: orchestrator verify RUN)"
        )
    known = f"there are {found[0].breakpoint_id} to {found[-1].breakpoint_id}" if found else "there are none"
    raise UsageError(f"no breakpoint {breakpoint_id} in this run: {known} (see: orchestrator breakpoints RUN)")


def next_breakpoint_id(events: Sequence[Event], lost_lines_after: Callable[[int], int] = lambda _seq: 0) -> int:
    """The number of the next checkpoint; numbers are never used again.

    ``lost_lines_after``: how many lines behind an event cannot be read: each may have been a checkpoint.
    """
    number, seq = max(((event.breakpoint_id, event.seq) for event in checkpoint_events(events)), default=(-1, -1))
    return number + 1 + lost_lines_after(seq)


def checkpoints(events: Sequence[Event]) -> list[BreakpointRow]:
    """A row for each checkpoint, oldest first. What a damaged line hides makes no error: ``live`` ends there."""
    at = head(events)
    live = {event.seq for event in way_back(events, at.seq)} if at is not None else set()
    broken = broken_ways(events)
    gone = collected(events)
    nearest: dict[int, int | None] = {}
    for event in events:
        above = nearest.get(event.parent_seq) if event.parent_seq is not None else None
        nearest[event.seq] = event.breakpoint_id if isinstance(event, CheckpointEvent) else above
    found = checkpoint_events(events)
    stands_at = max((event.seq for event in found if event.seq in live), default=None)
    rows = (
        row_of(
            event,
            parent_id=nearest.get(event.parent_seq) if event.parent_seq is not None else None,
            live=event.seq in live,
            head=event.seq == stands_at,
        )
        for event in found
    )
    return [
        row.model_copy(update={"collected": gone.get(event.after or ""), "damaged": broken_way(broken.get(event.seq))})
        for event, row in zip(found, rows, strict=True)
    ]


def row_of(event: CheckpointEvent, *, parent_id: int | None, live: bool, head: bool) -> BreakpointRow:
    """The row of one checkpoint that is whole."""
    return BreakpointRow(
        breakpoint_id=event.breakpoint_id,
        parent_id=parent_id,
        kind=event.checkpoint_kind,
        step=event.step,
        created_at=event.at,
        driver=event.driver,
        snapshot_id=event.after,
        live=live,
        head=head,
        note=event.note if event.error is None else event.error,
        progress=event.progress,
        files_changed=event.files_changed_count,
        capture_ms=event.capture_ms,
        waited_ms=event.waited_ms,
        stored_bytes=event.stored_bytes,
        coverage=event.coverage,
    )


def broken_way(last_readable: Event | None) -> str | None:
    """In words, why the conversation of a checkpoint cannot be read (see ``broken_ways``); ``None``: it can."""
    if last_readable is None:
        return None
    return f"event {last_readable.seq} continues event {last_readable.parent_seq}, which cannot be read"


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
        elif isinstance(event, ModelCallEvent | ToolCallEvent | SubmissionEvent | ResumeEvent) or (
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
    ended = False
    for event in events:
        if isinstance(event, EndEvent | ModelCallEvent | ResumeEvent):
            open_now, ended = False, isinstance(event, EndEvent)
        elif isinstance(event, RestoreEvent) or (isinstance(event, RewindEvent) and ended):
            open_now = True
    return open_now
