"""The run: take a breakpoint, ask the model, do what it says; until the work is done or a limit is reached."""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict

from orchestrator.agent_messages import CUT_NUDGE, EMPTY_ANSWER, NUDGE
from orchestrator.checkpointer import Pending
from orchestrator.ending import Ending, ending
from orchestrator.errors import ContainerLost, HostError, ModelError
from orchestrator.events import CheckpointEvent, EndEvent, EngineErrorEvent, Message, ModelCallEvent, Progress
from orchestrator.model import Completion, Model
from orchestrator.observer import Observer
from orchestrator.session import Session
from orchestrator.step import Step, has_calls
from orchestrator.tools import schemas
from orchestrator.totals import totals
from snapshot_drivers.errors import SnapshotError


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


def run(session: Session, model: Model, observer: Observer) -> RunResult:
    """The run has ended, its last line says how, and its container is gone unless it is to be kept.

    Whatever the agent, the model or the engine does ends in a result. Interrupted, the container stays.

    Raises: HostError: the log cannot be written, or the container cannot be removed.
    """
    runner = Runner(session, model, observer)
    try:
        end = runner.drive()
    except KeyboardInterrupt:
        end = Ending("interrupted", "user", "interrupted; the container was left as it is", keep=True)
    except ModelError as error:
        end = Ending("failed", "model_error", str(error))
    except ContainerLost as error:
        end = Ending("failed", "engine_error", str(error), keep=True)
    except (HostError, SnapshotError) as error:
        runner.record_failure(error)
        end = Ending("failed", "engine_error", str(error))
    return finish(session, end)


def hold(session: Session) -> RunResult:
    """A manual run stands at breakpoint 0 and waits: nobody drives it, and its container runs.

    Raises: HostError, SnapshotError: breakpoint 0 could not be taken.
    """
    session.checkpointer.checkpoint("manual", note="launched")
    return _result(session, "running", None, removed=False)


def finish(session: Session, end: Ending) -> RunResult:
    """The end stands in the log, and the container is gone unless it is to be kept."""
    session.journal.add(EndEvent(**session.journal.place(), status=end.status, reason=end.reason, text=end.text))
    removed = not (session.keep or end.keep)
    if removed:
        session.remove_container()
    return _result(session, end.status, end.reason, removed=removed)


class Runner:
    """Drives one session with one model."""

    def __init__(self, session: Session, model: Model, observer: Observer) -> None:
        self._session = session
        self._journal = session.journal
        self._model = model
        self._observer = observer
        self._tools = schemas(session.spec.strategy)
        self._dropped: Completion | None = None

    def drive(self) -> Ending:
        """The loop; answers how the run ended.

        Raises: ModelError, HostError, SnapshotError, KeyboardInterrupt: it cannot go on.
        """
        pending: Pending | None = None
        while (end := self._ending()) is None:
            conversation = self._journal.conversation() + ([pending.message] if pending else [])
            with self._session.checkpointer.begin(pending) as breakpoint_taken:
                answer = self._ask(conversation)
                breakpoint_taken.answered()
                checkpoint = breakpoint_taken.committed()
            message = self._record(answer, checkpoint)
            step = Step(self._session, before=checkpoint.after, is_over=lambda: self._ending() is not None)
            pending = step.take(message, answer.finish_reason)
        return self._last_breakpoint(pending, end)

    def record_failure(self, error: Exception) -> None:
        """The engine's failure stands in the log, with the cost of an answer that was dropped for it."""
        cost_usd = self._dropped.cost_usd if self._dropped else None
        self._journal.add(EngineErrorEvent(**self._journal.place(), text=str(error), cost_usd=cost_usd))

    def _ask(self, conversation: list[Message]) -> Completion:
        self._observer.thinking(totals(self._journal.events).steps + 1)
        self._dropped = self._model.complete(conversation, self._tools)
        return self._dropped

    def _record(self, answer: Completion, checkpoint: CheckpointEvent) -> Message:
        """The answer's line, and the nudge's where it called no tool; the message as it stands in the conversation."""
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
                response=answer.response,
                finish_reason=answer.finish_reason,
                usage=answer.usage,
                cost_usd=answer.cost_usd,
                latency_ms=answer.latency_ms,
                attempts=answer.attempts,
            )
        )
        self._dropped = None
        if not has_calls(message):
            nudge = CUT_NUDGE if answer.finish_reason == "length" else NUDGE
            self._journal.note("the answer called no tool", say=[{"role": "user", "content": nudge}])
        return written.messages[0]

    def _ending(self) -> Ending | None:
        limits = self._session.spec.limits
        return ending(self._journal.events, self._journal.path(), limits, datetime.now(UTC))

    def _last_breakpoint(self, pending: Pending | None, end: Ending) -> Ending:
        """``end``, with the container's last state in a checkpoint; where that fails, the container is kept."""
        try:
            with self._session.checkpointer.begin(pending, note=f"the end: {end.status}") as breakpoint_taken:
                breakpoint_taken.committed()
        except (HostError, SnapshotError) as error:
            self.record_failure(error)
            text = f"{end.text}; the last state could not be captured, so the container was kept ({error})"
            return end._replace(text=text, keep=True)
        return end


def _result(session: Session, status: str, reason: str | None, *, removed: bool) -> RunResult:
    used = totals(session.journal.events)
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
