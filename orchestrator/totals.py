"""What a run has used: sums over the *whole* log, so that a rewind resets none of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.events import (
    CollectEvent,
    EndEvent,
    EngineErrorEvent,
    Event,
    ModelCallEvent,
    ModelFailureEvent,
    ModelStartEvent,
    Progress,
    ResumeEvent,
    SubmissionEvent,
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
    tally = Tally()
    for event in events:
        tally.add(event)
    return tally.totals()


def requests_lost_now(events: Sequence[Event]) -> int:
    """How many requests for the answer that is awaited now were lost with the processes that sent them."""
    tally = Tally()
    for event in events:
        tally.add(event)
    return tally.requests_lost_now


class Tally:
    """The sums of a log, event by event."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._cost_usd = 0.0
        self._usage: dict[str, int] = {}
        self._last_submission: SubmissionEvent | None = None
        self._stuck_count = 0
        self._requests_lost = 0
        self._under_way = False
        """A request has been sent, of whose answer nothing is known yet."""
        self.requests_lost_now = 0
        """How many requests for the answer that is awaited now were lost with the processes that sent them."""
        self._driven_s = 0.0
        self._last: Event | None = None

    def add(self, event: Event) -> None:
        """The next event of the log."""
        self._counts[event.kind] += 1
        self._add_time(event)
        self._add_request(event)
        if isinstance(event, ModelCallEvent):
            self._add_answer(event)
        elif isinstance(event, EngineErrorEvent) and event.cost_usd is not None:
            self._counts["dropped"] += 1
            self._cost_usd += event.cost_usd
        elif isinstance(event, SubmissionEvent):
            again = self._last_submission is not None and event.failed == self._last_submission.failed
            self._stuck_count = 0 if event.failed is None else 1 + (self._stuck_count if again else 0)
            self._last_submission = event

    def totals(self) -> Totals:
        """The sums so far."""
        counts = self._counts
        return Totals(
            steps=counts["model_call"] + counts["dropped"],
            tool_calls=counts["tool_call"],
            cost_usd=self._cost_usd,
            cost_unknown=counts["cost unknown"],
            usage=Usage(**self._usage),
            usage_unknown=counts["usage unknown"],
            submissions=counts["submission"],
            stuck_count=self._stuck_count,
            progress=self._last_submission.progress if self._last_submission is not None else None,
            requests_lost=self._requests_lost,
            checkpoints=counts["checkpoint"],
            rewinds=counts["rewind"],
            duration_s=round(self._driven_s, 3),
        )

    def _add_answer(self, event: ModelCallEvent) -> None:
        usage = event.usage or Usage()
        self._cost_usd += event.cost_usd or 0.0
        self._counts["cost unknown"] += event.cost_usd is None
        self._counts["usage unknown"] += usage.total_tokens is None
        for name in Usage.model_fields:
            value: int | None = getattr(usage, name)
            if value is not None:
                self._usage[name] = self._usage.get(name, 0) + value

    def _add_request(self, event: Event) -> None:
        if isinstance(event, ModelStartEvent):
            self._under_way = True
        elif isinstance(event, ModelCallEvent | ModelFailureEvent):
            self._under_way, self.requests_lost_now = False, 0
        elif isinstance(event, ResumeEvent):
            self._requests_lost += self._under_way
            self.requests_lost_now += self._under_way
            self._under_way = False
        elif (isinstance(event, EngineErrorEvent) and event.cost_usd is not None) or (
            isinstance(event, EndEvent) and event.reason == "model_error"
        ):
            self._under_way = False  # it was answered, for all that came of it

    def _add_time(self, event: Event) -> None:
        """Stretches in which nobody drove the run do not count."""
        before, self._last = self._last, event
        if (
            before is None
            or isinstance(before, EndEvent | CollectEvent)
            or isinstance(event, ResumeEvent | CollectEvent)
        ):
            return
        gap = datetime.fromisoformat(event.at) - datetime.fromisoformat(before.at)
        self._driven_s += max(0.0, gap.total_seconds())
