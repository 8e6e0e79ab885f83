"""What the commands answer: fields, exit codes, no traceback, nothing made by looking."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import diff as diff_command
from orchestrator.cli.main import main
from orchestrator.data_dir import DataDir
from snapshot_drivers.base import Change
from tests.unit.run_builder import RunBuilder

ROW_FIELDS = {
    "breakpoint_id", "parent_id", "kind", "step", "created_at", "driver", "snapshot_id", "live", "head", "note",
    "progress", "files_changed", "capture_ms", "waited_ms", "stored_bytes", "coverage", "damaged",
    "collected",
}  # fmt: skip
HOSTILE = "[/foo] [link=https://x.invalid]y[/link] \x1b]52;c;x\x07 \u202e \udcff \x00"


class Cli:
    """Runs commands in this process on one data directory."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.place = DataDir(root)
        self._capsys = capsys

    def __call__(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        got = main([arguments[0], "--data-dir", str(self.place.root), *arguments[1:]])
        out, err = self._capsys.readouterr()
        assert got == code, (out, err)
        assert "Traceback" not in out + err
        return out, err

    def json(self, *arguments: str, code: int = 0) -> Any:
        out, _ = self(arguments[0], "--json", *arguments[1:], code=code)
        out.encode("ascii")
        return json.loads(out)

    def run(self, run_id: str = "r1", *, manual: bool = False) -> RunBuilder:
        self.place.open()
        directory = self.place.create_run(run_id, task_text="name: t\nimage: x\nagent: {kind: manual}\n")
        return RunBuilder(directory.events_path, run_id, manual=manual)


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "data", capsys)


@pytest.fixture
def rewound(cli: Cli) -> RunBuilder:
    run = cli.run()
    run.step("plan a", paths=["/etc/a"])
    run.step("plan b")
    run.submit(1)
    run.rewind(1, "b was wrong")
    run.step("plan c")
    run.end()
    return run


def test_looking_makes_no_data_directory(cli: Cli) -> None:
    assert cli.json("runs") == []
    assert "There are no runs yet" in cli("runs")[0]
    assert not cli.place.root.exists()


def test_runs_lists_what_each_run_is(cli: Cli, rewound: RunBuilder) -> None:
    (row,) = cli.json("runs")
    assert row["run_id"] == "r1"
    assert (row["task"], row["status"], row["reason"]) == ("t", "succeeded", "checklist")
    assert (row["breakpoints"], row["rewinds"], row["steps"]) == (4, 1, 3)
    assert row["progress"] == {"satisfied": 1, "total": 3}
    assert row["cost_usd"] == pytest.approx(0.03)
    out, _ = cli("runs")
    assert "r1" in out
    assert "succeeded (checklist)" in out


def test_breakpoints_have_the_stated_fields(cli: Cli, rewound: RunBuilder) -> None:
    rows = cli.json("breakpoints", "r1")
    assert all(set(row) == ROW_FIELDS for row in rows)
    assert [row["kind"] for row in rows] == ["model", "model", "before_rewind", "model"]
    assert [row["live"] for row in rows] == [True, True, False, True]
    assert [row["head"] for row in rows] == [False, False, False, True]
    assert rows[0]["coverage"] == {
        "complete": True,
        "items": [{"kind": "rootfs", "path": "/", "state": "captured", "reason": None}],
    }
    assert [row["breakpoint_id"] for row in cli.json("breakpoints", "r1", "--live")] == [0, 1, 3]
    assert "before_rewind" in cli("breakpoints", "last")[0]


def test_show_tells_totals_and_where_the_run_stands(cli: Cli, rewound: RunBuilder) -> None:
    found = cli.json("show", "r")
    assert found["head"] == 3
    assert found["usage"]["total_tokens"] == 45
    assert found["unfinished"] is None
    assert "breakpoint 3" in cli("show", "r1")[0]


def test_the_log_shows_all_the_live_path_or_the_conversation(cli: Cli, rewound: RunBuilder) -> None:
    assert len(cli.json("log", "r1")) == len(rewound.events)
    kinds = [event["kind"] for event in cli.json("log", "r1", "--live")]
    assert kinds == ["run", "checkpoint", "model_call", "tool_call", "checkpoint", "rewind", "checkpoint",
                     "model_call", "tool_call"]  # fmt: skip
    contents = [message["content"] for message in cli.json("log", "r1", "--messages")]
    assert contents == ["be good", "fix it", "plan a", "ok", "b was wrong", "plan c", "ok"]
    assert "plan b" in cli("log", "r1")[0]
    assert "plan b" not in cli("log", "r1", "--messages")[0]


def test_a_driven_run_is_running_and_its_half_written_line_is_no_damage(cli: Cli, rewound: RunBuilder) -> None:
    with cli.place.run("r1").lock(), rewound.log.path.open("ab") as stream:
        stream.write(b'{"v":1')
        stream.flush()
        out, err = cli("runs", "--json")
        assert json.loads(out)[0]["status"] == "running"
        assert err == ""
    assert "torn" in cli("show", "r1")[1]


def test_damage_is_one_warning_with_file_and_line_and_the_rest_is_shown(cli: Cli, rewound: RunBuilder) -> None:
    path = rewound.log.path
    lines = path.read_bytes().split(b"\n")
    lines.insert(3, b"rubbish")
    path.write_bytes(b"\n".join(lines))
    out, err = cli("breakpoints", "r1", "--json")
    assert len(json.loads(out)) == 4
    assert err.splitlines() == [f"warning: {path}:4: not JSON (7 bytes)"]
    assert cli.json("show", "r1")["damage"] == [{"line_number": 4, "reason": "not JSON (7 bytes)"}]


def test_a_run_without_a_log_is_listed_with_the_reason(cli: Cli, rewound: RunBuilder) -> None:
    cli.place.create_run("broken", task_text="x")
    rows = {row["run_id"]: row for row in cli.json("runs")}
    assert "no such file" in rows["broken"]["error"]
    assert rows["r1"]["error"] is None
    assert cli.json("show", "broken", code=4)["error"]["type"] == "LogDamaged"


def test_hostile_text_everywhere_is_shown_harmlessly(cli: Cli) -> None:
    run = cli.run()
    run.checkpoint(note=HOSTILE)
    run.call(HOSTILE, tools=[HOSTILE])
    run.tool(HOSTILE, result=HOSTILE, arguments=HOSTILE, paths=[HOSTILE])
    run.note(HOSTILE)
    run.rewind(0, HOSTILE)
    run.end("failed", HOSTILE)
    for command in (["runs"], ["show", "r1"], ["breakpoints", "r1"], ["log", "r1"], ["log", "r1", "--messages"]):
        out, err = cli(*command)
        assert not {character for character in out + err if ord(character) < 32} - {"\n", "\t"}
        assert "\u202e" not in out
        assert "\udcff" not in out
    assert cli.json("log", "r1")[3]["result"] == HOSTILE
    out, _ = cli("log", "r1", "--messages")
    assert "[/foo] [link=https://x.invalid]y[/link]" in out


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "message"),
    [
        (["show", "nope"], 2, "UsageError", "no run 'nope'"),
        (["show", "../../etc"], 2, "UsageError", "no run"),
        (["show"], 2, "UsageError", "Missing argument"),
        (["show", "r1", "--frobnicate"], 2, "UsageError", "No such option"),
        (["breakpoints", "[/foo]\x1b"], 2, "UsageError", "no run"),
        (["validate", "/none/task.yaml"], 2, "TaskError", "no such file"),
        (["diff", "r1", "0", "99"], 2, "UsageError", "no breakpoint 99"),
        (["diff", "r1", "0", "x"], 2, "UsageError", "neither a breakpoint's id"),
        (["diff", "r1", "0", "image"], 2, "UsageError", "exchange them"),
    ],
)
def test_errors_have_a_type_a_message_and_an_exit_code(
    cli: Cli, rewound: RunBuilder, arguments: list[str], code: int, kind: str, message: str
) -> None:
    error = cli.json(*arguments, code=code)["error"]
    assert (error["type"], error["exit_code"]) == (kind, code)
    assert message in error["message"]
    out, err = cli(*arguments, code=code)
    assert out == ""
    assert err.startswith("error: ")
    assert "\x1b" not in err


def test_a_foreseen_nothing_is_no_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_self: DataDir) -> list[object]:
        raise ZeroDivisionError("[/x]\x1b")

    cli.place.open()
    monkeypatch.setattr(DataDir, "runs", broken)
    _, err = cli("runs", code=6)
    assert err.startswith("error: unexpected ZeroDivisionError: [/x]\\x1b")


def test_an_interrupt_is_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_self: DataDir) -> list[object]:
        raise KeyboardInterrupt

    cli.place.open()
    monkeypatch.setattr(DataDir, "runs", interrupted)
    assert cli.json("runs", code=130)["error"]["exit_code"] == 130


def test_validate_answers_the_task_without_secrets(cli: Cli, tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text("name: t\nimage: x\nagent: {kind: manual}\nenv: {A: {value: hunter22, secret: true}}\n")
    found = cli.json("validate", str(task))
    assert found["valid"] is True
    assert found["task"]["env"]["A"]["value"] == "<secret>"
    assert "valid" in cli("validate", str(task))[0]
    task.write_text("name: t\nimage: x\nagent: {kind: manual}\ncapabilities: {add: [SYS_ADMIN]}\n")
    assert cli.json("validate", str(task), code=3)["error"]["type"] == "Refused"
    cli("validate", str(task), "--trust-task")


def test_the_data_directory_comes_from_the_environment(
    cli: Cli, rewound: RunBuilder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_DATA_DIR", str(cli.place.root))
    assert main(["show", "last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == "r1"
    monkeypatch.delenv("ORCHESTRATOR_DATA_DIR")
    (cli.place.root.parent / "orchestrator").symlink_to(cli.place.root)
    monkeypatch.setenv("XDG_STATE_HOME", str(cli.place.root.parent))
    assert main(["show", "last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == "r1"


def test_drivers_and_version_and_help(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drivers", "--json"]) == 0
    assert "overlay" in {driver["name"] for driver in json.loads(capsys.readouterr().out)}
    for arguments in ([], ["--help"], ["--version"], ["restore", "--help"]):
        assert main(arguments) == 0
        assert "orchestrator" in capsys.readouterr().out


class StoredFiles:
    """The part of a driver that ``diff`` uses, over plain dicts."""

    def __init__(self, trees: dict[str | None, dict[str, bytes]]) -> None:
        self._trees = trees

    def diff(self, older_id: str | None, newer_id: str) -> list[Change]:
        older, newer = self._trees[older_id], self._trees[newer_id]
        changes = [Change(status="D", path=path) for path in older.keys() - newer.keys()]
        changes += [Change(status="A", path=path) for path in newer.keys() - older.keys()]
        changes += [Change(status="M", path=path) for path in older.keys() & newer.keys() if older[path] != newer[path]]
        return sorted(changes, key=lambda change: change.path)

    def read_file(self, snapshot_id: str, path: str) -> Any:
        content = self._trees[snapshot_id].get(path)
        return None if content is None else iter([content[:3], content[3:]])

    def close(self) -> None:
        pass


def test_diff_lists_files_and_shows_the_text_of_those_that_are_text(
    cli: Cli, rewound: RunBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees: dict[str | None, dict[str, bytes]] = {
        None: {"/etc/a": b"0\n"},
        "s-0": {"/etc/a": b"one\ntwo\n", "/gone": b"x", "/link": b"1"},
        "s-1": {"/etc/a": b"one\n2", "/bin": b"\x00", "/big": b"a" * 2**21, "/new\x1b": b"n\n", "/link": b"2"},
    }
    monkeypatch.setattr(diff_command, "_driver", lambda _place, _view: StoredFiles(trees))
    plain = cli.json("diff", "r1", "0", "1")
    assert [(change["status"], change["path"]) for change in plain["changes"]] == [
        ("A", "/big"), ("A", "/bin"), ("M", "/etc/a"), ("D", "/gone"), ("M", "/link"), ("A", "/new\x1b"),
    ]  # fmt: skip
    assert all(change["text"] is None for change in plain["changes"])
    found = {change["path"]: change for change in cli.json("diff", "r1", "0", "1", "--content")["changes"]}
    assert "-two\n+2\n\\ No newline at end of file\n" in found["/etc/a"]["text"]
    assert found["/bin"]["omitted"] == "binary"
    assert "larger than" in found["/big"]["omitted"]
    assert "-x" in found["/gone"]["text"]
    out, _ = cli("diff", "r1", "0", "1", "--content")
    assert "A /new\\x1b" in out
    from_image = cli.json("diff", "r1", "image", "0", "--content")["changes"]
    assert from_image[0]["omitted"] == "the image's own content is not stored"


def test_reading_commands_start_in_under_half_a_second(cli: Cli, rewound: RunBuilder) -> None:
    """Processor time, of the best of a few runs: the machine may be busy, the program may not be slow."""
    command = [sys.executable, "-m", "orchestrator.cli.main", "show", "r1", "--data-dir", str(cli.place.root)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.5, times


def test_reading_commands_import_nothing_heavy(cli: Cli, rewound: RunBuilder) -> None:
    code = (
        "import sys; from orchestrator.cli.main import main; main(sys.argv[1:])\n"
        "heavy = {'litellm', 'docker', 'requests', 'tenacity', 'openai', 'blake3', 'rich.live'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", code, "runs", "--data-dir", str(cli.place.root)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
