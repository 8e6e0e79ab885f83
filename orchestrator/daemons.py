"""The programs that a task declares in its container: started after the container's start and after each restore."""

from __future__ import annotations

import time
from collections.abc import Iterable

from orchestrator.errors import HostError
from orchestrator.run_container import RunContainer
from orchestrator.task import DaemonSpec

_POLL_S = 0.1
_EXCERPT_CHARS = 300


def start_daemons(daemons: Iterable[DaemonSpec], container: RunContainer) -> None:
    """Each daemon has been started as root, in order, and answers where it says how to ask.

    Its output goes nowhere: a file would be a change of the container that nobody made.

    Raises: HostError: one was not ready in its time. EngineError.
    """
    for daemon in daemons:
        container.background(daemon.start, user="root")
        if daemon.ready is not None:
            _wait(daemon.name, daemon.ready, daemon.timeout_s, container)


def _wait(name: str, ready: str, timeout_s: float, container: RunContainer) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        asked = container.exec(ready, user="root", timeout_s=max(_POLL_S, deadline - time.monotonic()))
        if asked.exit_code == 0:
            return
        if time.monotonic() >= deadline:
            text = asked.output.decode("utf-8", "replace").strip()[-_EXCERPT_CHARS:]
            raise HostError(
                f"daemon {name} was not ready after {timeout_s:g} s: its ready command gave exit code "
                f"{asked.exit_code} ({text}): look at its start command in the task"
            )
        time.sleep(_POLL_S)
