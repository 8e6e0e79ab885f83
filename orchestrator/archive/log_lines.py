"""The context log on its way out of a data directory and into another one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime

from orchestrator.errors import ArchiveRefused
from orchestrator.events import CheckpointEvent, CollectEvent, Event
from orchestrator.lineage import find_checkpoint
from orchestrator.live_path import live_path
from orchestrator.log_line import BadLine, decode, is_checked
from snapshot_drivers.base import Snapshot
from snapshot_drivers.overlay.portable import covering_no_processes

MOST_LINE_BYTES = 64 << 20
_NOT_PACKED = "its snapshot is not in the archive that this run came from"

Renamed = Callable[[str], str]
"""The new name of a snapshot."""


def up_to(events: Sequence[Event], breakpoint_id: int) -> list[Event]:
    """The log as it was when that checkpoint was committed: an append-only log is whole at each of its lines.

    Abandoned stretches stay in, since cost, steps and time are functions of the whole log.

    Raises: UsageError: no such breakpoint. LogDamaged: it cannot be read.
    """
    last = find_checkpoint(events, breakpoint_id)
    before = itertools.takewhile(lambda event: event is not last, events)
    return [*before, last]


def snapshots_on_path(events: Sequence[Event]) -> set[str]:
    """The snapshots of all checkpoints on the way to the last event.

    Raises: LogDamaged: that way cannot be read.
    """
    path = live_path(events, events[-1].seq)
    return {event.after for event in path if isinstance(event, CheckpointEvent) and event.after is not None}


def snapshots_of(events: Sequence[Event]) -> set[str]:
    """All snapshots that the events name."""
    return {name for event in events for name in (event.before, event.after) if name is not None}


def leaving(event: Event, packed: Mapping[str, Snapshot]) -> Event:
    """The event as it stands in the archive: what it says of snapshots is true of those that are packed.

    One that is not packed has no name any more, as where none could be taken, and its breakpoint says why.
    """
    changes: dict[str, object] = {
        "before": event.before if event.before in packed else None,
        "after": event.after if event.after in packed else None,
    }
    if isinstance(event, CheckpointEvent) and event.after is not None:
        if event.after in packed:
            changes["coverage"] = packed[event.after].coverage
        else:
            changes["error"] = _NOT_PACKED
    if isinstance(event, CollectEvent):
        changes["snapshots"] = [name for name in event.snapshots if name in packed]
    return event.model_copy(update=changes)


def arriving(line: bytes, number: int, run_id: str, renamed: Renamed, *, processes: bool) -> Event:
    """The event of an archive's line, with the names that its snapshots have here. ``processes``: they are kept.

    Raises: ArchiveRefused: the line is no event of that run, or carries no checksum.
    """
    try:
        event = decode(line, run_id)
    except BadLine as error:
        raise ArchiveRefused(f"events.jsonl: line {number}: {error}") from error
    if not is_checked(line):
        raise ArchiveRefused(f"events.jsonl: line {number}: carries no checksum")
    if not _is_moment(event.at):
        raise ArchiveRefused(f"events.jsonl: line {number}: {event.at[:40]!r} is no moment")
    if json.loads(line)["kind"] != event.kind:
        raise ArchiveRefused(f"events.jsonl: line {number}: {getattr(event, 'text', 'of an unknown kind')}")
    changes: dict[str, object] = {
        "before": renamed(event.before) if event.before is not None else None,
        "after": renamed(event.after) if event.after is not None else None,
    }
    if isinstance(event, CheckpointEvent) and not processes:
        changes["coverage"] = covering_no_processes(event.coverage)
    if isinstance(event, CollectEvent):
        changes["snapshots"] = [renamed(name) for name in event.snapshots]
    return event.model_copy(update=changes)


def _is_moment(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def lines_of(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The lines of a file that comes in pieces, without their ends.

    Raises: ArchiveRefused: a line that does not end, or that is too long.
    """
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        if len(rest) > MOST_LINE_BYTES:
            raise ArchiveRefused(f"events.jsonl: a line of more than {MOST_LINE_BYTES} bytes")
        yield from whole
    if rest:
        raise ArchiveRefused("events.jsonl: its last line does not end")
