"""Named moments at which a test can have this process killed: how crash safety is shown, not claimed.

Nothing happens at them unless ``arm`` was called, which a test's child process does, or the CLI for a variable that a
test sets. The name says what is done already.
"""

from __future__ import annotations

import os
import signal
from typing import Final

POINTS: Final = frozenset(
    {
        "frozen", "after-pack", "after-manifest", "after-log-line",
        "restore-staged", "restore-intent-line", "restore-killed", "restore-tree-moved", "restore-before-start",
        "restore-started", "restore-before-commit-line",
        "before-model-call", "after-model-call", "before-tool-call", "in-tool-call", "after-tool-call",
        "between-calls", "in-check", "after-submission-line", "after-resume-line", "container-made",
        "copy-made",
        "archive-checked", "archive-stored", "archive-manifest", "archive-settled",
    }
)  # fmt: skip
"""All names, roughly in the order in which a run comes by."""

_armed: dict[str, int] = {}


def arm(point: str, *, passes: int = 0) -> None:
    """The process kills itself with SIGKILL when it has come by ``point`` ``passes`` times and comes again.

    Raises: ValueError: there is no such point.
    """
    if point not in POINTS:
        raise ValueError(f"no crash point {point!r}: there are {', '.join(sorted(POINTS))}")
    _armed[point] = passes


def reached(point: str) -> None:
    """The process is at ``point``."""
    if point not in _armed:
        return
    if _armed[point] > 0:
        _armed[point] -= 1
        return
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # the signal may be delivered to another thread first: nothing more is done here
