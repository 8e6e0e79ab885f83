"""What a run has used: sums over the *whole* log, so that a rewind resets none of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.events import (
    CheckpointEvent,
    EndEvent,
    EngineErrorEvent,
    Event,
    ModelCallEvent,
    ModelFailureEvent,
    ModelStartEvent,
    Progress,
    ResumeEvent,
    RewindEvent,
    SubmissionEvent,
    ToolCallEvent,
    Usage,
)


class Totals(BaseModel):
    """What a run has used, over the whole log."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = 0
    """Model answers, those that had to be dropped included."""
    tool_calls: int = 0
    cost_usd: float = 0.0
    """Sum of the known costs."""
    cost_unknown: int = 0
    """Model calls whose cost is not known."""
    usage: Usage = Field(default_factory=Usage)
    """Sums of the known numbers; ``None`` where no call stated one."""
    usage_unknown: int = 0
    """Model calls whose total tokens are not known."""
    submissions: int = 0
    stuck_count: int = 0
    """Consecutive last submissions that failed at the same first criterion."""
    progress: Progress | None = None
    """Of the last submission."""
    requests_lost: int = 0
    """Requests that were sent by a process which ended before the answer came: what they cost is not known."""
    checkpoints: int = 0
    rewinds: int = 0
    duration_s: float = 0.0
    """Time in which the run was driven: stretches after an ``end`` or before a ``resume`` do not count."""


def totals(events: Sequence[Event]) -> Totals:
    """What the run has used so far, over the whole log. Unknown numbers are counted, never taken for 0."""
    calls = [event for event in events if isinstance(event, ModelCallEvent)]
    errors = [event for event in events if isinstance(event, EngineErrorEvent) and event.cost_usd is not None]
    submissions = [event for event in events if isinstance(event, SubmissionEvent)]
    usages = [event.usage or Usage() for event in calls]
    return Totals(
        steps=len(calls) + len(errors),
        tool_calls=sum(isinstance(event, ToolCallEvent) for event in events),
        cost_usd=sum(event.cost_usd or 0.0 for event in calls) + sum(event.cost_usd or 0.0 for event in errors),
        cost_unknown=sum(event.cost_usd is None for event in calls),
        usage=Usage(**{name: _known_sum([getattr(usage, name) for usage in usages]) for name in Usage.model_fields}),
        usage_unknown=sum(usage.total_tokens is None for usage in usages),
        submissions=len(submissions),
        stuck_count=_stuck_count(submissions),
        progress=submissions[-1].progress if submissions else None,
        requests_lost=sum(lost for lost, _ in _lost_requests(events)),
        checkpoints=sum(isinstance(event, CheckpointEvent) for event in events),
        rewinds=sum(isinstance(event, RewindEvent) for event in events),
        duration_s=_driven_s(events),
    )


def requests_lost_now(events: Sequence[Event]) -> int:
    """How many requests for the answer that is awaited now were lost with the processes that sent them."""
    return sum(lost for lost, answered in _lost_requests(events) if not answered)


def _lost_requests(events: Sequence[Event]) -> list[tuple[int, bool]]:
    """For each answer or failure, the requests lost on the way to it; at the end those of the answer still awaited."""
    found: list[tuple[int, bool]] = []
    under_way, lost = False, 0
    for event in events:
        if isinstance(event, ModelStartEvent):
            under_way = True
        elif isinstance(event, ModelCallEvent | ModelFailureEvent):
            found.append((lost, True))
            under_way, lost = False, 0
        elif isinstance(event, ResumeEvent):
            lost += under_way
            under_way = False
        elif (isinstance(event, EngineErrorEvent) and event.cost_usd is not None) or (
            isinstance(event, EndEvent) and event.reason == "model_error"
        ):
            under_way = False  # it was answered, for all that came of it
    return [*found, (lost, False)]


def _known_sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _stuck_count(submissions: list[SubmissionEvent]) -> int:
    count = 0
    for event in reversed(submissions):
        if event.failed is None or event.failed != submissions[-1].failed:
            break
        count += 1
    return count


def _driven_s(events: Sequence[Event]) -> float:
    total = 0.0
    for before, after in itertools.pairwise(events):
        if not isinstance(before, EndEvent) and not isinstance(after, ResumeEvent):
            gap = datetime.fromisoformat(after.at) - datetime.fromisoformat(before.at)
            total += max(0.0, gap.total_seconds())
    return round(total, 3)
