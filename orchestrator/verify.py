"""Whether a run is whole, and what of it can still be restored: its files, its log line by line, its snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from orchestrator.aside import check_aside
from orchestrator.collected import collected
from orchestrator.context_log import ContextLog
from orchestrator.errors import LogDamaged, TaskError
from orchestrator.events import (
    CheckpointEvent,
    Event,
    ModelCallEvent,
    RestoreEvent,
    RewindEvent,
    SubmissionEvent,
    ToolCallEvent,
)
from orchestrator.lineage import broken_way, broken_ways, checkpoint_events
from orchestrator.run_dir import RunDir
from orchestrator.task import load_recorded
from snapshot_drivers.base import SnapshotDriver

_STATES = (CheckpointEvent, ModelCallEvent, ToolCallEvent, SubmissionEvent, RewindEvent, RestoreEvent)
"""Events of the live path whose ``after`` is a state of the container."""


class Problem(BaseModel):
    """One thing that is not as it was written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    line: int | None
    """From 1; ``None``: the file as a whole."""
    text: str


class Unrestorable(BaseModel):
    """A breakpoint that cannot be restored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    breakpoint_id: int
    reason: str
    file: str
    line: int | None


class Verification(BaseModel):
    """What ``verify`` answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    whole: bool
    lines: int
    snapshots: int
    """Different snapshots that the log names."""
    content: bool
    """Content objects were hashed again; false: they are there."""
    problems: list[Problem]
    notes: list[Problem]
    """What is no damage: a last line that was cut off in the middle of its write."""
    restorable: list[int]
    partial: list[int]
    """Those of them that need ``--accept-partial``: not all state was captured, as was said then."""
    not_restorable: list[Unrestorable]
    """Damaged ones, and those of which no snapshot could be taken, or was collected (which is no damage)."""


def verify(run: RunDir, log: ContextLog, driver: SnapshotDriver, *, content: bool = False) -> Verification:
    """The run as its files stand; nothing is changed. ``content``: stored content is read and hashed again.

    Raises: OSError: the store cannot be read at all.
    """
    file = str(log.path)
    lines = log.line_of
    gone = collected(log.events)
    names: dict[str, int] = {}
    for event in log.events:
        for snapshot_id in (event.before, event.after):
            if snapshot_id is not None and snapshot_id not in gone:
                names.setdefault(snapshot_id, lines[event.seq])
    bad = {snapshot_id: found for snapshot_id, found in driver.verify(names, content=content).items() if found}
    problems = [*_file_problems(run)]
    problems += [Problem(file=file, line=one.line_number, text=one.reason) for one in log.damage if not one.torn]
    problems += [Problem(file=file, line=line, text=text) for line, text in _line_problems(log)]
    problems += [Problem(file=file, line=line, text=text) for line, text in _aside_problems(run, log, content)]
    for snapshot_id, found in bad.items():
        problems += [Problem(file=file, line=names[snapshot_id], text=f"names {snapshot_id}: {text}") for text in found]
    restorable, partial, not_restorable = _restorable(log, bad, gone)
    return Verification(
        run_id=run.run_id,
        whole=not problems,
        lines=log.lines,
        snapshots=len(names),
        content=content,
        problems=sorted(problems, key=lambda problem: (problem.file != file, problem.line or 0)),
        notes=[Problem(file=file, line=one.line_number, text=one.reason) for one in log.damage if one.torn],
        restorable=restorable,
        partial=partial,
        not_restorable=not_restorable,
    )


def _file_problems(run: RunDir) -> Iterator[Problem]:
    try:
        run.read_record()
    except LogDamaged as error:
        yield Problem(file=str(run.record_path), line=None, text=str(error))
    try:
        load_recorded(run.task_path, source_dir=run.path, environ={})
    except TaskError as error:
        yield Problem(file=str(run.task_path), line=None, text=str(error))


def _aside_problems(run: RunDir, log: ContextLog, content: bool) -> Iterator[tuple[int, str]]:
    """Raw answers that stand in files of their own."""
    for event in log.events:
        raws: list[object] = [one.raw for one in getattr(event, "failed_tries", [])]
        if isinstance(event, ModelCallEvent):
            raws.append(event.response)
        if isinstance(event, ModelCallEvent | ToolCallEvent) and event.call is not None:
            raws += [event.call.input.rest, event.call.outcome]
        for raw in raws:
            try:
                check_aside(run.path, raw, read=content)
            except LogDamaged as error:
                yield log.line_of[event.seq], str(error)


def _line_problems(log: ContextLog) -> Iterator[tuple[int, str]]:
    """What is wrong with lines that can be read: numbers, order, pairs."""
    by_seq = {event.seq: event for event in log.events}
    states: dict[int, Event | None] = {}
    last_breakpoint: dict[int, int] = {}
    missing = 0
    last_seq = -1
    for event in log.events:
        line = log.line_of[event.seq]
        # Numbers count lines, so one beyond its line's own says that lines before it are gone.
        gone = event.seq - (line - 1) - missing
        if gone > 0:
            yield line, f"event {event.seq} cannot be in line {line}: {gone} lines before it are gone"
            missing += gone
        if event.seq < last_seq:
            yield line, f"event {event.seq} stands behind event {last_seq}: the lines are out of order"
        last_seq = max(last_seq, event.seq)
        parent = by_seq.get(event.parent_seq) if event.parent_seq is not None else None
        state = states.get(parent.seq) if parent is not None else None
        states[event.seq] = event if isinstance(event, _STATES) else state
        for text in _pair_problems(event, parent, state):
            yield line, text
        if parent is not None and parent.seq in last_breakpoint:
            last_breakpoint[event.seq] = last_breakpoint[parent.seq]
        if isinstance(event, CheckpointEvent):
            last_breakpoint[event.seq] = event.breakpoint_id
        if (problem := _call_problem(event, last_breakpoint.get(event.seq))) is not None:
            yield line, problem
    yield from _id_problems(log)


def _id_problems(log: ContextLog) -> Iterator[tuple[int, str]]:
    """Breakpoints count up; where lines are lost, their numbers are left out."""
    last: CheckpointEvent | None = None
    for event in checkpoint_events(log.events):
        line = log.line_of[event.seq]
        expected = 0 if last is None else last.breakpoint_id + 1
        start = 0 if last is None else log.line_of[last.seq]
        if event.breakpoint_id < expected:
            yield line, f"breakpoint {event.breakpoint_id} comes after {expected - 1}: numbers are never used again"
        elif event.breakpoint_id - expected > len(_lost_between(log, start, line)):
            yield line, f"breakpoint {event.breakpoint_id} follows breakpoint {expected - 1}: lines in between are gone"
        if last is None or event.breakpoint_id > last.breakpoint_id:
            last = event


def _pair_problems(event: Event, parent: Event | None, state: Event | None) -> Iterator[str]:
    """Alignment rules 1 to 3, as far as what they need can be read. ``state``: what last told the container's."""
    if isinstance(event, CheckpointEvent | ModelCallEvent | SubmissionEvent) and event.before != event.after:
        yield f"{event.kind}: the snapshots before and after it differ ({event.before}, {event.after})"
    if parent is None:
        return
    if (
        isinstance(event, ModelCallEvent)
        and event.call is None
        and not (isinstance(parent, CheckpointEvent) and parent.breakpoint_id == event.breakpoint_id)
    ):
        yield f"the answer at breakpoint {event.breakpoint_id} does not follow its checkpoint but event {parent.seq}"
    if isinstance(event, RewindEvent | RestoreEvent):
        if not isinstance(parent, CheckpointEvent) or parent.breakpoint_id != event.breakpoint_id:
            yield f"the {event.kind} to breakpoint {event.breakpoint_id} continues event {parent.seq}, which is not it"
        elif event.after != parent.after:
            yield f"the {event.kind} put {event.after} into the container, its breakpoint has {parent.after}"
    if state is None or not isinstance(event, ModelCallEvent | ToolCallEvent | SubmissionEvent):
        return
    if None not in (state.after, event.before) and state.after != event.before:
        yield f"{event.kind}: it begins at {event.before}, but event {state.seq} before it ended at {state.after}"


def _call_problem(event: Event, last_breakpoint: int | None) -> str | None:
    """Of a recorded agent, whose calls may overlap: an answer is of the last checkpoint on its path, or of none."""
    if not isinstance(event, ModelCallEvent) or event.call is None or event.call.incomplete:
        return None
    if last_breakpoint is None or event.breakpoint_id == last_breakpoint:
        return None
    return f"the answer to call {event.call.number} names breakpoint {event.breakpoint_id}, not {last_breakpoint}"


def _restorable(
    log: ContextLog, bad: dict[str, list[str]], gone: dict[str, str]
) -> tuple[list[int], list[int], list[Unrestorable]]:
    """Breakpoints that can be restored, those of them in part only, and those that cannot."""
    found = checkpoint_events(log.events)
    broken = broken_ways(log.events)
    uses = Counter(event.breakpoint_id for event in found)
    restorable: list[int] = []
    partial: list[int] = []
    lost = list(_lost_breakpoints(log))
    for event in found:
        line = log.line_of[event.seq]
        reason = broken_way(broken.get(event.seq))
        if reason is not None:
            line = log.line_of[broken[event.seq].seq]
        elif uses[event.breakpoint_id] > 1:
            reason = "its number was used more than once"
        elif event.after is None:
            reason = f"no snapshot was taken: {event.error}"
        elif event.after in gone:
            reason = f"its snapshot was collected by gc ({gone[event.after]})"
        elif event.after in bad:
            reason = f"{event.after}: {bad[event.after][0]}"
        if reason is not None:
            lost.append((event.breakpoint_id, reason, line))
            continue
        restorable.append(event.breakpoint_id)
        if not event.coverage.complete:
            partial.append(event.breakpoint_id)
    return (
        restorable,
        partial,
        [
            Unrestorable(breakpoint_id=number, reason=reason, file=str(log.path), line=line)
            for number, reason, line in sorted(lost)
        ],
    )


def _lost_breakpoints(log: ContextLog) -> Iterator[tuple[int, str, int]]:
    """Numbers that no readable line has, with the damaged line that may have had each."""
    before, start = -1, 0
    for event in checkpoint_events(log.events):
        line = log.line_of[event.seq]
        numbers = range(before + 1, event.breakpoint_id)
        lines = _lost_between(log, start, line)
        for position, number in enumerate(numbers):
            at = lines[min(position, len(lines) - 1)] if lines else line
            yield number, "no line that can be read is this breakpoint's", at
        if event.breakpoint_id > before:
            before, start = event.breakpoint_id, line


def _lost_between(log: ContextLog, start: int, end: int) -> list[int]:
    return [one.line_number for one in log.damage if one.lost and start < one.line_number < end]
