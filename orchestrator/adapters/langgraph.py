"""LangGraph: a compiled graph of chat messages, driven with a task's instruction. LangChain's hooks record it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orchestrator.adapters import langchain

if TYPE_CHECKING:
    from orchestrator.recording.run import RecordedRun

PACKAGE = "langgraph"
_STEPS_MAX = 1_000_000
"""The task's limits end a run, not the library's limit of 25 steps."""


def install() -> None:
    """Its models and tools are recorded where a run is. Repeatable."""
    langchain.install()


def drive(run: RecordedRun, make: Callable[[RecordedRun], Any]) -> Any:
    """The graph that ``make`` makes has ended; it is made anew for each pass, with what it keeps in memory."""
    install()
    given = {"messages": [{"role": "user", "content": run.instruction}]}
    config = {"recursion_limit": _STEPS_MAX}
    if not inspect.iscoroutinefunction(make):
        return run.drive(lambda: make(run).invoke(given, config))

    async def harness() -> Any:
        return await (await make(run)).ainvoke(given, config)

    return asyncio.run(run.drive_async(harness))
