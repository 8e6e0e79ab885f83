"""Takes breakpoints: captures the container while the model thinks, and commits context and snapshot as one pair.

The order of lines is the invariant: a tool call's line after the snapshot that follows it, a checkpoint's line after
its snapshot, a model's answer after the checkpoint of its breakpoint. What no line names is garbage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal, Self

from orchestrator.agent_messages import tool_message
from orchestrator.errors import HostError
from orchestrator.events import CheckpointEvent, Message, RewindIntentEvent, ToolCallEvent
from orchestrator.guests import Guests
from orchestrator.journal import Journal
from orchestrator.recorded_call import RecordedCall
from orchestrator.run_container import RunContainer
from orchestrator.tools import Outcome
from snapshot_drivers.base import (
    CaptureOptions,
    Change,
    Coverage,
    CoverageItem,
    CoverageState,
    Snapshot,
    SnapshotDriver,
    StateKind,
)
from snapshot_drivers.errors import SnapshotError

FILES_LISTED_MAX = 200
"""Changes that a tool call's line names; all are counted."""

Kind = Literal["model", "manual", "before_rewind"]


@dataclass(frozen=True)
class Pending:
    """A tool call that has run; its line waits for the snapshot after it."""

    call_id: str
    name: str
    arguments: str
    outcome: Outcome
    before: str | None
    """The snapshot before it."""
    ran: bool = True
    """It touched the container; a call that did not needs no snapshot of its own."""
    shared: bool = False
    attempt: int = 1
    """Which try it was; the others were cut off, and their effects undone."""
    call: RecordedCall | None = None
    """Of an agent of another framework, which puts the result into its conversation itself."""

    @property
    def message(self) -> Message:
        """What the conversation gets."""
        return tool_message(self.call_id, self.outcome.result)


class Breakpoint:
    """A breakpoint whose pair is being committed in the capture's thread."""

    def __init__(self, pool: Executor, commit: Callable[[Callable[[], float]], CheckpointEvent]) -> None:
        """``commit`` is started with a function that tells how many ms the step has been waiting."""
        self._answered_at: float | None = None
        self._future = pool.submit(commit, self._waited_ms)

    def answered(self) -> None:
        """The model's answer is there: from now on the step waits for the capture."""
        self._answered_at = time.monotonic()

    def committed(self) -> CheckpointEvent:
        """The checkpoint's line, once it stands in the log.

        Raises: SnapshotError, HostError: there is none.
        """
        return self._future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The thread works on it no more, whatever became of it: the log is the caller's again."""
        wait([self._future])

    def _waited_ms(self) -> float:
        return 0.0 if self._answered_at is None else (time.monotonic() - self._answered_at) * 1000


class Checkpointer:
    """Takes the breakpoints of one run. Calls of its methods, and the work of a `Breakpoint`, never overlap."""

    def __init__(
        self,
        driver: SnapshotDriver,
        container: RunContainer,
        journal: Journal,
        options: CaptureOptions,
        *,
        on_failure: Literal["stop", "degrade"] = "stop",
        guests: Guests | None = None,
    ) -> None:
        """``guests``: those whose changes a tool call's line must not claim as the tool's own."""
        self.driver = driver
        self.container = container
        self.journal = journal
        self.options = options
        self._on_failure = on_failure
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="capture")
        self.last_snapshot_id = _last_snapshot_id(journal)
        """The snapshot whose state the container last had for certain."""
        self._guests = guests or Guests()
        self._guests_came = False
        self._changed_since: str | None = None
        self._changed: set[str] = set()

    def begin(self, pending: Pending | None, *, kind: Kind = "model", note: str | None = None) -> Breakpoint:
        """The capture runs, in a thread of its own; ``pending``'s line and the checkpoint's follow it."""
        degrade = self._on_failure == "degrade"
        return Breakpoint(self._pool, lambda waited_ms: self._commit(pending, kind, note, waited_ms, degrade=degrade))

    def checkpoint(self, kind: Kind, *, note: str | None = None, degrade: bool = False) -> CheckpointEvent:
        """A checkpoint of this moment stands in the log.

        ``degrade``: when the capture fails, a checkpoint without a snapshot does.

        Raises: SnapshotError, HostError.
        """
        return self._commit(None, kind, note, lambda: 0.0, degrade=degrade)

    def capture_soon(self) -> Future[Snapshot]:
        """A snapshot of this moment is being taken, in a thread of its own; ``commit`` makes it a checkpoint, or none.

        For a request of which nobody knows yet whether it will be a breakpoint.
        """
        return self._pool.submit(self.capture)

    def commit(self, captured: Future[Snapshot], *, kind: Kind = "model") -> CheckpointEvent:
        """The checkpoint of the moment at which ``capture_soon`` was called stands in the log.

        Raises: SnapshotError, HostError: there is no snapshot.
        """
        previous, waited_since = self._previous(), time.monotonic()
        try:
            snapshot = captured.result()
            changes = self._changes(previous, snapshot)
        except (SnapshotError, HostError) as error:
            if self._on_failure == "stop":
                raise
            return self.journal.add(self._failed(kind, None, str(error)))
        waited_ms = (time.monotonic() - waited_since) * 1000
        return self.journal.add(self._taken(snapshot, kind, None, self._count_since(previous, changes), waited_ms))

    def settle(self, pending: Pending) -> str | None:
        """The call's line stands in the log; answers the snapshot after it (before the next call of the message).

        Raises: SnapshotError, HostError: the line stands there without a snapshot.
        """
        if not pending.ran:
            self._add_call(pending, pending.before, [])
            return pending.before
        try:
            snapshot = self.capture()
            changes = self._changes(pending.before, snapshot)
            self._count_since(self._previous(), changes)
        except (SnapshotError, HostError):
            self._add_call(pending, None, [])
            if self._on_failure == "stop":
                raise
            return None
        self._add_call(pending, snapshot.snapshot_id, changes)
        return snapshot.snapshot_id

    def capture(self, *, lenient: bool = False) -> Snapshot:
        """A snapshot of this moment, which no line names yet. ``lenient``: see ``CaptureOptions``.

        Raises: SnapshotError, HostError.
        """
        with self.container.exec_lock:
            self._guests_came = self._guests.seen() or self._guests_came
            options = self.options.model_copy(update={"lenient": lenient})
            snapshot = self.driver.capture(self.container.target(), self.last_snapshot_id, options)
        self.last_snapshot_id = snapshot.snapshot_id
        return snapshot

    def close(self) -> None:
        """The capture's thread is gone; one that runs is waited for. Repeatable."""
        self._pool.shutdown(wait=True)

    def _commit(
        self, pending: Pending | None, kind: Kind, note: str | None, waited_ms: Callable[[], float], *, degrade: bool
    ) -> CheckpointEvent:
        previous = self._previous()
        try:
            snapshot = self.capture(lenient=kind == "before_rewind")
            changes = self._changes(pending.before if pending is not None else previous, snapshot)
        except (SnapshotError, HostError) as error:
            if pending is not None:
                self._add_call(pending, None, [])
            if not degrade:
                raise
            return self.journal.add(self._failed(kind, note, str(error)))
        if pending is not None:
            self._add_call(pending, snapshot.snapshot_id, changes)
        self._guests_came = False
        count = self._count_since(previous, changes)
        return self.journal.add(self._taken(snapshot, kind, note, count, waited_ms()))

    def _taken(
        self, snapshot: Snapshot, kind: Kind, note: str | None, changed_count: int, waited_ms: float
    ) -> CheckpointEvent:
        return CheckpointEvent(
            **self.journal.place(),
            before=snapshot.snapshot_id,
            after=snapshot.snapshot_id,
            breakpoint_id=self.journal.next_breakpoint_id(),
            checkpoint_kind=kind,
            driver=snapshot.driver,
            coverage=snapshot.coverage,
            progress=self.journal.totals().progress,
            note=note,
            files_changed_count=changed_count,
            capture_ms=snapshot.capture_ms,
            frozen_ms=snapshot.frozen_ms,
            waited_ms=waited_ms,
            stored_bytes=snapshot.stored_bytes,
        )

    def _failed(self, kind: Kind, note: str | None, error: str) -> CheckpointEvent:
        """A checkpoint without a snapshot: it keeps the context's place and says why."""
        lost = CoverageItem(kind=StateKind.ROOTFS, path="/", state=CoverageState.MISSING, reason=error)
        return CheckpointEvent(
            **self.journal.place(),
            breakpoint_id=self.journal.next_breakpoint_id(),
            checkpoint_kind=kind,
            driver=self.driver.name,
            coverage=Coverage.of([lost]),
            progress=self.journal.totals().progress,
            note=note,
            error=error,
        )

    def _add_call(self, pending: Pending, after: str | None, changes: list[Change]) -> None:
        outcome = pending.outcome
        self.journal.add(
            ToolCallEvent(
                **self.journal.place(),
                before=pending.before,
                after=after,
                messages=[pending.message] if pending.call is None else [],
                call_id=pending.call_id,
                name=pending.name,
                arguments=pending.arguments,
                result=outcome.result,
                error=outcome.error,
                exit_code=outcome.exit_code,
                timed_out=outcome.timed_out,
                duration_ms=outcome.duration_ms,
                attempt=pending.attempt,
                files_changed=changes[:FILES_LISTED_MAX],
                files_changed_count=len(changes),
                shared=pending.shared or (pending.ran and self._guests_came),
                call=pending.call,
            )
        )
        self._guests_came = False

    def _changes(self, before: str | None, snapshot: Snapshot) -> list[Change]:
        return list(self.driver.diff(before, snapshot.snapshot_id))

    def _count_since(self, previous: str | None, changes: list[Change]) -> int:
        """How many different paths were changed since the ``previous`` checkpoint's snapshot, with ``changes``."""
        if self._changed_since != previous:
            self._changed_since, self._changed = previous, set()
        self._changed.update(change.path for change in changes)
        return len(self._changed)

    def _previous(self) -> str | None:
        """The snapshot of the last checkpoint on the live path that has one; ``None``: only the image came before."""
        # The way back as far as it can be read: a breakpoint from before a hole in the log must stay within reach.
        way = self.journal.way_back()
        return next((event.after for event in way if isinstance(event, CheckpointEvent) and event.after), None)


def _last_snapshot_id(journal: Journal) -> str | None:
    """An intent names a snapshot that the container may never have had; every other ``after`` was true at its time."""
    events = reversed(journal.events)
    return next((event.after for event in events if event.after and not isinstance(event, RewindIntentEvent)), None)
