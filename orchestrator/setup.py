"""The task's set-up commands, run in a fresh container before breakpoint 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from orchestrator.errors import TaskError
from orchestrator.launcher import Cut, CutShort, never
from orchestrator.run_container import RunContainer
from orchestrator.task import TaskSpec

TIMEOUT_S = 1800.0
"""For one command: package installations take their time."""
_OUTPUT_BYTES = 4000


def run_setup(
    spec: TaskSpec,
    container: RunContainer,
    env: Mapping[str, str],
    *,
    redacted: Callable[[str], str],
    cut: Cut = never,
) -> None:
    """All commands have succeeded, as root in the task's directory, which exists.

    Raises: TaskError: one failed; the message holds the end of its output. EngineError.
        CutShort: ``cut`` gave a reason.
    """
    container.exec(["/bin/mkdir", "-p", spec.workdir], user="root", cwd="/")
    for number, command in enumerate(spec.setup, 1):
        done = container.exec(
            command, user="root", env=env, timeout_s=TIMEOUT_S, output_limit_bytes=_OUTPUT_BYTES, cut=cut
        )
        if done.cut is not None:
            raise CutShort(done.cut)
        if done.exit_code != 0:
            how = f"took longer than {TIMEOUT_S:g} s" if done.timed_out else f"failed with exit code {done.exit_code}"
            output = done.output.decode("utf-8", "replace").strip()
            raise TaskError(redacted(f"task {spec.name}: setup command {number} {how}: {command}\n{output}".rstrip()))
