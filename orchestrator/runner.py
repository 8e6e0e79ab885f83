"""The run: take a breakpoint, ask the model, do what it says; until the work is done or a limit is reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict

from orchestrator.agent_messages import EMPTY_ANSWER, nudge
from orchestrator.aside import put_aside
from orchestrator.checkpointer import Pending
from orchestrator.desk import LIMIT_TIME, STOPPED, Desk
from orchestrator.ending import Ending, ending, time_left_s
from orchestrator.errors import ContainerLost, HostError, ModelError
from orchestrator.events import (
    CheckpointEvent,
    EndEvent,
    EngineErrorEvent,
    FailedTry,
    Message,
    ModelCallEvent,
    ModelFailureEvent,
    ModelStartEvent,
    NoteEvent,
    Progress,
)
from orchestrator.launcher import CutShort
from orchestrator.model import Completion, Model
from orchestrator.model_errors import NoAnswer
from orchestrator.model_request import ModelRequest
from orchestrator.observer import Observer
from orchestrator.resume import TakenUp
from orchestrator.session import Session
from orchestrator.step import Step, has_calls
from orchestrator.tools import schemas
from snapshot_drivers.crash_points import reached
from snapshot_drivers.errors import SnapshotError

_Begin = Callable[[], TakenUp | None]


class RunResult(BaseModel):
    """What ``launch`` answers."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    run_id: str
    status: str
    reason: str | None
    container: str | None
    """``None``: it has been removed."""
    breakpoints: int
    rewinds: int
    progress: Progress | None
    """Of the last submission."""
    duration_s: float
    cost_usd: float | None
    """Sum of the known costs; ``None`` where no call's cost is known."""


def run(
    session: Session, model: Model, observer: Observer, desk: Desk | None = None, begin: _Begin = TakenUp
) -> RunResult:
    """The run has ended, its last line says how, and its container is gone unless it is to be kept.

    Whatever the agent, the model or the engine does ends in a result. Interrupted, the container stays. ``desk``: where
    the operator's wishes lie. ``begin`` sets the container up, or puts it where a run that was taken up goes on.

    Raises: HostError: the log cannot be written, or the container cannot be removed. Otherwise as ``begin``.
    """
    desk = desk or Desk()
    try:
        start = _begun(session, desk, begin)
        if isinstance(start, RunResult):
            desk.result = start
        else:
            desk.result = _driven(session, Runner(session, model, observer, desk), start)
        return desk.result
    finally:
        desk.close()


def hold(session: Session, desk: Desk) -> RunResult:
    """A new manual run stands at breakpoint 0 and waits: nobody drives it, and its container runs.

    Raises: TaskError, HostError, SnapshotError: it could not be set up, or breakpoint 0 not be taken.
    """
    try:
        start = _begun(session, desk, session.begin)
        if isinstance(start, RunResult):
            desk.result = start
            return start
        session.checkpointer.checkpoint("manual", note="launched")
        return _result(session, "running", None, removed=False)
    finally:
        desk.close()


def _begun(session: Session, desk: Desk, begin: _Begin) -> TakenUp | RunResult:
    """Where the run goes on, or how it ended since it was stopped meanwhile; resumed, such a run begins anew."""
    session.cut = desk.cut
    desk.do("the container is being set up")
    try:
        return begin() or TakenUp()
    except CutShort:
        return finish(session, _STOP)


def _driven(session: Session, runner: Runner, start: TakenUp) -> RunResult:
    try:
        end = runner.drive(start)
    except KeyboardInterrupt:
        end = Ending("interrupted", "user", "interrupted; the container was left as it is", keep=True)
    except NoAnswer as error:
        runner.record_no_answer(error)
        end = Ending("failed", "model_error", str(error))
    except ModelError as error:
        end = Ending("failed", "model_error", str(error))
    except ContainerLost as error:
        end = Ending("failed", "engine_error", str(error), keep=True)
    except (HostError, SnapshotError) as error:
        runner.record_failure(error)
        end = Ending("failed", "engine_error", str(error))
    runner.tell_of_unanswered(wait_s=0.0 if end.status in ("stopped", "interrupted") else _LATE_S)
    return finish(session, end)


def stop(session: Session) -> RunResult:
    """A run that nobody drives has ended as its operator wants; its last state is in a checkpoint, if it can be had.

    Raises: HostError: the log cannot be written, or the container cannot be removed.
    """
    return finish(session, last_breakpoint(session, None, _STOP))


_LATE_S = 3.0
"""How long the end of a run waits for answers that it has dropped: they cost something, too."""
_STOP = Ending("stopped", "user", "the operator stopped the run")


def finish(session: Session, end: Ending) -> RunResult:
    """The end stands in the log, and the container is gone unless it is to be kept."""
    session.journal.add(EndEvent(**session.journal.place(), status=end.status, reason=end.reason, text=end.text))
    removed = not (session.keep or end.keep)
    if removed:
        session.remove_container()
    return _result(session, end.status, end.reason, removed=removed)


class Runner:
    """Drives one session with one model."""

    def __init__(self, session: Session, model: Model, observer: Observer, desk: Desk) -> None:
        self._session = session
        self._journal = session.journal
        self._model = model
        self._observer = observer
        self._tools = schemas(session.spec.strategy)
        self._desk = desk
        self._unanswered: list[ModelRequest] = []

    def drive(self, start: TakenUp) -> Ending:
        """The loop, from ``start`` on; answers how the run ended.

        Raises: ModelError, HostError, SnapshotError, KeyboardInterrupt: it cannot go on.
        """
        at_breakpoint = start.at_breakpoint
        self._look_at_the_clock()
        pending = self._rest_of_step(start)
        while True:
            pending = self._serve_between_steps(pending)
            at_breakpoint = at_breakpoint and isinstance(self._journal.head, CheckpointEvent)
            if (end := self._ending()) is not None:
                return end if at_breakpoint else last_breakpoint(self._session, pending, end)
            conversation = self._journal.conversation() + ([pending.message] if pending else [])
            self._journal.mark(ModelStartEvent(**self._journal.place()))
            request = self._ask(conversation) if at_breakpoint else self._ask_at_new_breakpoint(conversation, pending)
            pending, at_breakpoint = None, False
            answer = self._answer(request)
            if answer is None:
                continue
            reached("after-model-call")
            checkpoint = self._breakpoint()
            written = self._record(answer, checkpoint)
            self._unanswered.remove(request)
            pending = self._step(checkpoint.after).take(written)

    def record_failure(self, error: Exception) -> None:
        """The engine's failure stands in the log, with the cost of an answer that was dropped for it."""
        costs = [answer.cost_usd for answer in self._late_answers() if answer.cost_usd is not None]
        cost_usd = sum(costs) if costs else None
        self._journal.add(EngineErrorEvent(**self._journal.place(), text=str(error), cost_usd=cost_usd))

    def record_no_answer(self, error: NoAnswer) -> None:
        """The request that stayed without an answer stands in the log, with what came of each try."""
        place = self._journal.place()
        self._journal.add(
            ModelFailureEvent(
                **place,
                breakpoint_id=max(
                    (event.breakpoint_id for event in self._journal.path() if isinstance(event, CheckpointEvent)),
                    default=None,
                ),
                model=self._model.name,
                parameters=error.parameters,
                request_digest=error.request_digest,
                text=str(error),
                attempts=len(error.tries) + self._journal.requests_lost_now(),
                failed_tries=self._tries(error.tries),
            )
        )

    def tell_of_unanswered(self, wait_s: float) -> None:
        """The log knows of the answers that came after their path had been left, and of those that did not come."""
        deadline = time.monotonic() + wait_s
        for request in self._unanswered:
            request.wait(max(0.0, deadline - time.monotonic()))
        self._count_late_answers()
        for _ in self._unanswered:
            self._journal.note("a model request was under way: its answer is dropped, and its cost is not known")
        self._unanswered.clear()

    def _rest_of_step(self, start: TakenUp) -> Pending | None:
        """The calls of a step that was cut off have run, as after ``Step.take``."""
        if start.step is None:
            return None
        path = reversed(self._journal.path())
        step = self._step(next(event.after for event in path if not isinstance(event, NoteEvent)))
        answer, answered, submission = start.step
        return step.take(answer, answered=answered, submission=submission, news=start.news)

    def _step(self, before: str | None) -> Step:
        return Step(self._session, self._desk, before=before, is_over=lambda: self._ending() is not None)

    def _serve_between_steps(self, pending: Pending | None) -> Pending | None:
        """What the operator wants has been done; the call whose line is still to be written, if there is one."""
        self._look_at_the_clock()
        self._count_late_answers()
        if self._desk.waiting() and not self._desk.stop_wanted:
            if pending is not None:
                self._session.checkpointer.settle(pending)
            self._desk.serve(self._session)
            return None
        return pending

    def _look_at_the_clock(self) -> None:
        left_s = time_left_s(
            self._journal.events, self._session.spec.limits, self._journal.now(), self._journal.totals()
        )
        self._desk.deadline = None if left_s is None else time.monotonic() + left_s

    def _ask_at_new_breakpoint(self, conversation: list[Message], pending: Pending | None) -> ModelRequest:
        """The request is under way, or ended, and its breakpoint is committed."""
        with self._session.checkpointer.begin(pending) as breakpoint_taken:
            request = self._ask(conversation)
            self._desk.wait_for(lambda: request.ended)
            if request.ended:
                request.answer()
                breakpoint_taken.answered()
            breakpoint_taken.committed()
        return request

    def _ask(self, conversation: list[Message]) -> ModelRequest:
        step = self._journal.totals().steps + 1
        self._observer.thinking(step)
        self._desk.do(f"step {step}: the model is thinking")
        reached("before-model-call")
        request = ModelRequest(
            lambda dropped: self._model.complete(conversation, self._tools, dropped=dropped), self._desk.tell
        )
        self._unanswered.append(request)
        return request

    def _answer(self, request: ModelRequest) -> Completion | None:
        """The model's answer; ``None``: the run goes on from somewhere else, or not at all, and it is dropped.

        The operator is served while the model is thinking. Call it when the breakpoint is committed.
        """
        while self._desk.waiting() or not request.ended:
            if self._desk.serve(self._session) or self._ending() is not None:
                request.drop()
                return None
            self._desk.wait_for(lambda: request.ended)
        return request.answer()

    def _count_late_answers(self) -> None:
        for answer in self._late_answers():
            text = "the run had left the path for which the model was asked: its answer was dropped"
            self._journal.add(EngineErrorEvent(**self._journal.place(), text=text, cost_usd=answer.cost_usd))

    def _late_answers(self) -> list[Completion]:
        """The answers that came and are not in the log; each is given out once."""
        ended = [request for request in self._unanswered if request.ended]
        self._unanswered = [request for request in self._unanswered if request not in ended]
        return [answer for request in ended if (answer := request.late_answer()) is not None]

    def _breakpoint(self) -> CheckpointEvent:
        """Where the run stands: the breakpoint of the answered request, or a newer one that the operator took."""
        return next(event for event in self._journal.way_back() if isinstance(event, CheckpointEvent))

    def _record(self, answer: Completion, checkpoint: CheckpointEvent) -> ModelCallEvent:
        """The answer's line, followed by the nudge's where it called no tool."""
        message = answer.message
        if not has_calls(message) and not message.get("content"):
            message = {**message, "content": EMPTY_ANSWER}
        place = self._journal.place()
        written = self._journal.add(
            ModelCallEvent(
                step=place["step"] + 1,
                parent_seq=place["parent_seq"],
                before=checkpoint.after,
                after=checkpoint.after,
                messages=[message],
                breakpoint_id=checkpoint.breakpoint_id,
                model=self._model.name,
                parameters=answer.parameters,
                request_digest=answer.request_digest,
                request_messages=answer.request_messages,
                response=self._aside(answer.response),
                finish_reason=answer.finish_reason,
                usage=answer.usage,
                cost_usd=answer.cost_usd,
                latency_ms=answer.latency_ms,
                attempts=answer.attempts + self._journal.requests_lost_now(),
                failed_tries=self._tries(answer.failed_tries),
            )
        )
        if not has_calls(message):
            self._journal.note("the answer called no tool", say=[nudge(answer.finish_reason, message)])
        return written

    def _aside(self, raw: Any) -> Any:
        """What stands for a raw answer in its event."""
        return put_aside(self._session.log.path.parent, raw, self._journal.redacted)

    def _tries(self, tries: list[FailedTry]) -> list[FailedTry]:
        return [one.model_copy(update={"raw": self._aside(one.raw)}) for one in tries]

    def _ending(self) -> Ending | None:
        limits = self._session.spec.limits
        found = ending(self._journal.events, self._journal.path(), limits, self._journal.now(), self._journal.totals())
        if found is None and (reason := self._desk.cut()) is not None:
            return _STOP if reason == STOPPED else Ending("failed", LIMIT_TIME, "the wall time is used up")
        return found


def last_breakpoint(session: Session, pending: Pending | None, end: Ending) -> Ending:
    """``end``, with the container's last state in a checkpoint; where that fails, the container is kept."""
    try:
        with session.checkpointer.begin(pending, note=f"the end: {end.status}") as breakpoint_taken:
            breakpoint_taken.committed()
    except (HostError, SnapshotError) as error:
        session.journal.add(EngineErrorEvent(**session.journal.place(), text=str(error)))
        text = f"{end.text}; the last state could not be captured, so the container was kept ({error})"
        return end._replace(text=text, keep=True)
    return end


def _result(session: Session, status: str, reason: str | None, *, removed: bool) -> RunResult:
    used = session.journal.totals()
    unknown = used.cost_unknown and used.cost_unknown == used.steps
    return RunResult(
        run_id=session.run_id,
        status=status,
        reason=reason,
        container=None if removed else session.container.name,
        breakpoints=used.checkpoints,
        rewinds=used.rewinds,
        progress=used.progress,
        duration_s=used.duration_s,
        cost_usd=None if unknown else used.cost_usd,
    )
