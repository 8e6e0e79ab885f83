"""Takes a run up in another process: its head is read from the log, and the container is put where the head says.

Whatever the process before did after the last line of the log is undone with it: a snapshot that no line names is
garbage, a tool call without a line runs again from the state before it. Nothing here depends on how far an earlier try
to resume came, so it may be cut off and repeated as often as one likes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from orchestrator.agent_messages import nudge
from orchestrator.ending import limits_now
from orchestrator.events import ResumeEvent
from orchestrator.memory import restart_text
from orchestrator.resume_point import RESTARTED, OpenStep, ResumePoint, last_container_id, resume_point
from orchestrator.session import Session
from snapshot_drivers.crash_points import reached
from snapshot_drivers.errors import RestoreRefused


class TakenUp(NamedTuple):
    """What is left to do before the run goes on as ever; by default nothing, as for a new run."""

    at_breakpoint: bool = False
    """Its last checkpoint is the breakpoint of the next request."""
    step: OpenStep | None = None
    """Its remaining calls run first."""
    news: str | None = None
    """What the first of them tells the agent beside its result."""


def take_up(session: Session, raised: Mapping[str, int | float]) -> TakenUp:
    """Conversation and container are at the run's head; ``raised``: limits, by name, for the rest of the run.

    Raises: as ``put_at_head``.
    """
    point = put_at_head(session, raised)
    return TakenUp() if point is None else _told(session, point)


def put_at_head(session: Session, raised: Mapping[str, int | float]) -> ResumePoint | None:
    """The container is where the run's head is; ``None``: it was set up anew, since nothing had been done in it.

    ``session`` was opened with ``resume``. A rewind or restore that was cut off has been finished.

    Raises: RestoreRefused: the state at the head was not captured. TaskError: the set-up, run again, failed.
        CutShort: the run has to end during the set-up. ContainerLost, LogDamaged, SnapshotError, HostError: it can be
        tried again.
    """
    journal = session.journal
    point = resume_point(journal.events)
    if not journal.events and not session.log.damage:
        session.begin()
        return None
    journal.add(
        ResumeEvent(
            **journal.place(),
            before=point.snapshot_id,
            after=point.snapshot_id,
            container=session.container.name,
            container_id=session.container.container_id,
            previous_container_id=last_container_id(journal.events),
            limits=dict(raised),
        )
    )
    reached("after-resume-line")
    session.limit(limits_now(session.spec.limits, journal.events))
    if point.before_first_step:
        session.set_up()
        return None
    session.observer.status("putting the container where the run stands")
    finished = session.rewinder.finish_unfinished()
    point = resume_point(journal.events)
    if point.snapshot_id is None:
        raise RestoreRefused(
            f"the container's state at the end of run {session.run_id} was not captured: go back to a breakpoint "
            f"(orchestrator restore {session.run_id} BREAKPOINT), then resume"
        )
    if finished is None:
        session.rewinder.reinstate(point.snapshot_id)
    return point


def news_of_restart(session: Session, point: ResumePoint) -> str | None:
    """What the agent must be told of its container's restart; ``None``: it lost nothing, or knows."""
    if point.programs_told or point.snapshot_id is None:
        return None
    return restart_text(session.driver.load(point.snapshot_id).coverage)


def _told(session: Session, point: ResumePoint) -> TakenUp:
    """The conversation says what the agent lost; inside a step its next result does: no message may come before it."""
    journal, step = session.journal, point.step
    if step is not None and not step.answer.messages[0].get("tool_calls"):
        journal.note("the answer called no tool", say=[nudge(step.answer.finish_reason, step.answer.messages[0])])
        step = None
    text = news_of_restart(session, point)
    if text is None or step is not None:
        return TakenUp(point.at_breakpoint, step, text)
    journal.note(RESTARTED, say=[{"role": "user", "content": text}])
    return TakenUp()
