"""Agents of other frameworks, the real packages in a real container: recorded, taken back, finished, repeated."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import instrument
from orchestrator.recording.run import RecordedRun
from tests.e2e.case_cli import Cli
from tests.e2e.framework_runs import (
    _quiet,  # noqa: F401
    chat_model,
    conversation,
    nothing_new,
    went_back_and_finished,
)
from tests.e2e.provider_server import ProviderServer
from tests.e2e.scripted_damage import BREAK, MEMORY, REPAIRED, TASK, calls, damaging_model, text
from tests.e2e.test_endpoints import _keys  # noqa: F401 - a fixture

pytestmark = pytest.mark.engine

Harness = Callable[[], Any]


@pytest.mark.parametrize("how", ["sync", "async", "stream"])
def test_a_langchain_agent_with_the_middleware(open_run: Callable[..., Any], cli: Cli, how: str) -> None:
    pytest.importorskip("langchain")
    instrument("langchain", "openai")
    from langchain.agents import create_agent

    from orchestrator.adapters.langchain import middleware

    given = {"messages": [("user", TASK["instruction"])]}

    def harness(run: RecordedRun, server: ProviderServer) -> Any:
        model = chat_model(server, streaming=how == "stream")
        agent = create_agent(model, [], middleware=[middleware(run)])
        return [*agent.stream(given, stream_mode="values")][-1] if how == "stream" else agent.invoke(given)

    async def harness_async(run: RecordedRun, server: ProviderServer) -> Any:
        return await create_agent(chat_model(server), [], middleware=[middleware(run)]).ainvoke(given)

    def drive(run: RecordedRun) -> list[Any]:
        if how == "async":
            return conversation(asyncio.run(run.drive_async(harness_async, run, server)))
        return conversation(run.drive(harness, run, server))

    with damaging_model(stream=how == "stream") as server:
        with open_run(f"agent-{how}") as run:
            first = drive(run)
            went_back_and_finished(run, server)
        assert run.result is not None and run.result.status == "succeeded"
        with open_run(f"agent-{how}") as run:
            assert drive(run) == first
            nothing_new(run, server)
    assert cli.json("verify", f"agent-{how}")["whole"] is True


def test_a_langgraph_graph_with_tools_of_its_own(open_run: Callable[..., Any], cli: Cli) -> None:
    pytest.importorskip("langgraph")
    instrument("langchain", "openai")
    from langchain_core.tools import StructuredTool
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    from orchestrator.adapters.langchain import tools

    def harness(run: RecordedRun, server: ProviderServer) -> Any:
        def note(text: str) -> str:
            """Keep a note."""
            return run.bash(f"echo {text} >> /srv/work/notes")

        given = [*tools(run), StructuredTool.from_function(note)]
        model = chat_model(server).bind_tools(given)
        graph = StateGraph(MessagesState)
        graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
        graph.add_node("tools", ToolNode(given))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        return graph.compile().invoke({"messages": [("user", "go")]})

    with ProviderServer(
        calls(False, ("note", {"text": "one"}), at=1),
        calls(False, ("bash", {"command": BREAK}), ("note", {"text": "lost"}), at=2),
        calls(False, ("backtrack_commit", {"breakpoint_id": 1, "memory_summary": MEMORY}), at=3),
        calls(False, ("bash", {"command": REPAIRED}), at=4),
        text(False, "Done."),
    ) as server:
        with open_run("graph") as run:
            first = conversation(run.drive(harness, run, server))
            assert run.execution is not None and run.execution.answered == 2 and len(server.requests) == 5
            assert run.exec("cat /srv/work/notes").output == b"one\ntwo\n"
        with open_run("graph") as run:
            assert conversation(run.drive(harness, run, server)) == first
            nothing_new(run, server)
    assert cli.json("verify", "graph")["whole"] is True


@pytest.mark.parametrize("put_back", [False, True])
def test_mini_swe_agent_goes_back_by_a_shell_command_and_submits(
    open_run: Callable[..., Any], cli: Cli, monkeypatch: pytest.MonkeyPatch, put_back: bool
) -> None:
    pytest.importorskip("minisweagent")
    instrument("mini_swe_agent")
    monkeypatch.setattr("litellm.suppress_debug_info", True)  # it prints what it does not know about a model
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_model import LitellmModel

    from orchestrator.adapters.mini_swe_agent import SUBMITTED, RunEnvironment, restorable

    steps: list[int] = []

    class Counting(DefaultAgent):
        def step(self) -> Any:
            steps.append(self.n_calls)
            return super().step()

    def harness(run: RecordedRun, server: ProviderServer) -> Any:
        model = LitellmModel(
            model_name="openai/m", model_kwargs={"api_base": f"{server.url}/v1"}, cost_tracking="ignore_errors"
        )
        agent = Counting(
            model,
            RunEnvironment(run),
            system_template="You are {{node}}.",
            instance_template="{{task}}",
            cost_limit=0.0,
        )
        if put_back:
            agent = restorable(agent)
        return agent.run("Write two lines."), [
            {key: value for key, value in message.items() if key != "extra"} for message in agent.messages
        ]

    back = ("bash", {"command": f"backtrack_commit 1 '{MEMORY}'"})
    with damaging_model(back=back) as server:
        server.replies[4] = calls(False, ("bash", {"command": f"echo {SUBMITTED}; cat notes"}), at=5)
        with open_run("swe") as run:
            first = run.drive(harness, run, server)
            assert first[0] == {"exit_status": "Submitted", "submission": "one\ntwo\n"}
            answered = 0 if put_back else 2
            assert run.execution is not None and (run.execution.answered, run.execution.made) == (answered, 4)
            # From the state the first step is not made again, and the agent has counted it all the same.
            assert steps == ([0, 1, 2, 1, 2] if put_back else [0, 1, 2, 0, 1, 2])
            before, after = (server.requests[at].json["messages"] for at in (1, 3))
            assert after[:-1] == before
            assert len(server.requests) == 5 and MEMORY in server.requests[3].json["messages"][-1]["content"]
        with open_run("swe") as run:
            # Its way to end is an exception, which is raised again as its own type.
            assert run.drive(harness, run, server) == first
            nothing_new(run, server)
    assert cli.json("verify", "swe")["whole"] is True


def test_importing_the_package_imports_no_framework() -> None:
    names = ("langchain", "langgraph", "litellm", "openai", "mini_swe_agent", "instrumentation", "launched")
    modules = ["orchestrator", "orchestrator.recording.opening", *(f"orchestrator.adapters.{name}" for name in names)]
    frameworks = {"litellm", "openai", "langchain_core", "langgraph", "minisweagent"}
    script = f"import sys, {', '.join(modules)}\nprint(*sorted({frameworks} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\n", "")
