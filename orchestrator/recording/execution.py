"""One pass of a harness through its calls: those that are in the log are answered from there, the others are made.

A model call is a breakpoint when no other call is in flight but those around it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

from orchestrator.aside import taken_back
from orchestrator.desk import LIMIT_TIME, STOPPED, Desk
from orchestrator.ending import Ending, ending, time_left_s
from orchestrator.errors import Divergence, HostError, OrchestratorError
from orchestrator.events import CheckpointEvent, EngineErrorEvent, Event, RestoreEvent, RewindEvent
from orchestrator.recorded_call import Input
from orchestrator.recording.call_log import CallLog
from orchestrator.recording.harness_call import Answer, Asked, Call, ToolAnswer, around
from orchestrator.recording.in_flight import InFlight
from orchestrator.recording.leaving import LeaveHarness, RecorderFailed, Rewound, RunOver, StateUnfit
from orchestrator.recording.own_states import Kept, OwnStates, Stateful
from orchestrator.recording.replay import Diverged, Found, Replay, Wait
from orchestrator.recording.told import Conversations
from orchestrator.request import digest
from orchestrator.session import Session
from snapshot_drivers.errors import SnapshotError

_PATIENCE_S: Final = 10.0
"""How long a call that is not the next one waits for those of other threads and tasks to be made."""
_LOOK_S: Final = 0.01
_LOG = logging.getLogger("orchestrator")


class Execution:
    """May be used from several threads and tasks: ``lock`` is the run's, and held for every line that is written."""

    def __init__(
        self,
        session: Session,
        desk: Desk,
        lock: threading.RLock,
        kept: dict[int, Kept],
        *,
        news: str | None = None,
    ) -> None:
        """It begins where the run stands. ``kept``: the run's, see ``OwnStates``. ``news``: what the agent is told with
        its next new request.

        Raises: LogDamaged: the path to the head cannot be read.
        """
        self.session = session
        self.over: LeaveHarness | None = None
        """Why the harness has been left: it meets this again at every further call."""
        self.answered = 0
        """Calls that were answered from the log."""
        self.made = 0
        """Calls that were made."""
        self._lock = lock
        self._journal = session.journal
        self._desk = desk
        self._agent = session.spec.agent
        self._replay = Replay(
            self._journal.events,
            self._journal.head.seq,
            ignore=self._agent.ignore,
            taken_back=self.taken_back,
        )
        conversations = Conversations(self._replay.told_next, self._replay.announced, self._agent.ignore)
        head = self._journal.head
        begins_at = head.breakpoint_id if isinstance(head, RewindEvent | RestoreEvent) else None
        self._states = OwnStates(kept, begins_at, self._agent.ignore)
        self._log = CallLog(session, desk, self._replay, conversations, self._states, news)
        self._in_flight = InFlight()
        self._writing = False
        self._late: list[tuple[Call, Answer]] = []
        self._moved_s = time.monotonic()

    def begin(self, asked: Asked) -> Call:
        """The call may be made, or is answered by its ``past``.

        Raises: LeaveHarness: the harness does not go on.
        """
        since_s = time.monotonic()
        while (call := self._begin(asked, since_s)) is None:
            time.sleep(_LOOK_S)
        return call

    async def begin_async(self, asked: Asked) -> Call:
        """As ``begin``; other tasks run while it waits."""
        since_s = time.monotonic()
        await asyncio.sleep(0)
        while (call := self._begin(asked, since_s)) is None:
            await asyncio.sleep(_LOOK_S)
        return call

    def check(self) -> None:
        """The harness may go on. Raises: LeaveHarness."""
        if self.over is not None:
            raise self.over
        if self._states.unproven:
            self.leave(StateUnfit("it acted before its first request"))

    def leave(self, reason: LeaveHarness) -> NoReturn:
        """The harness is left; whatever it still does meets ``reason``."""
        with self._lock:
            self.over = self.over or reason
        raise self.over

    def kept_state(self) -> Any | None:
        """The state that ``keep_states`` has kept at the breakpoint at which the run stands.

        ``None``: there is none, or the harness has done something in this pass already.
        """
        with self._lock:
            return self._states.here() if self._untouched() else None

    def keep_states(self, harness: Stateful, *, put_back: bool = False) -> bool:
        """The states of ``harness`` are kept at the breakpoints of this pass; false: it is not the first in it.

        ``put_back``: it goes on from ``kept_state``. If its first call is not the request that was made there, it is
        left before anything is sent, and runs again from its beginning.
        """
        with self._lock:
            untouched = self._untouched()
            if untouched:
                self._states.watch(harness, put_back=put_back)
            return untouched

    @contextmanager
    def running(self) -> Iterator[None]:
        """The harness runs in the block.

        Raises: LeaveHarness: it failed after it had been left; it ended, and never made the request of its state.
            Otherwise what it raises.
        """
        try:
            yield
        except (Exception, BaseExceptionGroup) as error:
            # Frameworks gather what their calls raised, and fail over what is no ``Exception`` among it.
            if self.over is not None:
                raise self.over from error
            if self._states.unproven:
                self.leave(StateUnfit(f"{type(error).__name__}: {error}"))
            raise
        if self._states.unproven:
            self.leave(StateUnfit("it ended without a request"))

    def end_model(self, call: Call, answer: Answer) -> None:
        """The answer stands in the log, after its breakpoint.

        Raises: LeaveHarness: the harness was left meanwhile; the answer is dropped, its cost counts.
        """
        with self._lock:
            if not self._in_flight.ends(call):
                return
            if self._writing:
                # A stream that the garbage collector closes, in the middle of another line of this same thread.
                self._late.append((call, answer))
                return
            with self._written():
                self._end_model(call, answer)

    def end_tool(self, call: Call, answer: ToolAnswer) -> None:
        """The result stands in the log, after the snapshot that follows it.

        Raises: LeaveHarness: the harness was left meanwhile; the result belongs to no path and is dropped.
        """
        with self._lock:
            if not self._in_flight.ends(call):
                return
            self.check()
            with self._written():
                self._log.end_tool(call, answer)

    def forget(self, call: Call) -> None:
        """The call led out of the harness: it gets no line."""
        with self._lock:
            self._in_flight.ends(call)

    def rewind(self, breakpoint_id: int, memory: str) -> NoReturn:
        """The run stands at the breakpoint, and the harness is left: for a tool, whose call gets no line.

        Raises: Rewound. UsageError, SnapshotError, HostError: the run stands where it stood.
        """
        with self._lock:
            self.check()
            self._log.drop_breakpoint()
            self._writing = True
            try:
                self.session.rewinder.rewind(breakpoint_id, self._journal.redacted(memory))
            finally:
                self._writing = False
            self.leave(Rewound(f"the run was rewound to breakpoint {breakpoint_id}"))

    def close(self, reason: LeaveHarness) -> None:
        """Nothing of it is under way any more: streams that nobody reads are recorded as far as they were read."""
        with self._lock:
            if self.over is None:
                self._in_flight.leave_streams(None)
            self._log.drop_breakpoint()
            self.over = self.over or reason

    def note(self, text: str) -> None:
        """The log says so. Raises: LeaveHarness."""
        with self._lock:
            self.settle()
            with self._written():
                self._journal.note(text)

    def passed_on(self, call: Call) -> None:
        """The caller of a stream has got another piece of it."""
        call.pieces += 1
        if call.ended and call.left is not None:
            call.left = None
            self.note(
                f"call {call.number} was read further after another call had begun: a second pass gets what came before"
            )

    def settle(self) -> None:
        """A line may be written behind all that came before. Raises: LeaveHarness."""
        with self._lock:
            self.check()
            with self._written():
                self._log.settle_breakpoint()

    def input_of(self, number: int) -> Input:
        """The whole input of a call of this path."""
        return self._log.inputs[number]

    def taken_back(self, raw: Any) -> Any:
        """What was put aside. Raises: LogDamaged: it is gone."""
        return taken_back(self.session.log.path.parent, raw)

    def not_repeated(self) -> str | None:
        """The next recorded call that the harness has not made again; ``None``: it made them all."""
        return self._replay.next_left()

    def _begin(self, asked: Asked, since_s: float) -> Call | None:
        """The call; ``None``: it has to wait for others."""
        scope = around()[-1] if around() else None
        now = self._journal.redacted_value(asked.input)
        hashed = digest(now)
        with self._lock, suppress(Wait):
            self._prove(asked, scope, now)
            self.check()
            self._in_flight.leave_streams(self._in_flight.lane())
            with self._written():
                found = None if self._replay.over else self._find(asked, scope, hashed, now, since_s)
                return self._begin_new(asked, scope, hashed) if found is None else self._answer(asked, found)
        return None

    def _untouched(self) -> bool:
        """The pass has just begun, so that a state can stand for all of it."""
        return not (self.answered or self.made or self._states.watched or around())

    def _prove(self, asked: Asked, scope: int | None, now: Input) -> None:
        """What the harness did on its way to its state counts as answered. Raises: LeaveHarness: it leads elsewhere."""
        if self.over is not None or not self._states.unproven:
            return
        if (why := self._states.proven(asked.kind, asked.api, scope, now)) is not None:
            self.leave(StateUnfit(why))
        for past in self._replay.skip():
            if past.kind == "model":
                self._log.answered(past)

    def _find(self, asked: Asked, scope: int | None, hashed: str, now: Input, since_s: float) -> Found | None:
        """The recorded call; ``None``: it is made after all. Raises: Wait, Divergence."""
        try:
            return self._replay.find(asked.kind, asked.api, scope, hashed, now)
        except Diverged as error:
            self._diverged(error)
        except Wait as undecided:
            if time.monotonic() - max(self._moved_s, since_s) < _PATIENCE_S:
                raise
            self._diverged(undecided.otherwise)
        return None

    def _answer(self, asked: Asked, found: Found) -> Call:
        self._moved_s = time.monotonic()
        past = found.past
        if found.warning is not None:
            _LOG.warning("answered from the log although it differs: %s", found.warning)
            self._journal.note(f"answered from the log although it differs: {found.warning}")
        if past.call.readable_only:
            raise Divergence(
                f"call {past.call.number} ({asked.api}, {asked.name}) cannot be answered from the log: its outcome was "
                "kept as text only; go back to a breakpoint before it, and let it return JSON"
            )
        self._states.called(past.call.scope)
        call = Call(asked, past.call, past=None if past.open else past)
        if past.open:
            self._in_flight.add(call)
            return call
        self.answered += 1
        if past.kind == "model":
            self._log.answered(past)
        return call

    def _diverged(self, error: Diverged) -> None:
        """What follows is made, from the breakpoint of the recorded call, where the task wants that.

        Raises: Divergence: it is not; nothing was sent.
        """
        text = f"the harness does not repeat itself: {error}"
        if self._agent.on_divergence == "stop":
            raise Divergence(f"{text}; nothing was sent (see agent.ignore and agent.on_divergence)")
        past = error.past
        checkpoint = None if past is None else _breakpoint_of(self._journal.events, past.event)
        if checkpoint is None:
            raise Divergence(f"{text}; no breakpoint stands right before that call, so nothing was sent")
        _LOG.warning("%s; going on from breakpoint %d", text, checkpoint.breakpoint_id)
        self.session.rewinder.restore(checkpoint.breakpoint_id)
        self._replay.drop()

    def _begin_new(self, asked: Asked, scope: int | None, hashed: str) -> Call:
        lane, beside = self._in_flight.lane(), self._in_flight.beside()
        if asked.kind == "model" and not beside:
            self._serve_desk()
        self._refuse_after_end()
        number = 1 + max((_number(event) for event in self._journal.events), default=0)
        placed = self._log.place(asked, hashed, number=number, scope=scope, lane=lane, beside=beside)
        call = Call(asked, placed, shared=bool(beside))
        if self._states.called(scope) and asked.kind == "model":
            call.kept = self._states.now(asked.api, self._log.inputs[number])
        if asked.kind == "model":
            self._log.begin_model(call)
        else:
            self._log.begin_tool(call)
        self._in_flight.add(call)
        self.made += 1
        return call

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Lines may be written while the block runs; then those are that came up meanwhile. Call it with the lock held.

        Raises: LeaveHarness: one could not be written.
        """
        self._writing = True
        try:
            yield
            while self._late:
                self._end_model(*self._late.pop(0))
        except (OrchestratorError, SnapshotError) as error:
            self.leave(RecorderFailed(error))
        finally:
            self._writing = False

    def _end_model(self, call: Call, answer: Answer) -> None:
        if self.over is not None:
            self._count(answer)
            raise self.over
        self._log.end_model(call, answer)

    def _count(self, answer: Answer) -> None:
        if answer.cost_usd is None:
            return
        text = "the run had left the path for which the model was asked: its answer was dropped"
        with suppress(HostError):  # the run may have ended, and its log with it
            self._journal.add(EngineErrorEvent(**self._journal.place(), text=text, cost_usd=answer.cost_usd))

    def _serve_desk(self) -> None:
        left_s = time_left_s(
            self._journal.events, self.session.spec.limits, self._journal.now(), self._journal.totals()
        )
        self._desk.deadline = None if left_s is None else time.monotonic() + left_s
        if self._desk.waiting() and not self._desk.stop_wanted:
            self._log.settle_breakpoint()
            if self._desk.serve(self.session):
                self.leave(Rewound("the operator took the run to another breakpoint"))

    def _refuse_after_end(self) -> None:
        limits = self.session.spec.limits
        found = ending(self._journal.events, self._journal.path(), limits, self._journal.now(), self._journal.totals())
        if found is None and (reason := self._desk.cut()) is not None:
            stopped = Ending("stopped", "user", "the operator stopped the run")
            found = stopped if reason == STOPPED else Ending("failed", LIMIT_TIME, "the wall time is used up")
        if found is not None:
            self.leave(RunOver(found))


def _breakpoint_of(events: Sequence[Event], event: Event) -> CheckpointEvent | None:
    """The checkpoint that the event follows directly; ``None``: it follows something else."""
    parent = next((one for one in events if one.seq == event.parent_seq), None)
    return parent if isinstance(parent, CheckpointEvent) else None


def _number(event: Event) -> int:
    call = getattr(event, "call", None)
    return 0 if call is None else int(call.number)
