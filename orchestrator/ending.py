"""When a run is over: a pure function of its log, so that a rewind changes no count."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from orchestrator.events import Event, ResumeEvent, SubmissionEvent
from orchestrator.task import Limits
from orchestrator.totals import Totals, totals


class Ending(NamedTuple):
    """How a run ended: DESIGN's status and reason, and a sentence for the operator."""

    status: Literal["succeeded", "failed", "stopped", "interrupted"]
    reason: str | None
    text: str
    keep: bool = False
    """The container stays, whatever the task says: its state is in no checkpoint, or somebody will go on with it."""


def limits_now(limits: Limits, events: Sequence[Event]) -> Limits:
    """The task's ``limits`` with what the run's resumes have raised."""
    raised = {name: value for event in events if isinstance(event, ResumeEvent) for name, value in event.limits.items()}
    return Limits.model_validate({**limits.model_dump(), **raised})


def time_left_s(events: Sequence[Event], limits: Limits, now: datetime, used: Totals | None = None) -> float | None:
    """How much of the run's wall time is left, at least 0; ``None``: it has no such limit. ``now``: aware UTC."""
    if limits.wall_time_s is None:
        return None
    return max(0.0, limits.wall_time_s - _driven_s(events, used or totals(events), now))


def ending(
    events: Sequence[Event], path: Sequence[Event], limits: Limits, now: datetime, used: Totals | None = None
) -> Ending | None:
    """Why no further request is sent; ``None``: the run goes on.

    A passed submission ends the run when it lies on the live ``path``; every limit is counted over all ``events``.
    ``now``: aware UTC. ``used``: their totals, where these are known already.
    """
    if any(isinstance(event, SubmissionEvent) and event.failed is None for event in path):
        return Ending("succeeded", "checklist", "every criterion of the checklist is satisfied")
    used = used or totals(events)
    if limits.stuck_submissions is not None and used.stuck_count >= limits.stuck_submissions:
        return Ending("stopped", "stuck", f"{used.stuck_count} submissions in a row failed at the same criterion")
    if limits.steps is not None and used.steps >= limits.steps:
        return Ending("failed", "limit_steps", f"{used.steps} steps were made")
    if limits.cost_usd is not None and used.cost_usd >= limits.cost_usd:
        return Ending("failed", "limit_cost", f"${used.cost_usd:.4f} were spent")
    if limits.wall_time_s is not None and (driven_s := _driven_s(events, used, now)) >= limits.wall_time_s:
        return Ending("failed", "limit_time", f"{driven_s:.0f} s have passed")
    return None


def _driven_s(events: Sequence[Event], used: Totals, now: datetime) -> float:
    """For how long the run has been driven, the time since its last event included."""
    since_s = (now - datetime.fromisoformat(events[-1].at)).total_seconds() if events else 0.0
    return used.duration_s + max(0.0, since_s)
