"""Agents with a loop of their own that ``launch`` and ``resume`` drive: found by their entry, called, recorded."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.adapters.instrumentation import instrument
from orchestrator.desk import Desk
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.recording.opening import driven
from orchestrator.recording.run import RecordedRun, RunEnded
from orchestrator.runner import RunResult
from orchestrator.session import Session
from orchestrator.task import AgentSpec
from snapshot_drivers.errors import SnapshotError


class HarnessFailed(OrchestratorError):
    """The harness raised an error of its own; the run has ended, and its breakpoints stay."""

    exit_code = 1


def drive_launched(session: Session, desk: Desk, begin: Callable[[], str | None], source_dir: Path) -> RunResult:
    """The task's own agent has been driven to its end. ``source_dir``: where modules beside the task file lie.

    Raises: UsageError: there is no such agent. HarnessFailed: it raised. Divergence: it did not repeat itself.
        Otherwise as ``driven``.
    """
    drive = _drive_of(session.spec.agent, source_dir)
    run: RecordedRun | None = None
    try:
        with driven(session, desk, begin) as run:
            drive(run)
    except RunEnded:
        pass
    except (OrchestratorError, SnapshotError):
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise HarnessFailed(
            f"the harness of run {session.run_id} raised {type(error).__name__} at {last.filename}:{last.lineno}: "
            f"{error}; go on with: orchestrator resume {session.run_id}"
        ) from error
    result = run.result if run is not None else desk.result
    assert isinstance(result, RunResult)
    return result


def _drive_of(agent: AgentSpec, source_dir: Path) -> Callable[[RecordedRun], Any]:
    """What drives a run of that agent. Raises: UsageError."""
    if agent.kind == "mini-swe-agent":
        from orchestrator.adapters import mini_swe_agent

        return mini_swe_agent.drive
    if agent.entry is None:
        raise UsageError(
            "the task names no agent.entry: give module:function, or open the run in your own program "
            "(orchestrator.recorded_run, orchestrator.resumed_run)"
        )
    instrument()
    entry = _entry(agent.entry, source_dir)
    if agent.kind == "langgraph":
        from orchestrator.adapters import langgraph

        return lambda run: langgraph.drive(run, entry)
    if inspect.iscoroutinefunction(entry):
        return lambda run: asyncio.run(run.drive_async(entry, run))
    return lambda run: run.drive(entry, run)


def _entry(name: str, source_dir: Path) -> Callable[[RecordedRun], Any]:
    module, _, path = name.partition(":")
    if str(source_dir) not in sys.path:
        sys.path.insert(0, str(source_dir))
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"agent.entry {name}: {error} (looked beside the task file too: {source_dir})") from error
    if not callable(found):
        raise UsageError(f"agent.entry {name} is no function")
    entry: Callable[[RecordedRun], Any] = found
    return entry
