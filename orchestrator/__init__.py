"""Runs agents in containers and takes conversation and container back together.

``recorded_run``, ``resumed_run``, ``tool`` and ``instrument`` make an agent of another framework recoverable; they are
imported when they are asked for, and no framework with them.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PLACES = {
    "RecordedRun": "recording.run",
    "recorded_run": "recording.opening",
    "resumed_run": "recording.opening",
    "tool": "recording.tool_hook",
    "instrument": "adapters.instrumentation",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
