"""The context log: ``events.jsonl``, append-only, one JSON object a line, synced line by line; the only truth of a run.

Lines are ASCII (everything else is escaped, lone surrogates too) and end in a line feed; a line without one was
never committed. Reading never fails on a damaged line: it is reported with its number, and what does not need it stays
usable.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from orchestrator.errors import HostError, LogDamaged
from orchestrator.events import EVENT, FORMAT_VERSION, Event, NoteEvent

_KNOWN_KINDS = frozenset(
    {
        "run", "model_call", "tool_call", "submission", "checkpoint", "rewind_intent", "rewind", "restore", "note",
        "engine_error", "end",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Damage:
    """A line of the log that could not be used as it stands."""

    line_number: int
    """From 1."""
    reason: str
    torn: bool = False
    """The last line, cut off in the middle of a write: nothing that was committed is lost."""


class ContextLog:
    """One run's log. One writer at a time: whoever opens it as a writer holds the run's lock."""

    def __init__(self, path: Path, run_id: str, *, descriptor: int | None) -> None:
        """Use ``open``."""
        self.path = path
        self.run_id = run_id
        self.events: list[Event] = []
        """All readable events in the order of the file; of kinds that this version does not know: as notes."""
        self.damage: list[Damage] = []
        self._descriptor = descriptor
        self._size = 0
        self._next_seq = 0

    @classmethod
    def open(cls, path: Path, run_id: str, *, writer: bool = False) -> Self:
        """The log of ``run_id`` with all its events read.

        A writer makes the file (0600) when it is missing and cuts off a torn last line; a reader changes nothing.

        Raises: LogDamaged: a reader finds no file. HostError: it cannot be opened.
        """
        flags = os.O_RDWR | os.O_CREAT if writer else os.O_RDONLY
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError as error:
            raise LogDamaged(
                f"{path}: no such file: the run has no context log; remove it with: orchestrator rm"
            ) from error
        except OSError as error:
            raise HostError(f"{path}: the context log cannot be opened: {error.strerror}") from error
        log = cls(path, run_id, descriptor=descriptor)
        try:
            log._read(descriptor)
            if writer:
                log._begin_writing(descriptor)
        except OSError as error:
            log.close()
            raise HostError(f"{path}: the context log cannot be read or written: {error.strerror}") from error
        if not writer:
            log.close()
        return log

    def append(self, event: Event) -> Event:
        """``event`` stands in the log, synced; the answer is the event as every reader will see it.

        ``seq``, ``at``, ``run_id`` and ``v`` are assigned here. Secrets are the caller's to redact.

        Raises: HostError: it could not be written (disk full); the log is as it was before.
        """
        if self._descriptor is None:
            raise HostError(f"{self.path}: the context log is not open for writing")
        line = encode(
            event.model_copy(
                update={"v": FORMAT_VERSION, "seq": self._next_seq, "run_id": self.run_id, "at": _now()},
            )
        )
        try:
            _write_all(self._descriptor, line)
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            raise HostError(f"{self.path}: an event cannot be written: {error.strerror}: make room") from error
        self._size += len(line)
        self._next_seq += 1
        # Read back: two adjacent halves of a surrogate pair are one character to every reader.
        written = EVENT.validate_python(json.loads(line))
        self.events.append(written)
        return written

    def close(self) -> None:
        """The file is closed; the events stay readable. Repeatable."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(os.dup(descriptor), "rb") as stream:
            raw = stream.read()
        whole, _, torn = raw.rpartition(b"\n")
        self._size = len(raw) - len(torn)
        lines = whole.split(b"\n") if self._size else []
        parents: set[int] = set()
        for number, line in enumerate(lines, start=1):
            try:
                event = self._decoded(line, parents)
            except _BadLine as error:
                self.damage.append(Damage(number, str(error)))
                continue
            if event.parent_seq is not None and event.parent_seq not in parents:
                self.damage.append(Damage(number, f"continues event {event.parent_seq}, which is not in the log"))
            parents.add(event.seq)
            self.events.append(event)
        if torn:
            reason = f"torn: {len(torn)} bytes without an end of line (a write was cut off; the event never happened)"
            self.damage.append(Damage(len(lines) + 1, reason, torn=True))
        # A damaged line may have used a number that only it knew; numbers count lines, so it was below them.
        self._next_seq = max(max(parents, default=-1) + 1, len(lines))

    def _decoded(self, line: bytes, known: set[int]) -> Event:
        """The event in ``line``.

        Raises: _BadLine: it holds none that belongs here.
        """
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            raise _BadLine("empty" if not line.strip() else f"not JSON ({len(line)} bytes)") from None
        if not isinstance(data, dict):
            raise _BadLine("not a JSON object")
        try:
            event = EVENT.validate_python(data if data.get("kind") in _KNOWN_KINDS else _as_note(data))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise _BadLine(f"not an event: {where}: {first['msg']}") from None
        if event.v > FORMAT_VERSION:
            raise _BadLine(f"format version {event.v}: written by a newer orchestrator, which reads it")
        if event.run_id != self.run_id:
            raise _BadLine(f"belongs to run {event.run_id!r}, not to {self.run_id!r}")
        if event.seq < 0 or event.seq in known:
            raise _BadLine(f"event number {event.seq} is used twice or negative")
        parent = event.parent_seq
        if (parent is None) != (event.kind == "run") or (parent is not None and parent >= event.seq):
            raise _BadLine(f"event {event.seq} cannot continue event {event.parent_seq}")
        return event

    def _begin_writing(self, descriptor: int) -> None:
        os.ftruncate(descriptor, self._size)
        os.fsync(descriptor)
        os.lseek(descriptor, self._size, os.SEEK_SET)
        sync_directory(self.path.parent)


class _BadLine(Exception):
    """Why a line is no event of this run."""


def encode(event: Event) -> bytes:
    """The event's line. From Python values, since pydantic's own JSON refuses lone surrogates."""
    return json.dumps(event.model_dump(mode="python"), ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def sync_directory(path: Path) -> None:
    """The directory's entries are on disk.

    Raises: OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _as_note(data: dict[str, Any]) -> dict[str, Any]:
    """An event of an unknown kind as a note in its place, so that chains of parents through it stay whole."""
    base = {key: data.get(key) for key in ("v", "seq", "run_id", "at", "step", "parent_seq", "before", "after")}
    text = f"(an event of kind {data.get('kind')!r}, which this version does not know)"
    return {**base, "messages": data.get("messages", []), "kind": NoteEvent.model_fields["kind"].default, "text": text}


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
