"""How a run writes its log: secrets redacted, the observer told, and the place of the next event known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, TypeVar, cast

from orchestrator.context_log import ContextLog
from orchestrator.errors import LogDamaged
from orchestrator.events import EVENT, Event, Message, NoteEvent
from orchestrator.live_path import messages, path_to
from orchestrator.observer import Observer
from orchestrator.standing import Standing
from orchestrator.task import redact
from orchestrator.totals import Totals
from snapshot_drivers.crash_points import reached

E = TypeVar("E", bound=Event)


class Place(TypedDict):
    """Where the next event belongs."""

    step: int
    parent_seq: int


class Journal:
    """The context log of a run that is being driven. One thread appends at a time."""

    def __init__(self, log: ContextLog, observer: Observer, secrets: Mapping[str, str]) -> None:
        self.log = log
        self._observer = observer
        self._secrets = secrets
        self._standing = Standing(log.events)

    @property
    def events(self) -> Sequence[Event]:
        """All events so far."""
        return self.log.events

    @property
    def head(self) -> Event:
        """The event from which the run goes on.

        Raises: LogDamaged: the run's first line cannot be read.
        """
        found = self._standing.head
        if found is None:
            raise LogDamaged(f"{self.log.path}: the first line cannot be read, so the run cannot go on: restore a copy")
        return found

    def path(self) -> list[Event]:
        """The live path, oldest first."""
        return path_to(self._standing.by_seq, self.head.seq)

    def way_back(self) -> Iterator[Event]:
        """The head and the events that it continues, newest first, as far as they can be read."""
        return self._standing.way_back(self.head.seq)

    def totals(self) -> Totals:
        """What the run has used so far."""
        return self._standing.totals()

    def requests_lost_now(self) -> int:
        """How many requests for the answer that is awaited now were lost with the processes that sent them."""
        return self._standing.requests_lost_now()

    def conversation(self) -> list[Message]:
        """The messages of the live path."""
        return messages(self.path())

    def place(self) -> Place:
        """Right after the head, in the present step."""
        return Place(step=self.totals().steps, parent_seq=self.head.seq)

    def next_breakpoint_id(self) -> int:
        """The number of the next checkpoint: one that no line had, readable or not."""
        number, seq = self._standing.newest_checkpoint
        return number + 1 + self.log.lost_lines_after(seq)

    def now(self) -> datetime:
        """The time by the clock of the log, which nobody sets; aware UTC."""
        return self.log.now()

    def add(self, event: E) -> E:
        """``event`` stands in the log without the values of secrets, and the observer knows of it.

        Raises: HostError: it could not be written.
        """
        if self._secrets:
            event = cast(E, EVENT.validate_python(self.redacted_value(event.model_dump(mode="python"))))
        written = cast(E, self.log.append(event))
        reached("after-log-line")
        self._observer.event(written)
        return written

    def mark(self, event: E) -> E:
        """``event`` stands in the log, unsynced, for a resume to read; the observer is not told of it.

        Raises: HostError: it could not be written.
        """
        if self._secrets:
            event = cast(E, EVENT.validate_python(self.redacted_value(event.model_dump(mode="python"))))
        return cast(E, self.log.append(event, sync=False))

    def note(self, text: str, *, say: Sequence[Message] = (), after: Event | None = None) -> NoteEvent:
        """A note; ``say`` is appended to the conversation, ``after`` is the event that it continues (the head)."""
        place = self.place()
        if after is not None:
            place["parent_seq"] = after.seq
        return self.add(NoteEvent(**place, text=text, messages=list(say)))

    def redacted(self, text: str) -> str:
        """``text`` without the values of secrets."""
        return redact(text, self._secrets)

    def redacted_value(self, value: Any) -> Any:
        """A JSON value without the values of secrets; keys are left as they are."""
        if isinstance(value, str):
            return redact(value, self._secrets)
        if isinstance(value, dict):
            return {key: self.redacted_value(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.redacted_value(inner) for inner in value]
        return value
