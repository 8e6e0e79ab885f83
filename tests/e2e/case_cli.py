"""Our command line in this process, on a data directory of its own and the real engine, for tests."""

from __future__ import annotations

import json
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cli.main import main
from orchestrator.context_log import ContextLog
from orchestrator.data_dir import DataDir
from orchestrator.engine import Engine
from orchestrator.events import Event
from snapshot_drivers.cgroups import hierarchies
from tests.tree_walker import ENGINE_OWNED, walk

LEFT_OUT = (*ENGINE_OWNED, b"/.orchestrator")
SUBMIT: dict[str, Any] = {"calls": [{"name": "submit"}]}


def bash(command: str) -> dict[str, Any]:
    return {"calls": [{"name": "bash", "arguments": {"command": command}}]}


class Cli:
    """The command line in this process, on a data directory of its own."""

    def __init__(
        self, directory: Path, data_dir: DataDir, engine: Engine, image: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.directory = directory
        self.place = data_dir
        self.engine = engine
        self.image = image
        self._capsys = capsys

    def __call__(self, *words: str, code: int | None = 0) -> tuple[str, str]:
        """What a command said; ``code``: its exit code (``None``: any)."""
        # Before the command: what stands behind "--" is another program's.
        got = main([words[0], "--data-dir", str(self.place.root), *words[1:]])
        out, err = self._capsys.readouterr()
        assert code is None or got == code, (got, out, err)
        assert "Traceback" not in out + err
        return out, err

    def json(self, *words: str, code: int | None = 0) -> Any:
        return json.loads(self(words[0], "--json", *words[1:], code=code)[0])

    def task(self, **keys: Any) -> str:
        """Path of a task; of a manual agent unless ``model`` is given."""
        base: dict[str, Any] = {"name": "case", "image": self.image}
        if "model" not in keys:
            base["agent"] = {"kind": "manual"}
        path = self.directory / f"{secrets.token_hex(4)}.yaml"
        path.write_text(yaml.safe_dump(base | keys), encoding="utf-8")
        return str(path)

    def scripted(self, *replies: dict[str, Any], **keys: Any) -> str:
        """Path of a task whose agent follows a script."""
        script = self.directory / f"replies-{secrets.token_hex(4)}.yaml"
        script.write_text(yaml.safe_dump(list(replies)), encoding="utf-8")
        check = {"name": "done", "probe": "test -e /target/done", "feedback": "/done is missing"}
        keys = {"checklist": [check], **keys}
        return self.task(model={"name": f"scripted/{script.name}"}, instruction="Work.", **keys)

    def manual(self, **keys: Any) -> str:
        """Id of a run of a manual agent that stands at breakpoint 0."""
        run_id = new_id()
        assert self.json("launch", self.task(**keys), "--run-id", run_id)["status"] == "running"
        return run_id

    def sh(self, run_id: str, command: str, *, code: int = 0) -> str:
        return str(self.json("exec", run_id, "--", "sh", "-c", command, code=code)["output"])

    def checkpoint(self, run_id: str) -> int:
        return int(self.json("checkpoint", run_id)["breakpoint_id"])

    def events(self, run_id: str) -> list[Event]:
        return ContextLog.open(self.place.run(run_id).events_path, run_id).events

    def inspect(self, run_id: str) -> dict[str, Any]:
        return self.engine.inspect(f"orchestrator-{run_id}")

    def tree(self, run_id: str) -> list[str]:
        """The container as a whole, volumes and memory file systems too, by the independent walker."""
        return walk(f"/proc/{self.inspect(run_id)['State']['Pid']}/root", LEFT_OUT)

    def conversation(self, run_id: str) -> Any:
        return self.json("log", run_id, "--messages")

    def is_whole(self, run_id: str) -> bool:
        return bool(self.json("verify", run_id, "--content")["whole"])

    def left(self, run_id: str) -> list[str]:
        """What the host still has of the run beside its directory."""
        found = [one.name for one in self.engine.list_ours(run_id=run_id)] + self.engine.list_our_volumes(run_id=run_id)
        for kind in ("network", "volume", "container"):
            listed = docker(kind, "ls", "-q", *(["-a"] if kind == "container" else []), "--filter", f"name={run_id}")
            found += listed.split()
        for hierarchy in hierarchies():
            found += [str(path) for path in hierarchy.directory("/orchestrator").glob(f"*{run_id}*")]
            flat = hierarchy.directory("/orchestrator").parent
            found += [str(path) for path in flat.glob(f"*{run_id.replace('-', '')}*")]
        return found


def new_id() -> str:
    return f"case-{secrets.token_hex(4)}"


def docker(*words: str, check: bool = True) -> str:
    return subprocess.run(["docker", *words], check=check, capture_output=True, text=True).stdout.strip()


def until(come: Callable[[], object], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not come():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
