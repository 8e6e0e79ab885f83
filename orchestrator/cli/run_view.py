"""A run as a reader sees it: directory, log, lock; no engine is asked and nothing is changed."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from orchestrator.cli.answer import warn
from orchestrator.context_log import ContextLog, Damage
from orchestrator.data_dir import DataDir
from orchestrator.errors import HostError, LogDamaged, TaskError
from orchestrator.events import EndEvent, EngineErrorEvent, Event, Progress, RunEvent
from orchestrator.lineage import BreakpointRow, checkpoints, status, totals, unfinished_intent
from orchestrator.run_dir import RunDir
from snapshot_drivers.errors import UnsupportedHost


class RunSummary(BaseModel):
    """One run as ``runs --json`` lists it and ``show --json`` begins."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    task: str | None
    status: str
    reason: str | None
    created_at: str
    driver: str | None
    container: str | None
    """Its name; whether it still exists only the engine knows."""
    breakpoints: int
    rewinds: int
    steps: int
    progress: Progress | None
    duration_s: float
    cost_usd: float | None
    """Sum of the known costs; ``None``: none is known."""
    cost_unknown: int
    error: str | None = None
    """Why the run cannot be read."""


@dataclass(frozen=True)
class RunView:
    """A run's directory and what its log holds."""

    run: RunDir
    events: list[Event]
    damage: list[Damage]
    locked: bool

    @property
    def first(self) -> RunEvent | None:
        """The line with which the run began."""
        return next((event for event in self.events if isinstance(event, RunEvent)), None)

    @property
    def last_words(self) -> str | None:
        """What was said at the end, or of the last error of the engine."""
        spoken = [event for event in self.events if isinstance(event, EndEvent | EngineErrorEvent)]
        return spoken[-1].text if spoken else None


def read_run(data_dir: DataDir, name: str) -> RunView:
    """The run that ``name`` means. Damage of its log is told on standard error with file and line.

    Raises: UsageError, LogDamaged.
    """
    view = _read(data_dir.find(name))
    warn_of_damage(view)
    return view


def warn_of_damage(view: RunView) -> None:
    """Each line that could not be used is told on standard error."""
    for found in view.damage:
        warn(f"{view.run.events_path}:{found.line_number}: {found.reason}")


def _read(run: RunDir) -> RunView:
    locked = run.is_locked()
    log = ContextLog.open(run.events_path, run.run_id)
    # A driven run's last line may be half written right now.
    damage = [found for found in log.damage if not (locked and found.torn)]
    return RunView(run, log.events, damage, locked)


def stored_rows(data_dir: DataDir, view: RunView) -> list[BreakpointRow]:
    """The run's breakpoints; those whose snapshot is gone are marked as damaged."""
    from orchestrator.stored import driver_of, why_lost

    rows = checkpoints(view.events)
    if not any(row.snapshot_id for row in rows):
        return rows
    try:
        driver = driver_of(view.run, view.events, data_dir.store)
    except (TaskError, UnsupportedHost) as error:
        warn(f"whether the snapshots still exist cannot be told: {error}")
        return rows
    try:
        return [
            row.model_copy(update={"damaged": why_lost(driver, row.snapshot_id)})
            if row.snapshot_id is not None and row.damaged is None and row.collected is None
            else row
            for row in rows
        ]
    finally:
        driver.close()


def summarise(run: RunDir) -> RunSummary:
    """The run in one row, whatever state its files are in."""
    try:
        view = _read(run)
    except (LogDamaged, HostError) as error:
        return _unreadable(run, str(error))
    return summary_of(view)


def summary_of(view: RunView) -> RunSummary:
    """The run in one row."""
    first = view.first
    used = totals(view.events)
    name = first.task.get("name") if first else None
    now = status(view.events, view.locked)
    return RunSummary(
        run_id=view.run.run_id,
        task=name if isinstance(name, str) else None,
        status=now.status,
        reason=now.reason,
        created_at=first.at if first else view.run.created_at(),
        driver=first.driver if first else None,
        container=first.container if first else None,
        breakpoints=used.checkpoints,
        rewinds=used.rewinds,
        steps=used.steps,
        progress=used.progress,
        duration_s=used.duration_s,
        cost_usd=None if used.steps and used.cost_unknown == used.steps else used.cost_usd,
        cost_unknown=used.cost_unknown,
        error=f"{len(view.damage)} damaged lines (see: orchestrator verify {view.run.run_id})" if view.damage else None,
    )


def details_of(view: RunView) -> dict[str, object]:
    """The rest of ``show --json``."""
    used = totals(view.events)
    head = next((row.breakpoint_id for row in checkpoints(view.events) if row.head), None)
    intent = unfinished_intent(view.events)
    return {
        "head": head,
        "tool_calls": used.tool_calls,
        "submissions": used.submissions,
        "stuck_count": used.stuck_count,
        "usage": used.usage.model_dump(),
        "usage_unknown": used.usage_unknown,
        "unfinished": None if intent is None or view.locked else intent.breakpoint_id,
        "text": view.last_words,
        "path": str(view.run.path),
        "damage": [{"line_number": found.line_number, "reason": found.reason} for found in view.damage],
    }


def _unreadable(run: RunDir, error: str) -> RunSummary:
    return RunSummary(
        run_id=run.run_id,
        task=None,
        status="running" if run.is_locked() else "interrupted",
        reason=None,
        created_at=run.created_at(),
        driver=None,
        container=None,
        breakpoints=0,
        rewinds=0,
        steps=0,
        progress=None,
        duration_s=0.0,
        cost_usd=None,
        cost_unknown=0,
        error=error,
    )
