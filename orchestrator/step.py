"""The tool calls of one answer: run in order, each answered by exactly one message, or ended by a rewind."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from orchestrator.candidates import candidates, is_candidate
from orchestrator.checkpointer import Pending
from orchestrator.errors import ContainerLost, HostError, UsageError
from orchestrator.events import Message, SubmissionEvent
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
from snapshot_drivers.errors import SnapshotError

PASSED = "All checks passed: the task is done."
NOT_RUN_AFTER_REWIND = "not run: it came after backtrack_commit, and nothing was rewound"
NOT_RUN_AFTER_END = "not run: the run has ended"


class Rewound(Exception):
    """The run stands at an earlier breakpoint: nothing of this step reaches its conversation."""


class Step:
    """Runs the calls of one answer in the session's container."""

    def __init__(self, session: Session, *, before: str | None, is_over: Callable[[], bool]) -> None:
        """``before``: the snapshot at the step's breakpoint. ``is_over``: whether the run has ended by now."""
        self._session = session
        self._before = before
        self._is_over = is_over

    def take(self, message: Message, finish_reason: str | None) -> Pending | None:
        """Every call of the assistant's ``message`` has been run; the last one's line is still to be written.

        ``None``: there was no call, or a rewind ended the step.

        Raises: HostError, SnapshotError: the engine failed, or a snapshot between two calls did.
        """
        pending: Pending | None = None
        not_run: str | None = None
        for call in message.get("tool_calls") or []:
            if pending is not None:
                self._before = self._session.checkpointer.settle(pending)
                if self._is_over():
                    not_run = NOT_RUN_AFTER_END
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            shared = self._session.container.other_processes() > 0
            if not_run is not None:
                ran, outcome = False, Outcome(not_run, error="not run")
            else:
                try:
                    ran, outcome = self._perform(name, arguments, finish_reason)
                except Rewound:
                    return None
            pending = Pending(call["id"], name, arguments, outcome, self._before, ran=ran, shared=ran and shared)
            if name == "backtrack_commit":
                not_run = not_run or NOT_RUN_AFTER_REWIND
        return pending

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
                return False, Outcome(candidates_result(candidates(self._session.journal.events)))
            case CommitCall():
                return False, self._rewind(request)

    def _bash(self, call: BashCall) -> Outcome:
        limit_s = self._session.spec.limits.tool_timeout_s
        timeout_s = min(call.timeout_s or limit_s, limit_s)
        done = self._session.exec(call.command, timeout_s=timeout_s)
        return Outcome(
            self._session.journal.redacted(bash_result(done, timeout_s)),
            exit_code=done.exit_code,
            timed_out=done.timed_out,
            duration_ms=done.duration_ms,
        )

    def _submit(self) -> Outcome:
        started = time.monotonic()
        checked = self._session.submit()
        self._session.journal.add(
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
        text = PASSED if checked.failed is None else f"Not done yet: {checked.feedback}"
        return Outcome(text, duration_ms=(time.monotonic() - started) * 1000)

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


def has_calls(message: Message) -> bool:
    """Whether an assistant's message calls a tool."""
    calls: list[dict[str, Any]] | None = message.get("tool_calls")
    return bool(calls)
