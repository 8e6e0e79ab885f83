"""Which snapshots of a run are kept when garbage is collected: pure functions over its events."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.events import CheckpointEvent, Event
from orchestrator.lineage import checkpoint_events
from orchestrator.live_path import OFFERED_KINDS, head, unfinished_intent, way_back
from orchestrator.snapshot_spec import Retention


def named(events: Sequence[Event]) -> set[str]:
    """Every snapshot that the run's log names."""
    return {name for event in events for name in (event.before, event.after) if name is not None}


def retained(events: Sequence[Event], retention: Retention | None) -> set[str]:
    """The snapshots that stay; without a retention those that are named."""
    if retention is None:
        return named(events)
    found = checkpoint_events(events)
    newest = {event.seq for event in found[len(found) - retention.last :]} if retention.last else set()
    at = head(events)
    live = {event.seq for event in way_back(events, at.seq)} if at is not None else set()
    return _needed(events) | {
        event.after
        for event in found
        if event.after is not None
        and (
            event.seq in newest or (retention.notes and _is_noted(event)) or (retention.live_path and event.seq in live)
        )
    }


def _needed(events: Sequence[Event]) -> set[str]:
    """What a resume puts into the container, what is compared with the next snapshot, and an unfinished restore's."""
    needed: set[str] = set()
    at = head(events)
    for event in way_back(events, at.seq) if at is not None else ():
        needed.update(name for name in (event.before, event.after) if name is not None)
        if isinstance(event, CheckpointEvent) and event.after is not None:
            break
    intent = unfinished_intent(events)
    if intent is not None:
        needed.update(name for name in (intent.before, intent.after) if name is not None)
    return needed


def _is_noted(event: CheckpointEvent) -> bool:
    """Somebody wanted to be able to come back to it; the note of a ``before_rewind`` is the product's own."""
    return event.checkpoint_kind in OFFERED_KINDS and event.note is not None
