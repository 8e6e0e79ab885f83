"""When a run is over: a pure function of its log, so that a rewind changes no count."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from orchestrator.events import Event, SubmissionEvent
from orchestrator.task import Limits
from orchestrator.totals import totals


class Ending(NamedTuple):
    """How a run ended: DESIGN's status and reason, and a sentence for the operator."""

    status: Literal["succeeded", "failed", "stopped", "interrupted"]
    reason: str
    text: str
    keep: bool = False
    """The container stays, whatever the task says: its state is in no checkpoint, or somebody will go on with it."""


def ending(events: Sequence[Event], path: Sequence[Event], limits: Limits, now: datetime) -> Ending | None:
    """Why no further request is sent; ``None``: the run goes on.

    A passed submission ends the run when it lies on the live ``path``; every limit is counted over all ``events``.
    ``now``: aware UTC.
    """
    if any(isinstance(event, SubmissionEvent) and event.failed is None for event in path):
        return Ending("succeeded", "checklist", "every criterion of the checklist is satisfied")
    used = totals(events)
    if limits.stuck_submissions is not None and used.stuck_count >= limits.stuck_submissions:
        return Ending("stopped", "stuck", f"{used.stuck_count} submissions in a row failed at the same criterion")
    if limits.steps is not None and used.steps >= limits.steps:
        return Ending("stopped", "limit_steps", f"{used.steps} steps were made")
    if limits.cost_usd is not None and used.cost_usd >= limits.cost_usd:
        return Ending("stopped", "limit_cost", f"${used.cost_usd:.4f} were spent")
    since = (now - datetime.fromisoformat(events[-1].at)).total_seconds() if events else 0.0
    if limits.wall_time_s is not None and used.duration_s + since >= limits.wall_time_s:
        return Ending("stopped", "limit_time", f"{used.duration_s + since:.0f} s have passed")
    return None
