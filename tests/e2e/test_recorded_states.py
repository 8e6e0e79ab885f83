"""A graph's own checkpoints put it back after a rewind, in a real container: it repeats no node, or all of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator import instrument
from orchestrator.errors import Divergence, UsageError
from orchestrator.recording.run import RecordedRun
from orchestrator.recording.tool_hook import tool
from tests.e2e.case_cli import Cli
from tests.e2e.framework_runs import (
    _quiet,  # noqa: F401
    chat_model,
    conversation,
    nothing_new,
    went_back_and_finished,
)
from tests.e2e.provider_server import ProviderServer
from tests.e2e.scripted_damage import TASK, damaging_model, text
from tests.e2e.test_endpoints import _keys  # noqa: F401 - a fixture
from tests.unit.recorded_bench import RecordedBench

pytestmark = pytest.mark.engine


class Graph:
    """A model and its tools in turn, in a graph with a checkpointer; its nodes are counted.

    ``how``: ``sync``, ``async``, or ``agent``: one of LangChain, async.
    """

    def __init__(self, server: ProviderServer, how: str) -> None:
        pytest.importorskip("langgraph")
        instrument("langchain", "openai")
        self.server = server
        self.how = how
        self.ran: list[str] = []
        self.threads: list[str] = []
        self.remembers: Callable[[], Callable[[list[Any]], list[Any]]] = lambda: lambda messages: messages
        """Made anew for each pass: the request, of the messages in the graph's state."""
        self.saver: Callable[[], Any]
        from langgraph.checkpoint.memory import InMemorySaver

        self.saver = InMemorySaver

    def made(self, run: RecordedRun) -> Any:
        from langgraph.graph import START, MessagesState, StateGraph
        from langgraph.prebuilt import ToolNode, tools_condition

        from orchestrator.adapters.langchain import tools

        if self.how == "agent":
            return self._agent(run)
        given = tools(run)
        model = chat_model(self.server).bind_tools(given)
        remembered = self.remembers()

        def ask(state: Any) -> Any:
            self._count()
            return {"messages": [model.invoke(remembered(state["messages"]))]}

        async def ask_async(state: Any) -> Any:
            self._count()
            return {"messages": [await model.ainvoke(remembered(state["messages"]))]}

        graph = StateGraph(MessagesState)
        graph.add_node("model", ask_async if self.how == "async" else ask)
        graph.add_node("tools", ToolNode(given))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        return graph.compile(checkpointer=self.saver())

    def _agent(self, run: RecordedRun) -> Any:
        from langchain.agents import create_agent
        from langchain.agents.middleware import before_model

        from orchestrator.adapters.langchain import middleware

        counting = before_model(lambda _state, _runtime: self._count(), name="counting")
        counted = [middleware(run), counting]
        return create_agent(chat_model(self.server), [], middleware=counted, checkpointer=self.saver())

    def _count(self) -> None:
        from langgraph.config import get_config

        self.ran.append("model")
        self.threads.append(get_config()["configurable"]["thread_id"])

    def drive(self, run: RecordedRun) -> list[Any]:
        """What the graph ended with, by the helpers of the adapter."""
        from orchestrator.adapters.langgraph import ainvoke, invoke

        given = {"messages": [("user", TASK["instruction"])]}
        if self.how == "sync":
            return conversation(run.drive(lambda: invoke(self.made(run), given)))

        async def harness() -> Any:
            return await ainvoke(self.made(run), given)

        return conversation(asyncio.run(run.drive_async(harness)))


@pytest.mark.parametrize("how", ["sync", "agent"])
def test_a_graph_with_a_checkpointer_goes_on_from_there_and_repeats_no_node(
    open_run: Callable[..., Any], cli: Cli, how: str
) -> None:
    with damaging_model() as server:
        graph = Graph(server, how)
        with open_run(f"put-back-{how}") as run:
            first = graph.drive(run)
            went_back_and_finished(run, server, answered=0)
            # The middleware's node stands before the model's, from whose checkpoint the agent went on.
            made = 4 if how == "agent" else 5
            assert len(graph.ran) == made and set(graph.threads) == {f"put-back-{how}"}
        # In another process it repeats itself, and ends as it did.
        with open_run(f"put-back-{how}") as run:
            assert graph.drive(run) == first
            nothing_new(run, server)
            assert len(graph.ran) == made + 3
    assert cli.json("verify", f"put-back-{how}")["whole"] is True


def outside_of_the_state() -> Callable[[list[Any]], list[Any]]:
    """A graph that keeps its conversation in a variable."""
    known: list[Any] = []

    def request(messages: list[Any]) -> list[Any]:
        known.extend(messages[-2:])
        return [*known]

    return request


@pytest.mark.parametrize(
    ("how", "why"),
    [("async", "its request differs at messages[0].role"), ("sync", "does not hold the checkpoint")],
)
def test_a_graph_whose_checkpoint_is_not_all_that_it_knows_repeats_itself(
    open_run: Callable[..., Any], caplog: pytest.LogCaptureFixture, how: str, why: str
) -> None:
    with damaging_model() as server:
        graph = Graph(server, how)
        from langgraph.checkpoint.memory import InMemorySaver

        class Forgetful(InMemorySaver):
            def get_tuple(self, config: Any) -> Any:
                return None if "checkpoint_id" in config["configurable"] else super().get_tuple(config)

        shared = InMemorySaver()
        if "hold" in why:
            graph.saver = Forgetful
        else:
            graph.saver, graph.remembers = lambda: shared, outside_of_the_state
        with open_run("elsewhere") as run:
            assert len(graph.drive(run)) == 6
            went_back_and_finished(run, server)
        assert why in caplog.text
    # What the first pass left in a checkpointer that both share is not the past of the second.
    assert graph.threads[-1] == ("elsewhere" if "hold" in why else "elsewhere-2")


def test_a_graph_that_does_not_repeat_itself_is_stopped_before_anything_is_sent(
    open_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.recording.execution._PATIENCE_S", 0.1)
    with damaging_model() as server:
        graph = Graph(server, "sync")

        def numbered() -> Callable[[list[Any]], list[Any]]:
            return lambda messages: [*messages, ("user", f"This is request {len(graph.ran)}.")]

        graph.remembers = numbered
        with open_run("numbered") as run, pytest.raises(Divergence, match=r"messages\[1\]\.content"):
            graph.drive(run)
        assert len(server.requests) == 3


def _odd(shape: str, model: Any, noted: Any) -> Any:
    """A graph that asks for "first", then does something of that ``shape``, and asks for "last"."""
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.store.memory import InMemoryStore

    ran = threading.Event()

    def ask(*texts: str) -> Callable[[Any], Any]:
        return lambda _state: {"messages": [model.invoke(text) for text in texts]}

    def branch(_state: Any) -> Any:
        noted()
        ran.set()
        return {}

    def other_branch(_state: Any) -> Any:
        assert ran.wait(30)
        return ask("middle")(_state)

    graph = StateGraph(MessagesState)
    graph.add_node("first", ask("first"))
    graph.add_node("last", ask("last"))
    graph.add_edge(START, "first")
    inner = StateGraph(MessagesState)
    inner.add_node("inner", ask("middle"))
    inner.add_edge(START, "inner")
    middle = {
        "twice": {"middle": ask("middle", "middle")},
        "subgraph": {"middle": inner.compile()},
        "branches": {"branch": branch, "middle": other_branch},
    }.get(shape, {"middle": ask("middle")})
    for name, node in middle.items():
        graph.add_node(name, node)
        graph.add_edge("first", name)
    graph.add_edge([*middle], "last")
    return graph, {"store": InMemoryStore()} if shape == "store" else {}


@pytest.mark.parametrize(
    ("shape", "to", "used"),
    [
        ("plain", 1, True),
        ("plain", 0, True),
        ("twice", 1, True),
        ("twice", 2, False),
        ("subgraph", 1, False),
        ("subgraph", 2, True),
        ("branches", 1, False),
        ("branches", 2, True),
        ("store", 1, False),
    ],
)
def test_a_checkpoint_is_used_only_where_its_first_call_is_the_breakpoint(
    tmp_path: Path, shape: str, to: int, used: bool
) -> None:
    pytest.importorskip("langgraph")
    instrument("langchain")
    from langgraph.checkpoint.memory import InMemorySaver

    from orchestrator.adapters.langgraph import invoke

    def driven(name: str, **options: Any) -> tuple[list[Any], int, Any]:
        (tmp_path / name).mkdir()
        bench = RecordedBench(tmp_path / name)
        back, noted, left = tool(bench.run.backtrack_commit, "back"), tool(lambda: "noted", "noted"), [1]

        def harness() -> Any:
            graph, kept = _odd(shape, chat_model(server), noted)
            ended = invoke(graph.compile(**kept, **options), {"messages": []})
            if left:
                left.pop()
                back(to, "again")
            return ended

        with ProviderServer(text(False, "x")) as server:
            ended = conversation(bench.run.drive(harness))
            assert bench.run.execution is not None
            return [one.json["messages"] for one in server.requests], bench.run.execution.answered, ended

    requests, answered, ended = driven("put-back", checkpointer=InMemorySaver())
    assert (requests, ended) == driven("repeated")[::2]
    assert (answered == 0) == used or to == 0


def test_the_thread_of_a_graph_is_the_runs_and_outside_of_runs_its_callers(tmp_path: Path) -> None:
    pytest.importorskip("langgraph")
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import START, MessagesState, StateGraph

    from orchestrator.adapters.langgraph import invoke

    graph = StateGraph(MessagesState)
    graph.add_node("node", lambda _state: {"messages": ["x"]})
    graph.add_edge(START, "node")
    made, theirs = graph.compile(checkpointer=InMemorySaver()), {"configurable": {"thread_id": "1"}}
    assert len(invoke(made, {"messages": []}, theirs)["messages"]) == 1
    with pytest.raises(UsageError, match="leave out thread_id"):
        RecordedBench(tmp_path).run.drive(lambda: invoke(made, {"messages": []}, theirs))
