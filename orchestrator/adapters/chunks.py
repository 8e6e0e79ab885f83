"""A stream of a library's objects: recorded while its caller reads it, or read from the log with the same chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.adapters.answer_body import answer_of
from orchestrator.errors import Divergence
from orchestrator.recording.execution import Execution
from orchestrator.recording.harness_call import Answer, Call
from orchestrator.recording.leaving import RecorderFailed
from orchestrator.recording.typed_json import Encoded, decode, encode

Write = Callable[[Any], tuple[Encoded, Any]]
"""A chunk as JSON, and as what the answer is made of."""


@dataclass(frozen=True)
class Read:
    """What came of a stream."""

    record: dict[str, Any]
    """For the log."""
    parts: list[Any]
    """What ``Write`` made of the chunks."""
    exhausted: bool
    """It was read to its end."""
    broken: bool
    """It ended with an error."""
    readable_only: bool


class Chunks:
    """Passes a live stream's chunks on. Its call ends with the stream, or where its caller stops."""

    def __init__(
        self, execution: Execution, call: Call, write: Write, answer: Callable[[Read], Answer] | None = None
    ) -> None:
        self._execution = execution
        self._call = call
        self._write = write
        self._answer = answer or _answer
        self._written: list[Any] = []
        self._parts: list[Any] = []
        self._whole = True
        call.left = self.left

    def next(self, inner: Any) -> Any:
        """The next chunk of ``inner``. Raises: as it does."""
        try:
            with self._call.inside():
                chunk = next(inner)
        except StopIteration:
            self._end(exhausted=True)
            raise
        except Exception as error:
            self._end(error)
            raise
        self.add(chunk)
        return chunk

    async def next_async(self, inner: Any) -> Any:
        """As ``next``."""
        try:
            with self._call.inside():
                chunk = await anext(inner)
        except StopAsyncIteration:
            self._end(exhausted=True)
            raise
        except Exception as error:
            self._end(error)
            raise
        self.add(chunk)
        return chunk

    def add(self, chunk: Any) -> None:
        """The caller gets this one."""
        self._execution.passed_on(self._call)
        written, part = self._write(chunk)
        self._whole = self._whole and written.whole
        self._written.append(written.json)
        self._parts.append(part)

    def left(self) -> None:
        """The caller reads no further: what came so far is what it was. Repeatable."""
        self._end()

    def _end(self, error: Exception | None = None, *, exhausted: bool = False) -> None:
        record = {"chunks": self._written, "error": None if error is None else encode(error).json}
        read = Read(record, self._parts, exhausted, error is not None, not self._whole)
        self._execution.end_model(self._call, self._answer(read))


class RecordedChunks:
    """A stream from the log."""

    def __init__(
        self,
        execution: Execution,
        recorded: dict[str, Any],
        *,
        incomplete: bool,
        read: Callable[[Any], Any] = decode,
    ) -> None:
        self._execution = execution
        self._left = list(recorded["chunks"])
        self._error = recorded["error"]
        self._incomplete = incomplete
        self._make = read

    def next(self, _inner: Any = None) -> Any:
        """The next chunk. Raises: StopIteration, or what ended the stream then."""
        if self._left:
            return self._make(self._left.pop(0))
        if self._error is not None:
            raise decode(self._error)
        if self._incomplete:
            text = "the harness reads a stream further than it did: its log holds no more of it"
            self._execution.leave(RecorderFailed(Divergence(text)))
        raise StopIteration

    async def next_async(self, _inner: Any = None) -> Any:
        """As ``next``."""
        try:
            return self.next()
        except StopIteration:
            raise StopAsyncIteration from None

    def left(self) -> None:
        """Nothing is under way."""


def _answer(read: Read) -> Answer:
    """Of the chunks of OpenAI's protocols, which say themselves whether they are complete."""
    return answer_of(read.record, read.parts, broken=read.broken, readable_only=read.readable_only)
