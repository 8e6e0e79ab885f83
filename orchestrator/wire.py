"""What went over the wire: each HTTP exchange with a provider, read to its end and kept before LiteLLM looks at it.

LiteLLM repairs: it invents ids and finish reasons, drops refusals and usage, sends a refused request again in another
form, follows redirects. So its HTTP client reports here, and an answer is what the provider's bytes say.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import httpx

from orchestrator.sse import DONE, EventReader, parsed
from orchestrator.stream import assembled, is_complete

CONNECT_TIMEOUT_S = 30.0
ANSWER_MAX_BYTES = 64 * 2**20
"""Of one answer as it comes; a longer one is broken off."""

KEY_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
_KEY_MIN_CHARS = 12
"""Shorter values are no secrets but placeholders (``EMPTY``), and replacing them would tear up ordinary text."""
REDACTED = "<secret>"

_CURRENT: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


class SecondRequest(Exception):
    """LiteLLM wanted to send another request than the one that was counted."""


class AnswerTooLong(Exception):
    """The body is longer than ``ANSWER_MAX_BYTES``."""


class OutOfTime(Exception):
    """The time for the whole request is over."""


@dataclass
class Exchange:
    """One request to a provider and what came back. Stays empty for a provider whose client does not report here."""

    timeout_s: float
    """For the whole of it."""
    stall_timeout_s: float
    """For a silence within a stream."""
    sent: bool = False
    status: int | None = None
    """``None``: no answer began."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of the answer; names in lower case."""
    body: bytes = b""
    """As far as it came, decoded, without the key."""
    error: Exception | None = None
    """Why reading the body ended before its end."""
    _deadline: float = 0.0
    _keys: list[str] = field(default_factory=list)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Requests that this thread sends meanwhile report here."""
        token = _CURRENT.set(self)
        self._deadline = time.monotonic() + self.timeout_s
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def redacted(self, text: str) -> str:
        """``text`` without the key that the request carried."""
        for key in self._keys:
            text = text.replace(key, REDACTED)
        return text

    def _events(self) -> list[Any] | None:
        """The body as a stream's events (JSON values; text where it is none); ``None``: it is no stream."""
        if not _may_be_stream(self.body):
            return None
        reader = EventReader()
        values = []
        for data in [*reader.feed(self.body), *reader.end()]:
            try:
                values.append(parsed(data))
            except ValueError:
                values.append(data)
        return values if values or "event-stream" in self.headers.get("content-type", "") else None

    @functools.cached_property
    def raw(self) -> Any:
        """The body as it is kept in the log: a list of events, a JSON value, or text. Ask when it has been read."""
        events = self._events()
        if events is not None:
            return events
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return self.body.decode("utf-8", "replace")

    def answer_body(self) -> Any:
        """The body of a plain answer, or what a complete stream makes; ``None``: there is no whole one."""
        raw = self.raw
        if isinstance(raw, list):
            return assembled(raw) if is_complete(raw) else None
        return raw if self.error is None and isinstance(raw, dict) else None

    def prepare(self, request: httpx.Request) -> None:
        """The request is about to be sent: with our time limits, and only the first of its try."""
        if self.sent:
            raise SecondRequest("LiteLLM wanted to send a changed request after a refusal")
        self.sent = True
        request.headers["accept-encoding"] = "identity"
        values = [request.headers.get(name, "").removeprefix("Bearer ") for name in KEY_HEADERS]
        self._keys = sorted((value for value in values if len(value) >= _KEY_MIN_CHARS), key=len, reverse=True)
        left_s = max(0.001, self._deadline - time.monotonic())
        connect_s = min(CONNECT_TIMEOUT_S, left_s)
        request.extensions = {
            **request.extensions,
            "timeout": {"connect": connect_s, "read": left_s, "write": left_s, "pool": connect_s},
        }

    def read(self, response: httpx.Response) -> None:
        """The answer has begun: its body is read to its end, which for a stream is its last event."""
        self.status = response.status_code
        self.headers = {name.lower(): self.redacted(value) for name, value in response.headers.items()}
        left_s = max(0.001, self._deadline - time.monotonic())
        is_stream = "event-stream" in self.headers.get("content-type", "")
        # httpcore looks at this same dict when it begins to read the body.
        response.request.extensions["timeout"]["read"] = min(left_s, self.stall_timeout_s) if is_stream else left_s
        assert isinstance(response.stream, httpx.SyncByteStream)
        watched = _Watched(response.stream, self._deadline)
        response.stream = watched
        try:
            body = response.read()
        except Exception as error:
            self.error = error
            body = bytes(watched.kept)
            raise
        finally:
            self.body = self._without_key(body)

    def _without_key(self, body: bytes) -> bytes:
        for key in self._keys:
            body = body.replace(key.encode("latin-1"), REDACTED.encode())
        return body


def report(client: httpx.Client) -> None:
    """Requests of ``client`` report to the exchange of the thread that sends them, if there is one."""

    def before(request: httpx.Request) -> None:
        if (exchange := _CURRENT.get()) is not None:
            exchange.prepare(request)

    def after(response: httpx.Response) -> None:
        if (exchange := _CURRENT.get()) is not None:
            exchange.read(response)

    client.event_hooks = {"request": [before], "response": [after]}


class _Watched(httpx.SyncByteStream):
    """A body that ends with its stream's last event, and not later than it may."""

    def __init__(self, stream: httpx.SyncByteStream, deadline: float) -> None:
        self.kept = bytearray()
        self._stream = stream
        self._deadline = deadline

    def __iter__(self) -> Iterator[bytes]:
        reader = EventReader()
        for piece in self._stream:
            self.kept += piece
            yield piece
            if len(self.kept) > ANSWER_MAX_BYTES:
                raise AnswerTooLong
            if _may_be_stream(self.kept) and any(_ends_stream(data) for data in reader.feed(piece)):
                return
            if time.monotonic() > self._deadline:
                raise OutOfTime

    def close(self) -> None:
        self._stream.close()


def _may_be_stream(body: bytes | bytearray) -> bool:
    """A body that is neither JSON nor markup; some servers send streams under another content type."""
    return bytes(body[:64]).lstrip()[:1] not in (b"{", b"[", b"<", b"")


def _ends_stream(data: str) -> bool:
    """Whether this event is the last one: some servers leave the connection open after it."""
    return data.startswith(DONE) or (data.startswith("{") and '"message_stop"' in data[:200])
