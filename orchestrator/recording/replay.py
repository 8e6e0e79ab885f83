"""The calls that a harness made on its way to the head, to be answered from the log when it runs again.

Which recorded call a repeated one is: within its scope (the harness, or the tool call inside which it is made) each
thread or task that made calls is a lane, and calls of a lane come in their order. A call that begins is one of the
lanes' next ones: the first with the same input; with none, the first of its kind, if what differs may be overlooked.
With a single lane, as most harnesses have it, this is the order alone. Every recorded call is used once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from orchestrator.errors import LogDamaged
from orchestrator.events import Event, Message, ModelCallEvent, NoteEvent, RewindEvent, ToolCallEvent, ToolStartEvent
from orchestrator.live_path import live_path
from orchestrator.recorded_call import Input, RecordedCall, restored
from orchestrator.recording.divergence import differences, tolerable
from orchestrator.resume_point import RESTARTED

Kind = Literal["model", "tool"]

ASKS = "the harness asks the model"
"""Text of the note whose messages are what is new in a request."""


@dataclass
class Past:
    """One recorded call on the way to the head."""

    kind: Kind
    call: RecordedCall
    event: Event
    input: Input
    open: bool = False
    """A tool call that had not ended at the head: it runs again, and the calls inside it are answered."""
    told: list[Message] = field(default_factory=list)
    """What was put into the conversation ahead of this model call: memories of rewinds."""
    taken_back: Callable[[Any], Any] = lambda raw: raw

    def answer(self) -> dict[str, Any]:
        """What the adapter answers with. Raises: LogDamaged: it was put aside, and is gone."""
        raw = self.event.response if isinstance(self.event, ModelCallEvent) else self.call.outcome
        found: dict[str, Any] = self.taken_back(raw)
        return found


class Diverged(Exception):
    """A repeated call is not the recorded one. The message names the first difference."""

    def __init__(self, text: str, past: Past | None) -> None:
        super().__init__(text)
        self.past = past


class Wait(Exception):
    """It may be one that other threads or tasks have to make room for; the message says what it is otherwise."""

    def __init__(self, otherwise: Diverged) -> None:
        super().__init__(str(otherwise))
        self.otherwise = otherwise


@dataclass(frozen=True)
class Found:
    """The recorded call that a repeated one is; ``warning``: what was overlooked."""

    past: Past
    warning: str | None = None


class Replay:
    """What is left to be answered. Not safe for threads: the execution holds its lock."""

    def __init__(
        self,
        events: Sequence[Event],
        head_seq: int,
        *,
        ignore: Sequence[str] = (),
        taken_back: Callable[[Any], Any] = lambda raw: raw,
    ) -> None:
        """Of the path to the event ``head_seq``. ``taken_back`` reads what was put aside.

        Raises: LogDamaged: the path, or what was put aside, cannot be read.
        """
        self._ignore = ignore
        self.inputs: dict[int, Input] = {}
        """The whole inputs of all calls of the path, by number: what later calls are written relative to."""
        self._left: list[Past] = []
        self.told_next: list[Message] = []
        """What is put into the conversation ahead of the first model call that is not answered from the log."""
        self.announced: list[Message] = []
        """What the path's last lines say of a request whose answer is not on it."""
        self._collect(events, live_path(events, head_seq), taken_back)
        self._lanes = len({(past.call.scope, past.call.lane) for past in self._left})

    @property
    def over(self) -> bool:
        """Every recorded call has been answered: the next one is new."""
        return not self._left

    def drop(self) -> None:
        """No further call is answered from the log."""
        self._left.clear()

    def skip(self) -> list[Past]:
        """The calls that were left, in the order in which they were made: they count as answered."""
        left, self._left = self._left, []
        return left

    def next_left(self) -> str | None:
        """The next recorded call that has not been made again, in words; ``None``: all have."""
        past = min(self._left, key=lambda one: one.call.number, default=None)
        return None if past is None else f"call {past.call.number} ({past.call.api}, {_name(past.input)})"

    def find(self, kind: Kind, api: str, scope: int | None, digest: str, now: Input) -> Found:
        """The recorded call that this one is; it is used up.

        Raises: Diverged: it is none of them. Wait: it may be a new one, when the others have been made.
        """
        ready = self._ready(scope)
        for past in ready:
            if (past.kind, past.call.api, past.call.input.digest) == (kind, api, digest):
                return Found(self._used(past))
        alike = [past for past in ready if (past.kind, past.call.api) == (kind, api)]
        for past in alike:
            found = list(differences(past.input, now))
            if tolerable(found, past.input, self._ignore):
                return Found(self._used(past), f"call {past.call.number}: {found[0]}" if found else None)
        self._refuse(alike, api, now)

    def _refuse(self, alike: list[Past], api: str, now: Input) -> NoReturn:
        if alike:
            first = next(differences(alike[0].input, now))
            error = Diverged(f"call {alike[0].call.number} ({api}, {_name(now)}) differs at {first}", alike[0])
        else:
            past = min(self._left, key=lambda one: one.call.number)
            was = f"{past.call.api} ({_name(past.input)})"
            error = Diverged(f"call {past.call.number} was {was}, now {api} ({_name(now)}) is called", past)
        if self._lanes > 1:
            raise Wait(error)
        raise error

    def _ready(self, scope: int | None) -> list[Past]:
        """The next call of each lane of that scope, in the order in which they were made."""
        first: dict[int, Past] = {}
        for past in self._left:
            if past.call.scope == scope:
                first.setdefault(past.call.lane, past)
        return sorted(first.values(), key=lambda past: past.call.number)

    def _used(self, past: Past) -> Past:
        self._left.remove(past)
        return past

    def _collect(self, events: Sequence[Event], path: Sequence[Event], taken_back: Callable[[Any], Any]) -> None:
        found: list[Past] = []
        told: list[Message] = []
        for event in path:
            if isinstance(event, RewindEvent) or (isinstance(event, NoteEvent) and event.text == RESTARTED):
                told += event.messages
            elif isinstance(event, NoteEvent) and event.text == ASKS:
                self.announced += event.messages
            elif isinstance(event, ModelCallEvent):
                self.announced = []
            call = getattr(event, "call", None)
            if isinstance(event, ModelCallEvent | ToolCallEvent) and isinstance(call, RecordedCall):
                kind: Kind = "model" if isinstance(event, ModelCallEvent) else "tool"
                past = Past(kind, call, event, self._whole(call, taken_back), taken_back=taken_back)
                found.append(past)
                if kind == "model" and told:
                    past.told, told = told, []
        self.told_next = told
        ended = {past.call.number for past in found}
        started = {
            event.call.number: event for event in events if isinstance(event, ToolStartEvent) and event.call is not None
        }
        for scope in sorted({past.call.scope for past in found} - ended - {None}, key=int):  # type: ignore[arg-type]
            start = started.get(scope or 0)
            if start is None or start.call is None:
                raise LogDamaged(f"the tool call {scope}, inside which others were made, cannot be read")
            found.append(Past("tool", start.call, start, self._whole(start.call, taken_back), open=True))
        # Calls inside one that is answered as a whole are not made again.
        self._left = [past for past in found if past.call.scope not in ended]
        self._left.sort(key=lambda past: past.call.number)

    def _whole(self, call: RecordedCall, taken_back: Callable[[Any], Any]) -> Input:
        recorded = call.input
        earlier = self.inputs.get(recorded.base, {}) if recorded.base is not None else {}
        if recorded.base is not None and recorded.base not in self.inputs:
            raise LogDamaged(f"call {call.number} shares its input with call {recorded.base}, which cannot be read")
        whole = restored(recorded, taken_back(recorded.rest), earlier)
        self.inputs[call.number] = whole
        return whole


def _name(given: Input) -> str:
    return str(given.get("name") or given.get("model"))
