"""Puts a breakpoint back: conversation and container move together, or neither does.

The order is the invariant (alignment rule 5): a checkpoint of today's state · everything that the restore needs is
staged · intent line · restore · commit line. If the restore fails, today's state is put back and the run stands where
it stood. After a crash in between, the next start finishes what the intent says: a restore can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.checkpointer import Checkpointer
from orchestrator.collected import collected
from orchestrator.errors import ContainerLost, HostError, LogDamaged, UsageError
from orchestrator.events import CheckpointEvent, EngineErrorEvent, RestoreEvent, RewindEvent, RewindIntentEvent
from orchestrator.lineage import find_checkpoint
from orchestrator.live_path import live_path, memories_to_inject, unfinished_intent
from orchestrator.memory import Lesson, rewind_message
from snapshot_drivers.base import Coverage, CoverageState, RestoreReport, Staged, StateKind
from snapshot_drivers.crash_points import reached
from snapshot_drivers.errors import CaptureError, RestoreError, RestoreRefused, SnapshotError


class Rewinder:
    """Moves one run to its breakpoints."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        after_restore: Callable[[], None] = lambda: None,
        previous_container: str | None = None,
    ) -> None:
        """``after_restore`` brings up what belongs to a started container (the task's daemons); it may raise.

        ``previous_container``: the one that the run had; ``None`` if it was gone and has been made again.
        """
        self._checkpointer = checkpointer
        self._journal = checkpointer.journal
        self._driver = checkpointer.driver
        self._after_restore = after_restore
        self._previous_container = previous_container

    def rewind(self, breakpoint_id: int, memory: str) -> RewindEvent:
        """The agent stands at ``breakpoint_id`` again, with its memories as the last message.

        What the snapshot does not hold is said in that message.

        Raises: UsageError: no such breakpoint, or one without a snapshot. LogDamaged: its conversation cannot be read.
            SnapshotError, HostError: it failed, and the run stands where it stood. ContainerLost: it failed, and the
            container is in neither state.
        """
        target = self._restorable(breakpoint_id)
        intent, report = self._move(target, memory, verify="difference", accept_partial=False)
        return self._commit_rewind(target, intent, report)

    def restore(self, breakpoint_id: int, *, verify: str = "difference", accept_partial: bool = False) -> RestoreEvent:
        """Head, conversation and container are at ``breakpoint_id``, moved from outside.

        Raises: RestoreRefused: the snapshot is not complete, and ``accept_partial`` is not given; nothing was touched.
            Otherwise as ``rewind``.
        """
        target = self._restorable(breakpoint_id)
        coverage = self._driver.load(target.after or "").coverage
        if not coverage.complete and not accept_partial:
            raise RestoreRefused(
                f"breakpoint {breakpoint_id} does not hold all of the container's state ({_lost(coverage)}): pass "
                "--accept-partial to restore the rest"
            )
        intent, report = self._move(target, None, verify=verify, accept_partial=accept_partial)
        return self._commit_restore(target, intent, report)

    def reinstate(self, snapshot_id: str) -> RestoreReport:
        """The container is as in that snapshot, whatever it was; no line is written, the run stands where it stood.

        Raises: SnapshotError, HostError: it is not; the same can be tried again.
        """
        report = self._apply(self._stage(snapshot_id), verify="difference")
        _refuse_broken_promise(self._driver.load(snapshot_id).coverage, report.coverage)
        self._bring_up(report)
        return report

    def finish_unfinished(self) -> RewindEvent | RestoreEvent | None:
        """A rewind or restore that a crash cut off has been finished; ``None``: there was none, or it was put back.

        Raises: ContainerLost: the container is in neither state.
        """
        intent = unfinished_intent(self._journal.events)
        if intent is None:
            return None
        try:
            target = self._restorable(intent.breakpoint_id)
            report = self._apply(self._stage(intent.after), verify="difference")
            self._bring_up(report)
        except (UsageError, LogDamaged, SnapshotError, HostError) as error:
            self._put_back(intent, error)
            return None
        if intent.memory is None:
            return self._commit_restore(target, intent, report)
        return self._commit_rewind(target, intent, report)

    def _restorable(self, breakpoint_id: int) -> CheckpointEvent:
        target = find_checkpoint(self._journal.events, breakpoint_id)
        if target.after is None:
            raise UsageError(f"breakpoint {breakpoint_id} has no snapshot ({target.error}): choose another one")
        if when := collected(self._journal.events).get(target.after):
            raise RestoreRefused(
                f"the snapshot of breakpoint {breakpoint_id} was collected by gc ({when}), by the run's retention: "
                "choose a breakpoint that is there (see: orchestrator breakpoints RUN)"
            )
        live_path(self._journal.events, target.seq)  # without its conversation the container must not move either
        return target

    def _move(
        self, target: CheckpointEvent, memory: str | None, *, verify: str, accept_partial: bool
    ) -> tuple[RewindIntentEvent, RestoreReport]:
        """The container is at ``target``; the line that says so is still to be written."""
        guard = self._checkpointer.checkpoint("before_rewind", note=f"before going back to {target.breakpoint_id}")
        if guard.after is None:
            raise CaptureError("today's state could not be captured, so a rewind could not be undone")
        staged = self._stage(target.after)
        intent = self._journal.add(
            RewindIntentEvent(
                **self._journal.place(),
                before=guard.after,
                after=target.after,
                breakpoint_id=target.breakpoint_id,
                memory=memory,
            )
        )
        reached("restore-intent-line")
        try:
            report = self._apply(staged, verify=verify)
            if not accept_partial:
                _refuse_broken_promise(staged.snapshot.coverage, report.coverage)
            self._bring_up(report)
        except (SnapshotError, HostError) as error:
            self._put_back(intent, error)
            raise RestoreError(
                f"going back to breakpoint {target.breakpoint_id} failed: {error}; the container was put back and the "
                "run stands where it stood"
            ) from error
        return intent, report

    def _stage(self, snapshot_id: str | None) -> Staged:
        container = self._checkpointer.container
        return self._driver.stage(container.target(), snapshot_id or "", self._checkpointer.options)

    def _apply(self, staged: Staged, *, verify: str) -> RestoreReport:
        try:
            with self._checkpointer.container.exec_lock:
                report = staged.apply(verify=verify)
        finally:
            staged.discard()
        self._checkpointer.last_snapshot_id = staged.snapshot.snapshot_id
        return report

    def _bring_up(self, report: RestoreReport) -> None:
        """What belongs to a started container runs, unless the processes themselves came back, it among them."""
        kinds = {(item.kind, item.state) for item in report.coverage.items}
        if (StateKind.PROCESS, CoverageState.CAPTURED) not in kinds:
            self._after_restore()

    def _put_back(self, intent: RewindIntentEvent, error: Exception) -> None:
        """The state before the intent is in the container again, and the intent is called off by a note.

        Raises: ContainerLost: that failed too; the intent stays, for the next start.
        """
        try:
            report = self._apply(self._stage(intent.before), verify="difference")
        except (SnapshotError, HostError) as second:
            text = (
                f"going back to breakpoint {intent.breakpoint_id} failed ({error}), and so did putting the container "
                f"back ({second})"
            )
            self._journal.add(EngineErrorEvent(**self._journal.place(), text=text))
            raise ContainerLost(f"{text}: its checkpoints are unhurt, restore one by hand") from second
        text = f"going back to breakpoint {intent.breakpoint_id} failed and was undone: {error}"
        try:
            self._bring_up(report)
        except HostError as late:
            # What is to be put back is the state; a daemon that does not come up must not cost the run as well.
            text += f"; afterwards: {late}"
        self._journal.note(text, after=intent)

    def _commit_rewind(self, target: CheckpointEvent, intent: RewindIntentEvent, report: RestoreReport) -> RewindEvent:
        events = self._journal.events
        memory = intent.memory or ""
        reached("restore-before-commit-line")
        earlier = memories_to_inject(events, live_path(events, target.seq))
        lessons = [Lesson(event.breakpoint_id, event.memory) for event in earlier]
        lessons.append(Lesson(target.breakpoint_id, memory))
        return self._journal.add(
            RewindEvent(
                step=self._journal.place()["step"],
                parent_seq=target.seq,
                before=intent.before,
                after=intent.after,
                messages=[rewind_message(target.breakpoint_id, lessons, report.coverage)],
                breakpoint_id=target.breakpoint_id,
                from_seq=self._journal.head.seq,
                memory=memory,
                restore_ms=report.restore_ms,
                verified=report.verified,
                container_id=self._checkpointer.container.container_id,
            )
        )

    def _commit_restore(
        self, target: CheckpointEvent, intent: RewindIntentEvent, report: RestoreReport
    ) -> RestoreEvent:
        return self._journal.add(
            RestoreEvent(
                step=self._journal.place()["step"],
                parent_seq=target.seq,
                before=intent.before,
                after=intent.after,
                breakpoint_id=target.breakpoint_id,
                from_seq=self._journal.head.seq,
                container=self._checkpointer.container.name,
                previous_container=self._previous_container,
                restore_ms=report.restore_ms,
                verified=report.verified,
                container_id=self._checkpointer.container.container_id,
            )
        )


def _refuse_broken_promise(promised: Coverage, kept: Coverage) -> None:
    """Raises: RestoreError: something that the snapshot holds did not come back."""
    had = {(item.kind, item.path) for item in promised.items if item.state is CoverageState.CAPTURED}
    lost = [
        item
        for item in kept.items
        if (item.kind, item.path) in had and item.state in (CoverageState.MISSING, CoverageState.UNKNOWN)
    ]
    if lost:
        raise RestoreError(f"part of the snapshot did not come back ({_lost(Coverage.of(lost))})")


def _lost(coverage: Coverage) -> str:
    """What is not captured and was not meant to be left out, in words."""
    items = [item for item in coverage.items if item.state in (CoverageState.MISSING, CoverageState.UNKNOWN)]
    named = [f"{item.kind} {item.path}: {item.reason or item.state}" for item in items[:5]]
    return "; ".join([*named, *([f"and {len(items) - 5} more"] if len(items) > 5 else [])])
