"""The tool calls of one answer: run in order, each answered by exactly one message, or ended by a rewind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from orchestrator.candidates import candidates, is_candidate
from orchestrator.checkpointer import Pending
from orchestrator.desk import LIMIT_TIME, Desk
from orchestrator.errors import ContainerLost, HostError, UsageError
from orchestrator.events import Message, ModelCallEvent, SubmissionEvent, ToolStartEvent
from orchestrator.launcher import CutShort
from orchestrator.resume_point import tries
from orchestrator.session import Session
from orchestrator.tools import (
    BashCall,
    CandidatesCall,
    CommitCall,
    Outcome,
    Refusal,
    SubmitCall,
    bash_result,
    candidates_result,
    offered,
    parse,
)
from snapshot_drivers.crash_points import reached
from snapshot_drivers.errors import SnapshotError

PASSED = "All checks passed: the task is done."
NOT_RUN_AFTER_REWIND = "not run: it came after backtrack_commit, and nothing was rewound"
NOT_RUN_AFTER_END = "not run: the run has ended"
NOT_RUN_BEFORE_MOVE = "not run: the operator took the run to another breakpoint"
CUT_SHORT = "cut short: the operator stopped the run"
OUT_OF_TIME = "cut short: the run's wall time is used up"


class Rewound(Exception):
    """The run stands at an earlier breakpoint: nothing of this step reaches its conversation."""


class Step:
    """Runs the calls of one answer in the session's container."""

    def __init__(self, session: Session, desk: Desk, *, before: str | None, is_over: Callable[[], bool]) -> None:
        """``before``: the snapshot at the step's breakpoint. ``is_over``: whether the run has ended by now."""
        self._session = session
        self._desk = desk
        self._before = before
        self._is_over = is_over

    def take(
        self,
        answer: ModelCallEvent,
        *,
        answered: int = 0,
        submission: SubmissionEvent | None = None,
        news: str | None = None,
    ) -> Pending | None:
        """Every call of the ``answer`` has been run; the last one's line is still to be written.

        ``None``: there was no call, or a rewind ended the step. For a step that was cut off: how many of the calls are
        ``answered`` in the log, the ``submission`` that stands there for the next one, and ``news`` for the agent.

        Raises: HostError, SnapshotError: the engine failed, or a snapshot between two calls did.
        """
        pending: Pending | None = None
        calls = answer.messages[0].get("tool_calls") or []
        committed = any(call["function"]["name"] == "backtrack_commit" for call in calls[:answered])
        not_run = NOT_RUN_AFTER_REWIND if committed else None
        for position, call in enumerate(calls[answered:], answered):
            if pending is not None:
                self._before = self._session.checkpointer.settle(pending)
                reached("between-calls")
            if position > 0 and self._is_over():
                not_run = NOT_RUN_AFTER_END
            if not_run is None and self._desk.cut() is not None:
                not_run = NOT_RUN_AFTER_END
            elif not_run is None and self._desk.moves():
                not_run = NOT_RUN_BEFORE_MOVE
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            shared = self._session.container.other_processes() > 0
            attempt = 1
            if submission is not None:
                ran, outcome, submission = True, _submitted(submission, submission.duration_ms), None
                attempt = max(1, tries(self._session.journal.events, answer.seq, position))
            elif not_run is not None:
                ran, outcome = False, Outcome(not_run, error="not run")
            else:
                attempt = self._start(answer, position, name)
                try:
                    ran, outcome = self._perform(name, arguments, answer.finish_reason)
                except Rewound:
                    return None
                reached("after-tool-call")
            if news is not None:
                outcome, news = replace(outcome, result=f"{news}\n\n{outcome.result}"), None
            shared = ran and shared
            pending = Pending(call["id"], name, arguments, outcome, self._before, ran, shared, attempt)
            if name == "backtrack_commit":
                not_run = not_run or NOT_RUN_AFTER_REWIND
        return pending

    def _start(self, answer: ModelCallEvent, position: int, name: str) -> int:
        """The log says that the call begins; which try it is."""
        journal = self._session.journal
        self._desk.do(f"running the tool {name}")
        attempt = 1 + tries(journal.events, answer.seq, position)
        journal.mark(
            ToolStartEvent(**journal.place(), before=self._before, answer_seq=answer.seq, position=position, name=name)
        )
        reached("before-tool-call")
        return attempt

    def _perform(self, name: str, arguments: str, finish_reason: str | None) -> tuple[bool, Outcome]:
        """Whether the container was touched, and what became of the call."""
        names = offered(self._session.spec.strategy)
        request = parse(name, arguments, names, cut=finish_reason == "length")
        match request:
            case Refusal():
                return False, Outcome(request.text, error=request.text)
            case BashCall():
                return True, self._bash(request)
            case SubmitCall():
                return True, self._submit()
            case CandidatesCall():
                found = candidates(self._session.journal.events, self._session.is_stored)
                return False, Outcome(candidates_result(found))
            case CommitCall():
                return False, self._rewind(request)

    def _bash(self, call: BashCall) -> Outcome:
        limit_s = self._session.spec.limits.tool_timeout_s
        timeout_s = min(call.timeout_s or limit_s, limit_s)
        done = self._session.exec(call.command, timeout_s=timeout_s)
        text = bash_result(done, timeout_s)
        if done.cut is not None:
            text = "\n".join(part for part in (text, _cut_short(done.cut)) if part)
        return Outcome(
            self._session.journal.redacted(text),
            error=done.cut,
            exit_code=done.exit_code,
            timed_out=done.timed_out,
            duration_ms=done.duration_ms,
        )

    def _submit(self) -> Outcome:
        started = time.monotonic()
        try:
            checked = self._session.submit()
        except CutShort as cut:
            return Outcome(_cut_short(cut.reason), error=cut.reason, duration_ms=(time.monotonic() - started) * 1000)
        submission = self._session.journal.add(
            SubmissionEvent(
                **self._session.journal.place(),
                before=self._before,
                after=self._before,
                progress=checked.progress,
                failed=checked.failed,
                feedback=checked.feedback,
                duration_ms=checked.duration_ms,
            )
        )
        reached("after-submission-line")
        return _submitted(submission, (time.monotonic() - started) * 1000)

    def _rewind(self, call: CommitCall) -> Outcome:
        """What the model is told when there is no rewind.

        Raises: Rewound: there was one. ContainerLost.
        """
        journal = self._session.journal
        if not any(is_candidate(event) and event.breakpoint_id == call.breakpoint_id for event in journal.path()):
            text = f"error: {call.breakpoint_id} is no breakpoint to go back to: choose one of backtrack_candidates"
            return Outcome(text, error=text)
        try:
            self._session.rewinder.rewind(call.breakpoint_id, journal.redacted(call.memory_summary))
        except ContainerLost:
            raise
        except (UsageError, SnapshotError, HostError) as error:
            text = f"error: not rewound: {error}"
            return Outcome(text, error=text)
        raise Rewound


def _submitted(submission: SubmissionEvent, duration_ms: float) -> Outcome:
    text = PASSED if submission.failed is None else f"Not done yet: {submission.feedback}"
    return Outcome(text, duration_ms=duration_ms)


def _cut_short(reason: str) -> str:
    return OUT_OF_TIME if reason == LIMIT_TIME else CUT_SHORT


def has_calls(message: Message) -> bool:
    """Whether an assistant's message calls a tool."""
    calls: list[dict[str, Any]] | None = message.get("tool_calls")
    return bool(calls)
