"""The examples of recorded agents, through the command line, with a scripted model behind their SDK."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest

from orchestrator.cli.main import CRASH_VARIABLE
from tests.e2e.case_cli import Cli
from tests.e2e.conftest import REPOSITORY
from tests.e2e.provider_server import ProviderServer
from tests.e2e.scripted_damage import MEMORY, calls, damaging_model
from tests.e2e.test_endpoints import _keys  # noqa: F401 - a fixture

pytestmark = pytest.mark.engine

NEEDS = {"openai": "openai", "langchain": "langchain", "langgraph": "langgraph", "mini-swe-agent": "minisweagent"}
SUBMIT = ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})


def model_of(example: str) -> ProviderServer:
    """What the model does; the shell is all that mini-swe-agent has."""
    if example != "mini-swe-agent":
        return damaging_model()
    server = damaging_model(back=("bash", {"command": f"backtrack_commit 1 '{MEMORY}'"}))
    server.replies[4] = calls(False, SUBMIT, at=5)
    return server


@pytest.mark.parametrize("example", NEEDS)
def test_an_example_goes_back_and_succeeds(example: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(NEEDS[example]) is None:  # not imported: mini-swe-agent greets then
        pytest.skip(f"needs {NEEDS[example]}")
    task = str(REPOSITORY / "examples" / example / "task.yaml")
    with model_of(example) as server:
        for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
            monkeypatch.setenv(name, f"{server.url}/v1")
        result = cli.json("launch", task, "--trust-task", "--run-id", "example")
        assert (result["status"], result["reason"], result["rewinds"]) == ("succeeded", "checklist", 1)
        assert len(server.requests) == 5
    rows = cli.json("breakpoints", "example")
    assert [row["kind"] for row in rows].count("before_rewind") == 1
    assert cli.json("verify", "example")["whole"] is True
    # Any breakpoint can be put back by hand afterwards, its container being gone.
    cli("restore", "example", "2")
    assert cli("exec", "example", "--", "ls", "/srv/work")[0] == "notes\n"


def test_a_run_that_ended_at_a_limit_is_resumed_without_asking_twice(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    task: dict[str, Any] = {
        "agent": {"kind": "python", "entry": "openai_loop:agent"},
        "instruction": "Write.",
        "workdir": "/srv/work",
        "limits": {"steps": 2},
    }
    source = (REPOSITORY / "examples" / "openai" / "openai_loop.py").read_text()
    path = cli.task(**task)
    (cli.directory / "openai_loop.py").write_text(source)
    with damaging_model() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        result = cli.json("launch", path, "--trust-task", "--run-id", "limited", code=1)
        assert (result["reason"], len(server.requests)) == ("limit_steps", 2)
        _, said = cli("resume", "limited", code=2)
        assert "--raise-limit" in said
        result = cli.json("resume", "limited", "--raise-limit", "steps=50")
        assert (result["status"], result["rewinds"], len(server.requests)) == ("succeeded", 1, 5)


def checkpointed_graph(cli: Cli, **keys: Any) -> str:
    """The example's graph, with one checkpointer for all of its passes; the task that names it."""
    source = (REPOSITORY / "examples" / "langgraph" / "own_graph.py").read_text()
    assert source.count("compile()") == 1 and source.count("def ask(state: MessagesState) -> dict:\n") == 1
    source = source.replace("compile()", "compile(checkpointer=saver)")
    source = source.replace("-> dict:\n", "-> dict:\n        asked.append(len(state['messages']))\n")
    source += "\n\nfrom langgraph.checkpoint.memory import InMemorySaver\n\nsaver, asked = InMemorySaver(), []\n"
    (cli.directory / "checkpointed_graph.py").write_text(source)
    sys.modules.pop("checkpointed_graph", None)
    agent = {"kind": "langgraph", "entry": "checkpointed_graph:graph"}
    return cli.task(agent=agent, instruction="Write.", workdir="/srv/work", keep=True, **keys)


def test_a_launched_graph_goes_on_from_its_checkpoint_and_repeats_itself_when_it_is_resumed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("langgraph")
    path = checkpointed_graph(cli, limits={"steps": 1})
    # Breakpoint 1 is the end of the first process.
    with damaging_model(back=("backtrack_commit", {"breakpoint_id": 2, "memory_summary": MEMORY})) as server:
        for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
            monkeypatch.setenv(name, f"{server.url}/v1")
        cli.json("launch", path, "--trust-task", "--run-id", "graph", code=1)
        assert len(server.requests) == 1
        result = cli.json("resume", "graph", "--raise-limit", "steps=50")
        assert (result["status"], result["rewinds"], len(server.requests)) == ("succeeded", 1, 5)
    made = sys.modules["checkpointed_graph"]
    # The first pass, the one that was answered up to the limit, and the one that went on from its own checkpoint.
    assert made.asked == [1, *(1, 3, 5), *(3, 5)] and set(made.saver.storage) == {"graph", "graph-2"}
    assert cli("exec", "graph", "--", "cat", "/srv/work/notes")[0] == "one\ntwo\n"


@pytest.mark.parametrize("example", ["openai", "langgraph"])
def test_killed_in_the_middle_its_half_done_effects_are_undone_and_nothing_is_asked_twice(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    pytest.importorskip(example)
    if example == "langgraph":
        path = checkpointed_graph(cli)
    else:
        agent = {"kind": "python", "entry": "openai_loop:agent"}
        path = cli.task(agent=agent, instruction="Write.", workdir="/srv/work", keep=True)
        shutil.copy(REPOSITORY / "examples" / "openai" / "openai_loop.py", cli.directory)
    with damaging_model() as server:
        for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
            monkeypatch.setenv(name, f"{server.url}/v1")
        words = ["launch", "--data-dir", str(cli.place.root), path, "--trust-task", "--run-id", "killed"]
        # The second tool, which does the damage, has run; its line is not written yet.
        killed = subprocess.run(
            [sys.executable, "-m", "orchestrator.cli.main", *words],
            env={**os.environ, CRASH_VARIABLE: "after-tool-call:1"},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert len(server.requests) == 2
        result = cli.json("resume", "killed")
        assert (result["status"], result["rewinds"], len(server.requests)) == ("succeeded", 1, 5)
    assert cli("exec", "killed", "--", "cat", "/srv/work/notes")[0] == "one\ntwo\n"
    tools = [event for event in cli.events("killed") if event.kind == "tool_call"]
    assert [event.attempt for event in tools] == [1, 2, 1]
    assert cli.json("verify", "killed")["whole"] is True


def test_code_of_a_task_runs_only_if_the_operator_vouches_for_it(cli: Cli) -> None:
    path = cli.task(agent={"kind": "python", "entry": "os:getpid"})
    _, said = cli("launch", path, code=3)
    assert "os:getpid is code that runs on this host" in said


def test_a_harness_that_fails_is_told_with_its_place(cli: Cli) -> None:
    path = cli.task(agent={"kind": "python", "entry": "failing:agent"})
    (cli.directory / "failing.py").write_text(
        "def agent(run):\n    run.bash('true')\n    raise ValueError('no idea')\n"
    )
    _, said = cli("launch", path, "--trust-task", "--run-id", "failing", code=1)
    assert "raised ValueError" in said and "failing.py:3" in said and "no idea" in said
    assert cli.json("show", "failing")["status"] == "failed"
