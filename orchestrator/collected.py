"""Which snapshots of a run ``gc`` has removed: their breakpoints stand in the log and cannot be restored any more."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.events import CollectEvent, Event


def collected(events: Iterable[Event]) -> dict[str, str]:
    """When each of them was (ISO 8601, UTC), by snapshot id."""
    return {
        snapshot_id: event.at for event in events if isinstance(event, CollectEvent) for snapshot_id in event.snapshots
    }
