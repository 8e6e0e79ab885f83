"""Head, live path and conversation: where a run stands and how it came there.

Pure functions over a run's events. The *head* is the event from which the run goes on; the *live path* is its chain of
parents back to ``run``. A rewind starts a new branch, so what was abandoned lies on no live path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from orchestrator.errors import LogDamaged
from orchestrator.events import (
    CheckpointEvent,
    EngineErrorEvent,
    Event,
    Message,
    ModelCallEvent,
    NoteEvent,
    RestoreEvent,
    RewindEvent,
    RewindIntentEvent,
    RunEvent,
    SubmissionEvent,
    ToolCallEvent,
)

OFFERED_KINDS = ("model", "manual")
"""Kinds of checkpoint that lie on the run's way; ``before_rewind`` is for the operator only."""


def head(events: Sequence[Event]) -> Event | None:
    """The event from which the run goes on; ``None`` for an empty log.

    Notes (unless they carry messages), intents, engine errors, ends and ``before_rewind`` checkpoints do not move it.
    An event whose parent is lost moves it too: the run did go on there, and ``live_path`` then says that the way is
    broken, where going on from before the hole would pair an old context with a newer container.
    """
    search = HeadSearch()
    for event in events:
        search.add(event)
    return search.at


class HeadSearch:
    """The head of a log, event by event."""

    def __init__(self) -> None:
        self.at: Event | None = None
        """The head, after the events so far."""
        self.by_seq: dict[int, Event] = {}
        """These events, by their numbers."""

    def add(self, event: Event) -> None:
        """The next event of the log."""
        at = self.at
        if isinstance(event, RunEvent):
            self.at = at or event
        elif isinstance(event, RewindEvent | RestoreEvent) or (
            _continues(event) and (at is None or event.parent_seq == at.seq or event.parent_seq not in self.by_seq)
        ):
            self.at = event
        self.by_seq[event.seq] = event


def _continues(event: Event) -> bool:
    """An event of this kind moves the head, when the head is its parent."""
    if isinstance(event, CheckpointEvent):
        return event.checkpoint_kind in OFFERED_KINDS
    if isinstance(event, NoteEvent):
        return bool(event.messages)
    return isinstance(event, ModelCallEvent | ToolCallEvent | SubmissionEvent)


def live_path(events: Sequence[Event], head_seq: int) -> list[Event]:
    """The events from ``run`` to the one numbered ``head_seq``, oldest first.

    Raises: LogDamaged: an event on the way is not in the log.
    """
    return path_to({event.seq: event for event in events}, head_seq)


def path_to(by_seq: Mapping[int, Event], head_seq: int) -> list[Event]:
    """As ``live_path``, of events by their numbers."""
    path: list[Event] = []
    seq: int | None = head_seq
    child = "the head"
    while seq is not None:
        event = by_seq.get(seq)
        if event is None or (path and seq >= path[-1].seq):
            raise LogDamaged(
                f"{child} continues event {seq}, which cannot be read: restore a breakpoint from before it "
                "(the damaged line is named above)"
            )
        path.append(event)
        child, seq = f"event {seq}", event.parent_seq
    path.reverse()
    if not isinstance(path[0], RunEvent):
        raise LogDamaged(f"event {path[0].seq} has no parent: the beginning of the run cannot be read")
    return path


def way_back(events: Sequence[Event], seq: int) -> Iterator[Event]:
    """The event numbered ``seq`` and those that it continues, newest first, as far as they can be read."""
    return back_from({event.seq: event for event in events}, seq)


def back_from(by_seq: Mapping[int, Event], seq: int) -> Iterator[Event]:
    """As ``way_back``, of events by their numbers."""
    at = by_seq.get(seq)
    while at is not None:
        yield at
        at = by_seq.get(at.parent_seq) if at.parent_seq is not None and at.parent_seq < at.seq else None


def broken_ways(events: Sequence[Event]) -> dict[int, Event]:
    """The events whose way back to the beginning cannot be read, by number: with the last readable event of that way.

    What that one continues is what cannot be read.
    """
    known: set[int] = set()
    broken: dict[int, Event] = {}
    for event in sorted(events, key=lambda event: event.seq):
        parent = event.parent_seq
        if parent is not None and parent not in known:
            broken[event.seq] = event
        elif parent in broken:
            broken[event.seq] = broken[parent]
        known.add(event.seq)
    return broken


def messages(path: Sequence[Event]) -> list[Message]:
    """The conversation along ``path``."""
    return [message for event in path for message in event.messages]


def memories_to_inject(events: Sequence[Event], target_path: Sequence[Event]) -> list[RewindEvent]:
    """The rewinds whose memories do not stand in the context at the end of ``target_path`` yet, oldest first.

    Memories of abandoned paths too. Each rewind injects all memories of the run that its context lacked, so a context
    knows those of every rewind up to the last one on its own path, and none later.
    """
    known_until = max((event.seq for event in target_path if isinstance(event, RewindEvent)), default=-1)
    return [event for event in events if isinstance(event, RewindEvent) and event.seq > known_until]


def unfinished_intent(events: Sequence[Event]) -> RewindIntentEvent | None:
    """The rewind or restore that was begun and neither done nor called off; ``None``: there is none.

    Called off: a note or engine error *whose parent is the intent*, or any later event with which the run went on.
    """
    intent: RewindIntentEvent | None = None
    for event in events:
        if isinstance(event, RewindIntentEvent):
            intent = event
        elif intent is not None and _settles(event, intent):
            intent = None
    return intent


def _settles(event: Event, intent: RewindIntentEvent) -> bool:
    if isinstance(event, NoteEvent | EngineErrorEvent) and event.parent_seq == intent.seq:
        return True
    return isinstance(event, RewindEvent | RestoreEvent) or _continues(event)
