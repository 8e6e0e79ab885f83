"""The hidden checklist: its order, and the two ways to run one criterion.

A *probe* runs on the image's pristine files beside the container (see ``snapshot_drivers.view`` for what its command
may rely on); a *scratch* check runs inside a copy of the container that is thrown away. Progress is the length of the
longest satisfied prefix over the number of criteria (MettleBench's measure), so the first unsatisfied one ends the run
of a checklist. A failure of our own machinery is never an unsatisfied criterion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from orchestrator.errors import HostError, OrchestratorError
from orchestrator.events import Progress
from orchestrator.launcher import Cut, CutShort, never
from orchestrator.task import CheckSpec
from snapshot_drivers.base import Target
from snapshot_drivers.errors import SnapshotError
from snapshot_drivers.overlay.layers import find_layers
from snapshot_drivers.view import run_in_view

OUTPUT_LIMIT_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class CheckResult:
    """What became of one criterion. Its output is for the operator: it never reaches the agent."""

    satisfied: bool
    exit_code: int | None = None
    """``None`` where the time limit ended it or it could not be run."""
    output: bytes = b""
    timed_out: bool = False
    error: str | None = None
    """Our machinery failed, so nothing is known of the criterion."""


@dataclass(frozen=True)
class Submission:
    """One run of the checklist."""

    progress: Progress
    failed: str | None
    """Name of the first unsatisfied criterion; ``None`` when all hold."""
    feedback: str | None
    """What the agent is told of it."""
    duration_ms: float
    results: tuple[CheckResult, ...]
    """Of the criteria that were run, in order."""


RunCheck = Callable[[CheckSpec], CheckResult]


def run_checklist(checks: Sequence[CheckSpec], *, probe: RunCheck, scratch: RunCheck, cut: Cut = never) -> Submission:
    """The criteria have been tried in order up to the first that is not satisfied.

    Raises: HostError: one could not be run; nothing is known of it, and the submission does not count. CutShort.
    """
    began = time.monotonic()
    results: list[CheckResult] = []
    failed: CheckSpec | None = None
    for check in checks:
        result = probe(check) if check.probe is not None else scratch(check)
        if (reason := cut()) is not None:
            raise CutShort(reason)
        if result.error is not None:
            raise HostError(f"criterion {check.name!r} could not be run: {result.error}")
        results.append(result)
        if not result.satisfied:
            failed = check
            break
    return Submission(
        progress=Progress(satisfied=len(results) - (failed is not None), total=len(checks)),
        failed=failed.name if failed else None,
        feedback=failed.feedback if failed else None,
        duration_ms=(time.monotonic() - began) * 1e3,
        results=tuple(results),
    )


class Judged(Protocol):
    """What a probe needs to know of a container."""

    def target(self) -> Target:
        """The container as a driver sees it."""


class Probe:
    """Runs probe commands beside one container, which they can neither change nor be changed by."""

    def __init__(self, container: Judged, helper: Path, cut: Cut = never) -> None:
        """``helper``: the static ``enter`` (``<data dir>/bin/enter``)."""
        self._container = container
        self._helper = helper
        self._cut = cut

    def run(self, check: CheckSpec) -> CheckResult:
        """The command has ended, with all that it started; ``error`` is set where it could not be run."""
        assert check.probe is not None
        try:
            target = self._container.target()
            outcome = run_in_view(
                target,
                check.probe,
                layers=_pristine(target),
                helper=self._helper,
                timeout_s=check.timeout_s,
                output_limit_bytes=OUTPUT_LIMIT_BYTES,
                give_up=lambda: self._cut() is not None,
            )
        except (SnapshotError, OrchestratorError, OSError, ValueError) as error:
            return CheckResult(satisfied=False, error=str(error))
        return CheckResult(
            satisfied=outcome.exit_code == 0,
            exit_code=outcome.exit_code,
            output=outcome.output,
            timed_out=outcome.timed_out,
        )


def _pristine(target: Target) -> tuple[Path, ...]:
    """The layers of the run's own image: its container may stand on an image that a snapshot added layers to.

    Raises: EngineError, UnsupportedHost.
    """
    engines_own, *image = find_layers(target).lower
    return engines_own, *image[-len(target.layer_ids) :]


class ForkResult(Protocol):
    """How a command in a fork ended (``container.ExecResult``)."""

    @property
    def exit_code(self) -> int | None:
        """``None`` where the time limit ended it."""

    @property
    def output(self) -> bytes:
        """What it wrote to stdout and stderr, bounded."""

    @property
    def timed_out(self) -> bool:
        """The time limit ended it."""


class Fork(Protocol):
    """A copy of the container in which a check may do what it likes."""

    def exec(self, command: str, /, *, user: str, timeout_s: float, output_limit_bytes: int, cut: Cut) -> ForkResult:
        """A shell command has run."""


class Scratch:
    """Runs scratch commands, each in a fork of its own that is gone afterwards."""

    def __init__(self, fork: Callable[[str], AbstractContextManager[Fork]], cut: Cut = never) -> None:
        """``fork``: makes a copy of the container with that network (``none``, ``bridge``), gone when it is left."""
        self._fork = fork
        self._cut = cut

    def run(self, check: CheckSpec) -> CheckResult:
        """The command has ended and its copy of the container is gone; ``error`` is set where it could not be run."""
        assert check.scratch is not None
        try:
            with self._fork(check.network) as fork:
                result = fork.exec(
                    check.scratch,
                    user="root",
                    timeout_s=check.timeout_s,
                    output_limit_bytes=OUTPUT_LIMIT_BYTES,
                    cut=self._cut,
                )
        except (SnapshotError, OrchestratorError, OSError) as error:
            return CheckResult(satisfied=False, error=str(error))
        return CheckResult(
            satisfied=result.exit_code == 0 and not result.timed_out,
            exit_code=None if result.timed_out else result.exit_code,
            output=result.output,
            timed_out=result.timed_out,
        )
