"""The context log: ``events.jsonl``, append-only, one JSON object a line, synced line by line; the only truth of a run.

Lines are ASCII (everything else is escaped, lone surrogates too) and end in a line feed; a line without one was
never committed. Reading never fails on a damaged line: it is reported with its number, and what does not need it stays
usable.

Times come from the clock as it stood when the log was opened for writing, and from there on from the monotonic one: a
clock that is set meanwhile changes no duration. Numbers and order depend on no clock at all.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from orchestrator.errors import Busy, HostError, LogDamaged
from orchestrator.events import FORMAT_VERSION, CheckpointEvent, EndEvent, EngineErrorEvent, Event
from orchestrator.log_line import BadLine, decode, encode
from snapshot_drivers.base import Coverage

RESERVE_SUFFIX: Final = ".reserve"
RESERVE_BYTES: Final = 64 * 1024
"""Room that a writer holds beside the log, so that on a full disk the log can still say how the run ended."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Damage:
    """A line of the log that could not be used as it stands."""

    line_number: int
    """From 1."""
    reason: str
    torn: bool = False
    """The last line, cut off in the middle of a write: nothing that was committed is lost."""
    lost: bool = True
    """Its event cannot be read; false: it can, only the way back from it is broken."""


class ContextLog:
    """One run's log. One writer at a time: whoever opens it as a writer holds the run's lock."""

    def __init__(self, path: Path, run_id: str, *, descriptor: int | None) -> None:
        """Use ``open``."""
        self.path = path
        self.run_id = run_id
        self.events: list[Event] = []
        """All readable events in the order of the file; of kinds that this version does not know: as notes."""
        self.line_of: dict[int, int] = {}
        """Line numbers of the readable events, by ``seq``."""
        self.damage: list[Damage] = []
        self.lines = 0
        """How many whole lines there are, damaged ones included."""
        self._descriptor = descriptor
        self._reserve = path.with_suffix(RESERVE_SUFFIX)
        self._size = 0
        self._next_seq = 0
        self._coverage: Coverage | None = None
        self._opened_at = datetime.now(UTC)
        self._opened_s = time.monotonic()

    @classmethod
    def open(cls, path: Path, run_id: str, *, writer: bool = False) -> Self:
        """The log of ``run_id`` with all its events read.

        A writer makes the file (0600) when it is missing and cuts off a torn last line; a reader changes nothing.

        Raises: LogDamaged: a reader finds no file, or it is no regular file. HostError: it cannot be opened.
        """
        flags = os.O_RDWR | os.O_CREAT if writer else os.O_RDONLY
        try:
            # Not blocking: in the place of the log there may be a pipe.
            descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except FileNotFoundError as error:
            raise LogDamaged(
                f"{path}: no such file: the run has no context log; remove it with: orchestrator rm"
            ) from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise _not_regular(path) from error
            raise HostError(f"{path}: the context log cannot be opened: {error.strerror}") from error
        log = cls(path, run_id, descriptor=descriptor)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _not_regular(path)
            log._read(descriptor)
            if writer:
                log._begin_writing(descriptor)
        except OSError as error:
            log.close()
            raise HostError(f"{path}: the context log cannot be read or written: {error.strerror}") from error
        except BaseException:
            log.close()
            raise
        if not writer:
            log.close()
        return log

    def append(self, event: Event, *, sync: bool = True) -> Event:
        """``event`` stands in the log, synced; the answer is the event as every reader will see it.

        ``seq``, ``at``, ``run_id`` and ``v`` are assigned here. Secrets are the caller's to redact. Without ``sync`` it
        survives this process, but a power cut only together with the next synced event.

        Raises: HostError: it could not be written (disk full); the log is as it was before. Busy: another process has
            written to it. LogDamaged: it was removed or replaced.
        """
        if self._descriptor is None:
            raise HostError(f"{self.path}: the context log is not open for writing")
        self._check_unchanged(self._descriptor)
        line = encode(
            event.model_copy(
                update={
                    "v": FORMAT_VERSION,
                    "seq": self._next_seq,
                    "run_id": self.run_id,
                    "at": self.now().isoformat(timespec="milliseconds"),
                },
            )
        )
        # Read back: two adjacent halves of a surrogate pair are one character to every reader.
        written = self._shared(decode(line[:-1], self.run_id))
        size, seq, count, lines = self._size, self._next_seq, len(self.events), self.lines
        try:
            self._write(self._descriptor, line, last_words=isinstance(event, EngineErrorEvent | EndEvent), sync=sync)
            self._size, self._next_seq, self.lines = size + len(line), seq + 1, lines + 1
            self.line_of[seq] = self.lines
            self.events.append(written)
        except BaseException as error:
            # An interrupt too: half a line, or a line of which nobody knows, would spoil the next one.
            self._size, self._next_seq, self.lines = size, seq, lines
            del self.events[count:]
            self.line_of.pop(seq, None)
            self._cut(self._descriptor)
            if isinstance(error, OSError):
                raise HostError(f"{self.path}: an event cannot be written: {error.strerror}: make room") from error
            raise
        return written

    def now(self) -> datetime:
        """The time by the clock that stamps the events; aware UTC."""
        return self._opened_at + timedelta(seconds=time.monotonic() - self._opened_s)

    def lost_lines_after(self, seq: int) -> int:
        """How many lines behind the event ``seq`` (-1: in all) cannot be read: their events' numbers are taken."""
        line = self.line_of.get(seq, 0)
        return sum(found.lost and not found.torn and found.line_number > line for found in self.damage)

    def close(self) -> None:
        """The file is closed; the events stay readable. Repeatable."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._give_up_reserve()

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
        for number, line in enumerate(lines, start=1):
            try:
                event = decode(line, self.run_id)
                _check_place(event, self.line_of)
            except BadLine as error:
                self.damage.append(Damage(number, str(error)))
                continue
            if event.parent_seq is not None and event.parent_seq not in self.line_of:
                reason = f"continues event {event.parent_seq}, which is not in the log"
                self.damage.append(Damage(number, reason, lost=False))
            self.line_of[event.seq] = number
            self.events.append(self._shared(event))
        if torn:
            reason = f"torn: {len(torn)} bytes without an end of line (a write was cut off; the event never happened)"
            self.damage.append(Damage(len(lines) + 1, reason, torn=True))
        self.lines = len(lines)
        # A damaged line may have used a number that only it knew; numbers count lines, so it was below them.
        self._next_seq = max(max(self.line_of, default=-1) + 1, len(lines))

    def _shared(self, event: Event) -> Event:
        """The event, with the coverage of the last checkpoint where its own is equal: thousands of them are."""
        if isinstance(event, CheckpointEvent):
            if event.coverage == self._coverage:
                event.coverage = self._coverage
            self._coverage = event.coverage
        return event

    def _begin_writing(self, descriptor: int) -> None:
        os.ftruncate(descriptor, self._size)
        os.fsync(descriptor)
        os.lseek(descriptor, self._size, os.SEEK_SET)
        sync_directory(self.path.parent)
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            reserve = os.open(self._reserve, flags, 0o600)
            try:
                os.posix_fallocate(reserve, 0, RESERVE_BYTES)
            finally:
                os.close(reserve)

    def _check_unchanged(self, descriptor: int) -> None:
        here = os.fstat(descriptor)
        try:
            there = self.path.lstat()
        except OSError as error:
            raise LogDamaged(f"{self.path}: the context log is gone ({error.strerror}): nothing is written") from error
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            raise LogDamaged(f"{self.path}: the context log was replaced while it was written: nothing is written")
        if here.st_size != self._size:
            raise Busy(
                f"{self.path}: another process has written to the context log ({here.st_size} bytes, {self._size} are "
                "ours): nothing is written; see: orchestrator verify"
            )

    def _write(self, descriptor: int, line: bytes, *, last_words: bool, sync: bool) -> None:
        try:
            _write_all(descriptor, line)
        except OSError as error:
            if not (last_words and error.errno in _FULL and self._give_up_reserve()):
                raise
            self._cut(descriptor)
            _write_all(descriptor, line)
        if sync:
            os.fsync(descriptor)

    def _cut(self, descriptor: int) -> None:
        """What was written behind the last whole line is gone; if not even that can be done, no more is written."""
        try:
            os.ftruncate(descriptor, self._size)
            os.lseek(descriptor, self._size, os.SEEK_SET)
        except OSError:
            self.close()

    def _give_up_reserve(self) -> bool:
        """The room held back is free; false: there was none."""
        try:
            self._reserve.unlink()
        except OSError:
            return False
        return True


def sync_directory(path: Path) -> None:
    """The directory's entries are on disk.

    Raises: OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_place(event: Event, known: dict[int, int]) -> None:
    """Raises: BadLine: no event of that number can stand there."""
    if event.seq < 0 or event.seq in known:
        raise BadLine(f"event number {event.seq} is used twice or negative")
    parent = event.parent_seq
    if (parent is None) != (event.kind == "run") or (parent is not None and parent >= event.seq):
        raise BadLine(f"event {event.seq} cannot continue event {event.parent_seq}")


def _not_regular(path: Path) -> LogDamaged:
    return LogDamaged(f"{path}: is no regular file, so it is not the run's context log: put a copy of the log there")


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
