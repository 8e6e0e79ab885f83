"""One call of a harness while it is made: what is asked, where it stands, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from orchestrator.events import Message, Usage
from orchestrator.recorded_call import Input, RecordedCall
from orchestrator.recording.own_states import Kept
from orchestrator.recording.replay import Kind, Past
from orchestrator.recording.told import Insert

_AROUND: ContextVar[tuple[int, ...]] = ContextVar("around", default=())
_IN_MODEL_CALL: ContextVar[bool] = ContextVar("in_model_call", default=False)


def around() -> tuple[int, ...]:
    """Numbers of the tool calls inside which this code runs, the outermost first."""
    return _AROUND.get()


def in_model_call() -> bool:
    """This code runs inside a model call that is recorded: what it calls is a part of that one."""
    return _IN_MODEL_CALL.get()


@dataclass(frozen=True)
class Asked:
    """What a harness wants of a model or a tool."""

    kind: Kind
    api: str
    input: Input
    name: str
    """Of the tool, or of the model."""
    call_id: str | None = None
    """The id under which the model asked for the tool, where the framework tells it."""


@dataclass(frozen=True)
class Answer:
    """How a model call ended."""

    response: dict[str, Any]
    """JSON of which the adapter makes the answer, or the error, again."""
    message: Message | None = None
    """The assistant's, in OpenAI's form; ``None``: there is none."""
    finish_reason: str | None = None
    usage: Usage | None = None
    cost_usd: float | None = None
    attempts: int = 1
    incomplete: bool = False
    readable_only: bool = False


@dataclass(frozen=True)
class ToolAnswer:
    """How a tool call ended."""

    outcome: dict[str, Any]
    """``{"returned": …}`` or ``{"raised": …}``, in ``typed_json``."""
    text: str
    """The result for a reader."""
    error: str | None = None
    exit_code: int | None = None
    readable_only: bool = False


@dataclass
class Call:
    """A call that has begun."""

    asked: Asked
    recorded: RecordedCall
    """Without an outcome, as long as it is new."""
    past: Past | None = None
    """The recorded call with which it is answered; ``None``: it is made."""
    inserts: list[Insert] = field(default_factory=list)
    """What the adapter puts into the request."""
    kept: Kept | None = None
    """The harness's own state from which it is made, where there is one."""
    attempt: int = 1
    """Which try of the tool it is; those before were cut off, and undone."""
    requests: int = 1
    """Requests that the SDK has sent for it, its own retries included."""
    shared: bool = False
    """Another call was in flight at some time of it."""
    ended: bool = False
    left: Callable[[], None] | None = None
    """Of a stream: ends it as far as its caller has read."""
    pieces: int = 0
    """Of a stream: how many its caller has got."""
    began_s: float = field(default_factory=time.monotonic)

    @property
    def number(self) -> int:
        """See ``RecordedCall``."""
        return self.recorded.number

    @property
    def scope(self) -> int | None:
        """See ``RecordedCall``."""
        return self.recorded.scope

    @property
    def duration_ms(self) -> float:
        """Since it began."""
        return (time.monotonic() - self.began_s) * 1000

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Code that runs in the block belongs to this call."""
        if self.asked.kind == "model":
            quiet = _IN_MODEL_CALL.set(True)
            try:
                yield
            finally:
                _IN_MODEL_CALL.reset(quiet)
            return
        token = _AROUND.set((*_AROUND.get(), self.number))
        try:
            yield
        finally:
            _AROUND.reset(token)
