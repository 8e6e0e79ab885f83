"""Writes the lines of a harness's calls. The order of lines is that of every run: see ``checkpointer``.

A model call's snapshot is taken while the model is thinking. It becomes a checkpoint with the answer's line, or ahead
of the first other line that is written meanwhile; a stream that is left early, with nothing in between, leaves none.
"""

from __future__ import annotations

import json
from concurrent.futures import Future, wait
from typing import Any

from orchestrator.aside import put_aside
from orchestrator.checkpointer import Pending
from orchestrator.desk import Desk
from orchestrator.events import (
    CheckpointEvent,
    Message,
    ModelCallEvent,
    ModelStartEvent,
    RestoreEvent,
    RewindEvent,
    SubmissionEvent,
    ToolCallEvent,
    ToolStartEvent,
)
from orchestrator.journal import Journal
from orchestrator.recorded_call import MESSAGES, RecordedCall, RecordedInput, shortened
from orchestrator.recording.harness_call import Answer, Asked, Call, ToolAnswer
from orchestrator.recording.own_states import OwnStates
from orchestrator.recording.replay import ASKS, Past, Replay
from orchestrator.recording.told import Conversations
from orchestrator.resume_point import RESTARTED, tries
from orchestrator.session import Session
from orchestrator.tools import Outcome
from snapshot_drivers.base import Snapshot
from snapshot_drivers.crash_points import reached

NO_BREAKPOINT = -1
"""Stands in the line of an incomplete answer: the moment before it is no breakpoint."""
_STATES = (CheckpointEvent, ModelCallEvent, ToolCallEvent, SubmissionEvent, RewindEvent, RestoreEvent)


class CallLog:
    """The lines of one execution. Not safe for threads."""

    def __init__(
        self,
        session: Session,
        desk: Desk,
        replay: Replay,
        conversations: Conversations,
        states: OwnStates,
        news: str | None,
    ) -> None:
        self._session = session
        self._journal = session.journal
        self._checkpointer = session.checkpointer
        self._desk = desk
        self._conversations = conversations
        self._states = states
        self._news = news
        self.inputs = dict(replay.inputs)
        """The whole inputs of the path's calls, by number."""
        self._last_model: dict[int | None, int] = {}
        self._captured: Future[Snapshot] | None = None
        self._captured_for: Call | None = None

    def place(
        self, asked: Asked, hashed: str, *, number: int, scope: int | None, lane: int, beside: list[int]
    ) -> RecordedCall:
        """What stands in the log of a new call; its input relative to the scope's last request."""
        whole = self._journal.redacted_value(asked.input)
        base = self._last_model.get(scope) if asked.kind == "model" else None
        given = shortened(whole, hashed, base, self.inputs.get(base, {}) if base is not None else {})
        self.inputs[number] = whole
        given = RecordedInput(**{**given.model_dump(), "rest": self._aside(given.rest)})
        return RecordedCall(number=number, scope=scope, lane=lane, beside=beside, api=asked.api, input=given)

    def answered(self, past: Past) -> None:
        """The model call is answered from the log; later ones are written relative to it."""
        self._conversations.answered(past.call.scope, past.input, past.told)
        self._last_model[past.call.scope] = past.call.number

    def begin_model(self, call: Call) -> None:
        """The request may be sent; with no other call beside it, its breakpoint's snapshot is being taken.

        Raises: SnapshotError, HostError.
        """
        told: list[Message] = []
        if not call.recorded.beside:
            self.settle_breakpoint()
            news = self._conversations.news(call.scope, self.inputs[call.number])
            if news:
                self._journal.note(ASKS, say=news)
            if self._news is not None:
                told, self._news = [{"role": "user", "content": self._news}], None
                self._journal.note(RESTARTED, say=told)
        call.inserts = self._conversations.inserts(call.scope, self.inputs[call.number], told)
        if not call.recorded.beside:
            self._captured, self._captured_for = self._checkpointer.capture_soon(), call
        self._desk.do("the model is thinking")
        self._session.observer.thinking(self._journal.place()["step"] + 1)
        self._journal.mark(ModelStartEvent(**self._journal.place(), call=call.recorded))
        reached("before-model-call")

    def begin_tool(self, call: Call) -> None:
        """The tool may run. Raises: SnapshotError, HostError."""
        head_seq, position = self._journal.head.seq, len(call.recorded.beside)
        call.attempt = 1 + tries(self._journal.events, head_seq, position)
        before = self._state() or self._checkpointer.last_snapshot_id or self._checkpointer.capture().snapshot_id
        self._desk.do(f"running the tool {call.asked.name}")
        self._journal.mark(
            ToolStartEvent(
                **self._journal.place(),
                before=before,
                answer_seq=head_seq,
                position=position,
                name=call.asked.name,
                call=call.recorded,
            )
        )
        reached("before-tool-call")

    def end_model(self, call: Call, answer: Answer) -> None:
        """The answer stands in the log, after its breakpoint. Raises: SnapshotError, HostError."""
        unwanted = answer.incomplete and self._captured_for is call
        captured = None
        if unwanted:
            captured = self.drop_breakpoint()
        else:
            self.settle_breakpoint()
        reached("after-model-call")
        # The first call of all may be no breakpoint; where the container stood then is known all the same.
        place, state = self._journal.place(), self._state() or captured
        kept = {"incomplete": answer.incomplete, "readable_only": answer.readable_only}
        news = self._conversations.news(call.scope, self.inputs[call.number])
        whole = self.inputs[call.number]
        self._journal.add(
            ModelCallEvent(
                step=place["step"] + 1,
                parent_seq=place["parent_seq"],
                before=state,
                after=state,
                messages=[*news, *([answer.message] if answer.message else [])],
                breakpoint_id=NO_BREAKPOINT if unwanted else self._last_breakpoint_id(),
                model=call.asked.name,
                parameters=whole["parameters"],
                request_digest=call.recorded.input.digest,
                request_messages=len(whole[MESSAGES]) + len(call.inserts),
                response=self._aside(answer.response),
                finish_reason=answer.finish_reason,
                usage=answer.usage,
                cost_usd=answer.cost_usd,
                latency_ms=call.duration_ms,
                attempts=answer.attempts + self._journal.requests_lost_now(),
                call=call.recorded.model_copy(update=kept),
            )
        )
        self._last_model[call.scope] = call.number

    def end_tool(self, call: Call, answer: ToolAnswer) -> None:
        """The result stands in the log, after the snapshot that follows it. Raises: SnapshotError, HostError."""
        reached("after-tool-call")
        self.settle_breakpoint()
        kept = {"outcome": self._aside(answer.outcome), "readable_only": answer.readable_only}
        outcome = Outcome(
            self._journal.redacted(answer.text),
            error=answer.error,
            exit_code=answer.exit_code,
            duration_ms=call.duration_ms,
        )
        self._checkpointer.settle(
            Pending(
                call.asked.call_id or f"call_{call.number}",
                call.asked.name,
                json.dumps(call.asked.input["arguments"], ensure_ascii=False),
                outcome,
                self._state() or self._checkpointer.last_snapshot_id,
                shared=call.shared,
                attempt=call.attempt,
                call=call.recorded.model_copy(update=kept),
            )
        )

    def settle_breakpoint(self) -> None:
        """The checkpoint of the model call that is under way stands in the log: another line follows it.

        Raises: SnapshotError, HostError.
        """
        captured, call = self._captured, self._captured_for
        self._captured = self._captured_for = None
        if captured is not None:
            checkpoint = self._checkpointer.commit(captured)
            self._states.keep(checkpoint.breakpoint_id, None if call is None else call.kept)

    def drop_breakpoint(self) -> str | None:
        """The moment before the model call that is under way is no breakpoint; answers its snapshot, if it has one."""
        captured, self._captured, self._captured_for = self._captured, None, None
        if captured is None:
            return None
        wait([captured])
        return None if captured.exception() is not None else captured.result().snapshot_id

    def _state(self) -> str | None:
        return last_state(self._journal)

    def _last_breakpoint_id(self) -> int:
        path = reversed(self._journal.path())
        return next((event.breakpoint_id for event in path if isinstance(event, CheckpointEvent)), NO_BREAKPOINT)

    def _aside(self, raw: Any) -> Any:
        return put_aside(self._session.log.path.parent, raw, self._journal.redacted)


def last_state(journal: Journal) -> str | None:
    """The snapshot in which the path's last line left the container; ``None``: no line says."""
    return next((event.after for event in reversed(journal.path()) if isinstance(event, _STATES)), None)
