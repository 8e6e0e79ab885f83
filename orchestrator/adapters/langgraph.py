"""LangGraph: a compiled graph, driven with a task's instruction or by its caller. LangChain's hooks record it.

A graph that has a checkpointer is put back by it after a rewind: it goes on from the checkpoint of the node that asked
the model, and the nodes before it do not run again.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.adapters import langchain
from orchestrator.errors import UsageError
from orchestrator.recording.current_execution import current_execution

if TYPE_CHECKING:
    from orchestrator.recording.run import RecordedRun

PACKAGE = "langgraph"
_STEPS_MAX = 1_000_000
"""The task's limits end a run, not the library's limit of 25 steps."""
_OWN_KEYS = ("thread_id", "checkpoint_id", "checkpoint_ns")
_INNER = "|"
"""Stands in the ``checkpoint_ns`` of a node of a subgraph."""
_LOG = logging.getLogger("orchestrator")


def install() -> None:
    """Its models and tools are recorded where a run is. Repeatable."""
    langchain.install()


def drive(run: RecordedRun, make: Callable[[RecordedRun], Any]) -> Any:
    """The graph that ``make`` makes has ended; it is made anew for each pass, with what it keeps in memory."""
    install()
    given = {"messages": [{"role": "user", "content": run.instruction}]}
    config = {"recursion_limit": _STEPS_MAX}
    if not inspect.iscoroutinefunction(make):
        return run.drive(lambda: invoke(make(run), given, config))

    async def harness() -> Any:
        return await ainvoke(await make(run), given, config)

    return asyncio.run(run.drive_async(harness))


def invoke(graph: Any, given: Any, config: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """As ``graph.invoke``. Inside a recorded run a graph with a checkpointer gets a thread of the run's name, and goes
    on after a rewind from its checkpoint, if it is the first thing that a pass does.

    The graph of the new pass is used, with the checkpointer of the one that was left: so nothing of an abandoned path
    is in it but what the checkpoint holds. What a graph keeps elsewhere, in variables of its own, is not put back.

    Raises: UsageError: ``config`` names a thread. Otherwise as ``graph.invoke``.
    """
    plan = _planned(graph, given, config)
    found = next(plan)
    while isinstance(found, _Look):
        found = plan.send(found.saver.get_tuple(found.config))
    return found.graph.invoke(found.given, found.config, **options)


async def ainvoke(graph: Any, given: Any, config: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """As ``invoke``, for ``graph.ainvoke``."""
    plan = _planned(graph, given, config)
    found = next(plan)
    while isinstance(found, _Look):
        found = plan.send(await found.saver.aget_tuple(found.config))
    return await found.graph.ainvoke(found.given, found.config, **options)


class _Look(NamedTuple):
    """What a checkpointer holds there is wanted."""

    saver: Any
    config: dict[str, Any]


class _Call(NamedTuple):
    """What is to be invoked."""

    graph: Any
    given: Any
    config: Mapping[str, Any] | None


@dataclass(frozen=True)
class _Checkpoint:
    """Where a graph can go on. It lies in the checkpointer, and is there as long as that is."""

    saver: Any
    thread_id: str
    checkpoint_id: str


class _Thread:
    """A thread of a graph, as a ``Stateful``: the checkpoint of the node that runs puts it back there."""

    def __init__(self, saver: Any, thread_id: str) -> None:
        self._saver = saver
        self._thread_id = thread_id

    def mark(self) -> str | None:
        place = _place()
        if place.get("thread_id") != self._thread_id:
            return None
        found: str | None = (place.get("checkpoint_map") or {}).get("")
        return found

    def state(self) -> _Checkpoint | None:
        """A subgraph's own steps lie in checkpoints of its own: it is not entered in its middle."""
        mark = self.mark()
        if mark is None or _INNER in _place().get("checkpoint_ns", ""):
            return None
        return _Checkpoint(self._saver, self._thread_id, mark)


def _place() -> Mapping[str, Any]:
    """What the library says of the node inside which this code runs."""
    from langgraph.config import get_config

    try:
        found: Mapping[str, Any] = get_config().get("configurable", {})
    except RuntimeError:  # outside of nodes, or in a thread that inherited no context
        return {}
    return found


def _planned(graph: Any, given: Any, config: Mapping[str, Any] | None) -> Generator[_Look | _Call, Any, None]:
    """Ends with the call that is to be made; on the way it asks what checkpointers hold, and is sent that."""
    from langgraph.checkpoint.base import BaseCheckpointSaver

    execution, saver = current_execution(), getattr(graph, "checkpointer", None)
    if execution is None or not isinstance(saver, BaseCheckpointSaver):
        yield _Call(graph, given, config)
        return
    configurable = (config or {}).get("configurable", {})
    if named := [key for key in _OWN_KEYS if key in configurable]:
        raise UsageError(f"the thread of a recorded graph is the run's: leave out {', '.join(named)}")

    def at(thread_id: str, **more: str) -> dict[str, Any]:
        return {**(config or {}), "configurable": {**configurable, "thread_id": thread_id, **more}}

    kept = execution.kept_state()
    if isinstance(kept, _Checkpoint):
        going_on = at(kept.thread_id, checkpoint_id=kept.checkpoint_id)
        held = (yield _Look(kept.saver, going_on)) is not None
        if held and execution.keep_states(_Thread(kept.saver, kept.thread_id), put_back=True):
            graph = copy.copy(graph)
            graph.checkpointer = kept.saver
            yield _Call(graph, None, going_on)
            return
        if not held:
            _LOG.warning("the graph repeats itself: its checkpointer does not hold the checkpoint of the breakpoint")
    thread_id = execution.session.run_id
    # What a pass before this one left in the checkpointer, or another process, is not this pass's past.
    for number in itertools.count(2):
        if (yield _Look(saver, at(thread_id))) is None:
            break
        thread_id = f"{execution.session.run_id}-{number}"
    if getattr(graph, "store", None) is None and getattr(graph, "cache", None) is None:
        # What these hold is in no checkpoint.
        execution.keep_states(_Thread(saver, thread_id))
    yield _Call(graph, given, at(thread_id))
