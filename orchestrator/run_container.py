"""What a run needs of its container. `orchestrator.container.Container` is one; the tests have another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from orchestrator.launcher import Cut, ExecResult, never
from snapshot_drivers.base import Target


class RunContainer(Protocol):
    """A container in which an agent's commands run and which a snapshot driver can capture and restore."""

    @property
    def name(self) -> str:
        """Its name on the engine."""

    @property
    def container_id(self) -> str:
        """The engine's id of it."""

    @property
    def exec_lock(self) -> AbstractContextManager[object]:
        """Held while a command is being started; no capture and no restore may begin then."""

    def target(self) -> Target:
        """It as a driver sees it now. Raises: EngineError."""

    def exec(
        self,
        command: str | Sequence[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 300.0,
        output_limit_bytes: int = 16_000,
        cut: Cut = never,
    ) -> ExecResult:
        """A command (a text: for the shell) has ended, or was ended since ``cut`` gave a reason.

        Raises: EngineError: never the command's own failure.
        """

    def background(
        self,
        command: str | Sequence[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> int | None:
        """A command is left running. Raises: EngineError."""

    def other_processes(self) -> int:
        """How many processes of the agent or of daemons run. Raises: EngineError."""

    def commands(self) -> list[str]:
        """Command lines of these processes. Raises: EngineError."""

    def remove(self) -> None:
        """All that the engine holds for the run is gone, checkpoints aside. Repeatable. Raises: EngineError."""
