"""An operator's commands on runs that other processes drive, on the real engine."""

from __future__ import annotations

import json
import os
import pty
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.data_dir import DataDir
from orchestrator.engine import Engine

BUSY = 5
DEAD_S = 40.0
CLI = [sys.executable, "-m", "orchestrator.cli.main"]


def bash(command: str, **more: Any) -> dict[str, Any]:
    return {"calls": [{"name": "bash", "arguments": {"command": command}}], **more}


SUBMIT: dict[str, Any] = {"calls": [{"name": "submit"}]}
HELD = "touch /work/begun; while ! test -e /work/go; do sleep 0.05; done"


class Operator:
    """Somebody at a terminal, with a data directory of his own."""

    def __init__(self, directory: Path, data_dir: DataDir, image: str) -> None:
        self.directory = directory
        self.data_dir = data_dir
        self.image = image
        self.launched: list[subprocess.Popen[str]] = []

    def launch(self, *replies: dict[str, Any], **task: Any) -> str:
        """Id of a run that another process drives from now on."""
        run_id = f"ctl-{secrets.token_hex(4)}"
        (self.directory / "replies.yaml").write_text(yaml.safe_dump(list(replies)), encoding="utf-8")
        keys = {
            "name": "ctl",
            "image": self.image,
            "workdir": "/work",
            "instruction": "Make /work/done.",
            "model": {"name": "scripted/replies.yaml"},
            "checklist": [{"name": "done", "probe": "test -e /target/work/done", "feedback": "not yet"}],
            **task,
        }
        (self.directory / "task.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
        self.launched.append(self.start("launch", str(self.directory / "task.yaml"), "--run-id", run_id))
        return run_id

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*CLI, *arguments],
            env={**os.environ, "ORCHESTRATOR_DATA_DIR": str(self.data_dir.root)},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options},
        )

    def does(self, *arguments: str, code: int = 0, given: str | None = None) -> str:
        """What a command says; it has ended with that exit code."""
        process = self.start(*arguments, stdin=subprocess.PIPE)
        said, _ = process.communicate(given, timeout=DEAD_S)
        assert process.returncode == code, said
        return said

    def json(self, *arguments: str) -> Any:
        return json.loads(self.does(*arguments, "--json"))

    def events(self, run_id: str) -> list[dict[str, Any]]:
        path = self.data_dir.root / "runs" / run_id / "events.jsonl"
        lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def until(self, run_id: str, kind: str, **fields: Any) -> dict[str, Any]:
        """The first event of that kind with these fields, once it stands in the log."""
        deadline = time.monotonic() + DEAD_S
        while time.monotonic() < deadline:
            for event in self.events(run_id):
                if event["kind"] == kind and fields.items() <= event.items():
                    return event
            time.sleep(0.03)
        raise AssertionError(f"no {kind} {fields} in {self.events(run_id)}")

    def ended(self, code: int) -> str:
        """What the launch said; the run has ended with that exit code."""
        said, _ = self.launched[-1].communicate(timeout=DEAD_S)
        assert self.launched[-1].returncode == code, said
        return said


@pytest.fixture
def operator(tmp_path: Path, data_dir: DataDir, base_image: str, engine: Engine) -> Iterator[Operator]:
    found = Operator(tmp_path, data_dir, base_image)
    yield found
    for process in found.launched:
        if process.poll() is None:
            process.kill()
            process.communicate()
    for run in data_dir.runs():
        found.does("verify", run.run_id)
        found.does("rm", run.run_id)


def test_an_operator_takes_a_driven_run_where_he_wants_it(operator: Operator) -> None:
    run_id = operator.launch(
        bash("echo 1 > a"),
        bash(f"echo 2 > a; {HELD}"),
        bash("cat a; echo slow", delay_s=6.0, cost=0.25),
        bash("cat a; sleep 0.2; touch begun2", delay_s=5.0),
        bash("ls; sleep 4; touch done"),  # the dropped answer of 6 s comes before the end
        SUBMIT,
    )
    follower = operator.start("log", run_id, "--follow") if operator.until(run_id, "run") else None
    assert follower is not None
    operator.until(run_id, "model_call", step=2)

    # The tool call is under way: what must wait for its end is busy after --wait, what need not is done at once.
    refused = operator.does("restore", run_id, "0", "--wait", "1", code=BUSY)
    assert "in the middle of a step" in refused and f"orchestrator stop {run_id}" in refused
    lines = len(operator.events(run_id))
    assert operator.does("exec", run_id, "--", "sh", "-c", "cat a; touch mine; exit 3", code=3) == "2\n"
    assert len(operator.events(run_id)) == lines, "it moved nothing"
    assert operator.does("shell", run_id, given="id -u; touch go\n") == "0\n"
    held = operator.until(run_id, "tool_call", step=2)
    assert held["shared"] and "/work/mine" in [change["path"] for change in held["files_changed"]]

    # The model is thinking: a checkpoint, then a restore; the answer that comes late belongs to no path.
    operator.until(run_id, "checkpoint", step=2)
    taken = operator.json("checkpoint", run_id, "--note", "by hand")
    assert (taken["kind"], taken["note"], taken["head"]) == ("manual", "by hand", True)
    restored = operator.json("restore", run_id, "1")
    assert restored["container"] == restored["previous_container"] == f"orchestrator-{run_id}"
    operator.until(run_id, "restore", breakpoint_id=1)
    operator.until(run_id, "checkpoint", parent_seq=operator.until(run_id, "restore")["seq"])

    # And again while it thinks on the new path, now with a memory.
    rewound = operator.json("rewind", run_id, "1", "--memory", "leave a alone")
    assert (rewound["breakpoint_id"], rewound["memory"]) == (1, "leave a alone")
    assert "succeeded" in operator.ended(0)

    events = operator.events(run_id)
    results = [event["result"] for event in events if event["kind"] == "tool_call" and event["name"] == "bash"]
    assert results[-1] == "a\nexit code 0", "neither begun nor go nor mine is there any more"
    assert not any("slow" in json.dumps(event["messages"]) for event in events)
    dropped = [event for event in events if event["kind"] == "engine_error"]
    assert 0.25 in [event["cost_usd"] for event in dropped]
    rewind = next(event for event in events if event["kind"] == "rewind")
    assert '"memory": "leave a alone"' in rewind["messages"][0]["content"]
    rows = operator.json("breakpoints", run_id)
    sibling = next(row for row in rows if row["note"] == "by hand")
    assert not sibling["live"]
    followed, _ = follower.communicate(timeout=DEAD_S)
    assert follower.returncode == 0
    assert followed.count("\n") == len(events) and "leave a alone" in followed and "end" in followed.splitlines()[-1]

    # Nobody drives it: the sibling is restored in a new container, by two commands at once, one after the other.
    both = [operator.start("restore", run_id, str(sibling["breakpoint_id"]), "--json") for _ in range(2)]
    answers = [json.loads(process.communicate(timeout=DEAD_S)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [answer["previous_container"] for answer in answers].count(None) == 1
    assert operator.does("exec", run_id, "--", "cat", "a") == "2\n"


@pytest.mark.parametrize("under_way", ["tool", "model"])
def test_stop_answers_within_five_seconds(operator: Operator, under_way: str, engine: Engine) -> None:
    slow = bash("true", delay_s=60) if under_way == "model" else bash("touch /x; sleep 60 & sleep 60")
    run_id = operator.launch(bash("touch a"), slow, keep=under_way == "model")
    if under_way == "model":
        operator.until(run_id, "checkpoint", step=1)
    else:
        operator.until(run_id, "model_call", step=2)
        time.sleep(0.3)
    began = time.monotonic()
    answer = operator.json("stop", run_id)
    assert time.monotonic() - began < 5
    assert (answer["status"], answer["reason"]) == ("stopped", "user")
    operator.ended(1)
    kept = [container.name for container in engine.list_ours(run_id=run_id)]
    assert bool(kept) == (under_way == "model") == (answer["container"] is not None)
    if under_way == "tool":
        cut = operator.until(run_id, "tool_call", step=2)
        assert cut["error"] == "stopped" and cut["duration_ms"] < 10_000
        assert "/x" in [change["path"] for change in cut["files_changed"]], "its last state is in a checkpoint"
    assert operator.json("stop", run_id)["status"] == "stopped", "it may be said twice"


def test_a_run_is_reached_while_its_container_is_set_up_and_begins_anew_after_a_stop(operator: Operator) -> None:
    gate = operator.directory / "gate"
    gate.mkdir()
    run_id = operator.launch(
        bash("cp begun done"),
        SUBMIT,
        setup=["echo x >> /work/begun; until test -e /gate/open; do sleep 0.05; done"],
        binds=[{"source": str(gate), "path": "/gate", "read_only": True}],
        keep=True,
    )
    operator.until(run_id, "run")
    deadline = time.monotonic() + DEAD_S
    while (
        operator.start("exec", run_id, "--", "test", "-e", "/work/begun").wait(DEAD_S) and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert "being set up" in operator.does("checkpoint", run_id, "--wait", "0.5", code=BUSY)
    began = time.monotonic()
    assert operator.json("stop", run_id)["status"] == "stopped"
    assert time.monotonic() - began < 5
    operator.ended(1)
    assert operator.json("breakpoints", run_id) == []
    (gate / "open").touch()
    assert "succeeded" in operator.does("resume", run_id)
    assert operator.does("exec", run_id, "--", "cat", "/work/done") == "x\n", "in a pristine container"


def test_the_wall_time_ends_a_tool_call_in_its_middle(operator: Operator) -> None:
    more = [bash("test -e /x && touch done"), SUBMIT]
    run_id = operator.launch(bash("touch /x; sleep 60"), *more, limits={"wall_time_s": 8})
    said = operator.ended(1)
    assert "failed (limit_time)" in said
    cut = operator.until(run_id, "tool_call", step=1)
    assert cut["error"] == "limit_time" and cut["after"] is not None
    assert operator.json("breakpoints", run_id)[-1]["note"] == "the end: failed"
    assert "succeeded" in operator.does("resume", run_id, "--raise-limit", "wall_time_s=90")


def test_a_dead_owner_is_replaced_within_seconds_and_a_living_one_never(operator: Operator) -> None:
    run_id = operator.launch(bash("touch a"), bash(HELD), keep=True)
    operator.until(run_id, "model_call", step=2)
    owner = operator.launched[-1]
    owner.send_signal(signal.SIGSTOP)  # alive, and yet it does not answer
    said = operator.does("restore", run_id, "1", "--wait", "1", code=BUSY)
    assert "does not answer" in said
    owner.send_signal(signal.SIGCONT)
    owner.kill()
    owner.communicate()
    began = time.monotonic()
    assert operator.json("restore", run_id, "1")["breakpoint_id"] == 1
    assert time.monotonic() - began < 10
    assert operator.does("exec", run_id, "--", "ls", "/work") == "a\n"
    rewound = operator.json("rewind", run_id, "0", "--memory", "start anew")
    assert rewound["breakpoint_id"] == 0 and operator.does("exec", run_id, "--", "ls", "/work") == ""
    assert operator.json("stop", run_id)["status"] == "stopped"


def test_a_shell_on_a_terminal_runs_in_the_container(operator: Operator) -> None:
    manual = {"name": "m", "image": operator.image, "agent": {"kind": "manual"}, "workdir": "/work"}
    (operator.directory / "task.yaml").write_text(yaml.safe_dump(manual), encoding="utf-8")
    operator.does("launch", str(operator.directory / "task.yaml"), "--run-id", "box")
    here, there = pty.openpty()
    process = operator.start("shell", "box", stdin=there, stdout=there, stderr=there)
    os.close(there)
    typed = "tty; touch /work/mine; pwd; exit 4\n"
    os.write(here, typed.encode())
    heard = b"".join(iter(lambda: _read(here), b"")).decode()
    assert process.wait(DEAD_S) == 4
    os.close(here)
    assert "/dev/pts/" in heard and "/work\r\n" in heard
    assert operator.json("checkpoint", "box")["files_changed"] >= 1
    assert operator.does("exec", "box", "--", "ls", "/work") == "mine\n"
    assert operator.does("shell", "box", given="kill -9 $$\n", code=137) == ""
    assert operator.json("stop", "box")["status"] == "stopped"


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # EIO: the last process has closed its end
        return b""


def test_an_interrupt_by_sigterm_leaves_the_container(operator: Operator, engine: Engine) -> None:
    run_id = operator.launch(bash("touch a"), bash(HELD))
    operator.until(run_id, "model_call", step=2)
    operator.launched[-1].terminate()
    assert "interrupted (user)" in operator.ended(130)
    assert engine.list_ours(run_id=run_id)
    assert operator.json("stop", run_id)["status"] == "stopped"
    assert not engine.list_ours(run_id=run_id)


def test_a_manual_run_whose_processes_and_container_come_and_go(operator: Operator, engine: Engine) -> None:
    manual = {"name": "m", "image": operator.image, "agent": {"kind": "manual"}, "workdir": "/work"}
    (operator.directory / "task.yaml").write_text(yaml.safe_dump(manual), encoding="utf-8")
    operator.does("launch", str(operator.directory / "task.yaml"), "--run-id", "box")
    operator.does("exec", "box", "--", "sh", "-c", "sleep 4321 & echo 1 > a")
    taken = operator.json("checkpoint", "box")["breakpoint_id"]
    operator.does("exec", "box", "--", "sh", "-c", "(while :; do date >> /tick; sleep 0.1; done) & echo 2 > a")

    # What was started after the breakpoint is gone, what ran at it is named, and neither writes into the old state.
    restored = operator.json("restore", "box", str(taken))
    assert any("sleep" in name for name in restored["processes"]["missing"])
    assert operator.does("exec", "box", "--", "sh", "-c", "cat a; ls /tick", code=2).startswith("1\n")
    assert "sleep" not in operator.does("exec", "box", "--", "ps", "-e", "-o", "args=")

    # Of one that has stopped only the files are there, which is said; of one that is gone nothing is captured.
    engine.kill("orchestrator-box")
    assert "not running" in operator.does("exec", "box", "--", "true", code=6)
    assert "coverage incomplete" in operator.does("checkpoint", "box")
    engine.remove("orchestrator-box")
    rows = len(operator.json("breakpoints", "box"))
    assert "is gone" in operator.does("checkpoint", "box", code=6)
    assert len(operator.json("breakpoints", "box")) == rows
    assert operator.json("restore", "box", str(taken))["container"] == "orchestrator-box"
    assert operator.does("exec", "box", "--", "cat", "a") == "1\n"
    assert operator.json("stop", "box")["reason"] == "user"
