"""What a restore by hand answers, and which processes of the breakpoint do not run any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from snapshot_drivers.base import Coverage, CoverageState, StateKind


class RestoredProcesses(BaseModel):
    """The processes that ran at the breakpoint: ``pid <number> <command line>``, the number being the one of then."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    restored: list[str] = Field(default_factory=list)
    """Those that go on where they were, and those that were started anew (daemons of the task)."""
    missing: list[str] = Field(default_factory=list)
    """Those that do not run."""


class RestoreResult(BaseModel):
    """What ``restore`` answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    breakpoint_id: int
    container: str
    previous_container: str | None
    """``None``: it was gone, and has been made again."""
    container_id: str
    """The engine's."""
    previous_container_id: str | None
    """``None``: not known. Different: that one is gone, what holds its id must use the new one."""
    restore_ms: float
    verified: str
    processes: RestoredProcesses


def restored_processes(coverage: Coverage, running: Sequence[str]) -> RestoredProcesses:
    """The processes that ``coverage`` names, told apart; ``running``: the command lines of those that run now."""
    left = Counter(running)
    restored: list[str] = []
    missing: list[str] = []
    for item in coverage.items:
        if item.kind is not StateKind.PROCESS:
            continue
        command = item.path.split(" ", 2)[2] if item.path.startswith("pid ") and item.path.count(" ") > 1 else None
        if item.state is CoverageState.CAPTURED:
            restored.append(item.path)
        elif command is not None and left[command] > 0:
            left[command] -= 1
            restored.append(item.path)
        elif command is not None or item.path.endswith(" more processes"):
            missing.append(item.path)
    return RestoredProcesses(restored=restored, missing=missing)
