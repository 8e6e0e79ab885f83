"""A run whose loop is somebody else's: opened around a harness, driven, taken back, and ended.

::

    with recorded_run("task.yaml") as run:
        run.drive(my_agent)

A rewind leaves the harness and calls it again from its beginning; every call up to the breakpoint is answered from the
log, so it comes back to where it was, and goes on with the memory in its conversation.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from orchestrator.candidates import candidates, is_candidate
from orchestrator.desk import Desk
from orchestrator.ending import Ending
from orchestrator.errors import ContainerLost, Divergence, HostError, OrchestratorError, UsageError
from orchestrator.events import SubmissionEvent
from orchestrator.launcher import CutShort, ExecResult
from orchestrator.recording.call_log import last_state
from orchestrator.recording.current_execution import current_execution, executing
from orchestrator.recording.execution import Execution
from orchestrator.recording.leaving import LeaveHarness, RecorderFailed, Rewound, RunOver, StateUnfit
from orchestrator.recording.own_states import Kept
from orchestrator.runner import RunResult, finish, last_breakpoint
from orchestrator.session import Session
from orchestrator.tools import bash_result, candidates_result
from snapshot_drivers.errors import SnapshotError

R = TypeVar("R")

_LOG = logging.getLogger("orchestrator")

PASSED = "All checks passed: the task is done."


class RunEnded(OrchestratorError):
    """A limit is reached, or the operator stopped the run: the harness was left. The run's result says more."""

    exit_code = 1


class RecordedRun:
    """An open run. Made by ``recorded_run`` and ``resumed_run``."""

    def __init__(self, session: Session, desk: Desk, *, news: str | None = None) -> None:
        """``news``: what the agent is told with its next new request."""
        self.session = session
        self.result: RunResult | None = None
        """How the run ended, once its block has."""
        self._desk = desk
        self._news = news
        self._lock = threading.RLock()
        self._end: Ending | None = None
        self._execution: Execution | None = None
        self._kept: dict[int, Kept] = {}

    @property
    def run_id(self) -> str:
        """For the command line: ``orchestrator breakpoints RUN_ID``."""
        return self.session.run_id

    @property
    def instruction(self) -> str:
        """What the task asks the agent to do."""
        return self.session.spec.instruction or ""

    @property
    def execution(self) -> Execution | None:
        """The last pass of the harness; ``None``: it has not been called."""
        return self._execution

    def drive(self, harness: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """What ``harness`` returns; it has been called again after each rewind.

        Raises: Divergence: it did not repeat itself. RunEnded: a limit, or the operator. OrchestratorError,
            SnapshotError: the run cannot go on. Otherwise what the harness raises.
        """
        while True:
            execution = self._next()
            try:
                with executing(execution), execution.running():
                    result = harness(*args, **kwargs)
                self._returned(execution)
                return result
            except LeaveHarness as reason:
                self._left(reason)

    async def drive_async(self, harness: Callable[..., Awaitable[R]], *args: Any, **kwargs: Any) -> R:
        """As ``drive``, for a coroutine function."""
        while True:
            execution = self._next()
            try:
                with executing(execution), execution.running():
                    result = await harness(*args, **kwargs)
                self._returned(execution)
                return result
            except LeaveHarness as reason:
                self._left(reason)

    def exec(self, command: str | Sequence[str], *, timeout_s: float | None = None) -> ExecResult:
        """A command has run in the run's container (a text: for the shell), as the task's user.

        Raises: LeaveHarness: the caller's path has been left, or the engine failed, which is no tool's result.
            EngineError: it failed outside of the harness.
        """
        execution = current_execution()
        if execution is None:
            return self.session.exec(command, timeout_s=timeout_s)
        execution.check()
        try:
            done = self.session.exec(command, timeout_s=timeout_s)
        except (SnapshotError, HostError) as error:
            execution.leave(RecorderFailed(error))
        execution.check()
        return done

    def bash(self, command: str, timeout_s: float | None = None) -> str:
        """Run a shell command in the container. The answer holds its output (stdout and stderr) and its exit code."""
        limit_s = self.session.spec.limits.tool_timeout_s
        return bash_result(self.exec(command, timeout_s=timeout_s), min(timeout_s or limit_s, limit_s))

    def submit(self) -> str:
        """Hand in the work for checking. The answer says that the task is done, or what is missing first."""
        with self._lock:
            if (execution := current_execution()) is not None:
                execution.settle()
            return self._submit()

    def backtrack_candidates(self) -> str:
        """List the breakpoints to which the conversation and the whole container can be rewound, newest first."""
        with self._lock:
            return candidates_result(candidates(self.session.journal.events, self.session.is_stored))

    def backtrack_commit(self, breakpoint_id: int, memory_summary: str) -> str:
        """Rewind the conversation and the whole container to a breakpoint: everything done since is undone.

        Only the memory is carried over: what was tried, why it failed, and what to do instead.

        Raises: Rewound: the run stands there. The answer is an error, in words.
        """
        execution = current_execution()
        if execution is None:
            raise UsageError("backtrack_commit leaves a harness: call it inside run.drive(…)")
        if not memory_summary.strip():
            return "error: memory_summary is empty: say what was tried, why it failed, and what to do instead"
        path = self.session.journal.path()
        if not any(is_candidate(event) and event.breakpoint_id == breakpoint_id for event in path):
            return f"error: {breakpoint_id} is no breakpoint to go back to: choose one of backtrack_candidates"
        try:
            execution.rewind(breakpoint_id, memory_summary)
        except ContainerLost as lost:
            execution.leave(RecorderFailed(lost))
        except (UsageError, SnapshotError, HostError) as error:
            return f"error: not rewound: {error}"

    def _submit(self) -> str:
        session = self.session
        try:
            checked = session.submit()
        except CutShort as cut:
            return f"cut short: {cut.reason}"
        place = session.journal.place()
        state = last_state(session.journal)
        session.journal.add(
            SubmissionEvent(
                **place,
                before=state,
                after=state,
                progress=checked.progress,
                failed=checked.failed,
                feedback=checked.feedback,
                duration_ms=checked.duration_ms,
            )
        )
        return PASSED if checked.failed is None else f"Not done yet: {checked.feedback}"

    def _next(self) -> Execution:
        """A new pass, from where the run stands."""
        with self._lock:
            if self._execution is not None:
                self._execution.close(Rewound("another pass of the harness has begun"))
            # Once: what a rewind says of the container holds for the passes after it.
            news, self._news = self._news, None
            self._execution = Execution(self.session, self._desk, self._lock, self._kept, news=news)
        return self._execution

    def _returned(self, execution: Execution) -> None:
        """The harness has ended by itself. Raises: LeaveHarness: it had been left, and swallowed that."""
        returned = LeaveHarness("the harness has returned")
        execution.close(returned)
        if execution.over is not None and execution.over is not returned:
            raise execution.over
        if (missing := execution.not_repeated()) is not None:
            text = f"the harness returned before it had repeated itself: {missing} was not made"
            raise RecorderFailed(Divergence(text))

    def _left(self, reason: LeaveHarness) -> None:
        """The harness is called again. Raises: what ends the run instead."""
        if isinstance(reason, StateUnfit):
            _LOG.warning("the harness's own state is not used, it repeats itself instead: %s", reason)
        if isinstance(reason, Rewound | StateUnfit):
            return
        if isinstance(reason, RunOver):
            self._end = reason.end
            raise RunEnded(reason.end.text) from reason
        if isinstance(reason, RecorderFailed):
            raise reason.error from reason
        raise reason

    def close(self, error: BaseException | None) -> None:
        """The run has ended as its harness did, and its last line says how."""
        if self._execution is not None:
            self._execution.close(LeaveHarness("the run's block has ended"))
        end = self._end or self._ending(error)
        if end.status != "interrupted":
            end = last_breakpoint(self.session, None, end)
        self.result = self._desk.result = finish(self.session, end)

    def _ending(self, error: BaseException | None) -> Ending:
        if isinstance(error, KeyboardInterrupt | LeaveHarness):
            return Ending("interrupted", "user", "interrupted; the container was left as it is", keep=True)
        if isinstance(error, ContainerLost | HostError | SnapshotError):
            return Ending("failed", "engine_error", str(error), keep=True)
        if error is not None:
            return Ending("failed", None, f"{type(error).__name__}: {error}")
        if not self.session.spec.checklist:
            return Ending("succeeded", None, "the harness has returned")
        submissions = [event for event in self.session.journal.path() if isinstance(event, SubmissionEvent)]
        if not any(event.failed is None for event in submissions):
            self._submit()
            submissions = [event for event in self.session.journal.path() if isinstance(event, SubmissionEvent)]
        if any(event.failed is None for event in submissions):
            return Ending("succeeded", "checklist", "every criterion of the checklist is satisfied")
        if self._desk.cut() is not None or not submissions:
            return Ending("stopped", "user", "the operator stopped the run during its checks")
        return Ending("failed", "checklist", f"the harness has returned, and {submissions[-1].failed} does not hold")
