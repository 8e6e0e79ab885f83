"""A scripted run in a process of its own that is killed at a chosen moment, resumed, and compared with a quiet one.

The processes are forked from a server that has imported everything: importing LiteLLM takes longer than the run does.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from orchestrator.cli.main import main
from orchestrator.context_log import ContextLog
from orchestrator.data_dir import DataDir
from orchestrator.engine import Engine
from orchestrator.events import Event, Message, ModelCallEvent, ToolCallEvent
from orchestrator.lineage import head, live_path, messages
from orchestrator.request import digest, sendable
from snapshot_drivers import crash_points
from snapshot_drivers.cgroups import hierarchies
from snapshot_drivers.freezer import Freezer
from tests.tree_walker import walk

KILLED = -signal.SIGKILL
THAWED_S = 5.0
_PROCESS_S = 120.0
_ENGINE_S = 10.0
EFFECTS = ["start", "first", "second", "third", "good", "done"]
"""What the run's commands append to a file in a volume, each once, less what the rewind undoes."""


def _bash(command: str) -> dict[str, Any]:
    return {"name": "bash", "arguments": {"command": command}}


_REPLIES: list[dict[str, Any]] = [
    {"say": "I begin.", "calls": [_bash("echo start >> /data/effects; sleep 600 & echo begun")]},
    {
        "say": "Three things at once.",
        "calls": [
            _bash("echo first >> /data/effects; sleep 0.3; echo first > /srv/first"),
            _bash("mkdir /opt/x && echo second > /opt/x/f && rm /etc/motd; echo second >> /data/effects"),
            _bash("ln /opt/x/f /opt/x/g && echo third >> /data/effects; ls /opt/x"),
        ],
    },
    {"say": "I try the bad way.", "calls": [_bash("rm -r /opt/x /srv/first; echo bad >> /data/effects; chmod 0 /var")]},
    {"say": "That was wrong.", "calls": [{"name": "backtrack_candidates"}]},
    {
        "say": "Back.",
        "calls": [
            {
                "name": "backtrack_commit",
                "arguments": {"breakpoint_id": "{candidate:bad way}", "memory_summary": "the bad way breaks /opt/x"},
            }
        ],
    },
    {"say": "The good way.", "calls": [_bash("echo good >> /data/effects; truncate -s 3M /srv/large; ls /opt/x")]},
    {"say": "Is it done?", "calls": [{"name": "submit"}]},
    {"say": "Now.", "calls": [_bash("touch /srv/done; echo done >> /data/effects"), {"name": "submit"}]},
]
_CHECKLIST = [
    {"name": "done", "probe": "sleep 0.2; test -e /target/srv/done", "feedback": "The file /srv/done is missing."},
    {"name": "effects", "scratch": "test $(wc -l < /data/effects) = 6", "feedback": "Something ran twice or never."},
]


class Ended(NamedTuple):
    """How a process ended, and what it printed."""

    code: int
    output: str


@dataclass
class Bench:
    """One data directory, in which runs are launched, killed, resumed and looked at."""

    data_dir: DataDir
    engine: Engine
    task: Path
    runs: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, data_dir: DataDir, engine: Engine, image: str, directory: Path) -> Bench:
        """With the task's files in ``directory``."""
        (directory / "replies.yaml").write_text(yaml.safe_dump(_REPLIES), encoding="utf-8")
        task = {
            "name": "kill",
            "image": image,
            "instruction": "Do what the script says.",
            "model": {"name": "scripted/replies.yaml"},
            "setup": ["echo set up >> /data/set-up; touch /etc/motd"],
            "volumes": [{"path": "/data"}],
            "checklist": _CHECKLIST,
            "keep": True,
        }
        path = directory / "task.yaml"
        path.write_text(yaml.safe_dump(task), encoding="utf-8")
        return cls(data_dir, engine, path)

    def launch(self, **options: Any) -> tuple[str, Ended]:
        """A new run's process has ended; ``options`` as for ``command``."""
        self.runs.append(f"kill-{secrets.token_hex(4)}")
        return self.runs[-1], self.command("launch", str(self.task), "--run-id", self.runs[-1], **options)

    def command(self, *words: str, crash_at: str | None = None, kill_after_s: float | None = None) -> Ended:
        """The orchestrator's process has ended: by itself, at the point of ``crash_at``, or killed after so long."""
        output = self.data_dir.root / f"output-{secrets.token_hex(4)}"
        arguments = [*words, "--data-dir", str(self.data_dir.root)]
        process = _FORKS.Process(target=_run, args=(arguments, crash_at, str(output)))
        process.start()
        process.join(kill_after_s if kill_after_s is not None else _PROCESS_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            assert kill_after_s is not None, f"{words} hangs: {output.read_text()[-2000:]}"
        assert process.exitcode is not None
        text = output.read_text(errors="replace") if output.exists() else ""
        output.unlink(missing_ok=True)
        return Ended(process.exitcode, text)

    def events(self, run_id: str) -> list[Event]:
        """The run's log."""
        path = self.data_dir.run(run_id).events_path
        return ContextLog.open(path, run_id).events if path.exists() else []

    def thawed_after_s(self, run_id: str) -> float:
        """How long the run's processes still stood after their owner's death."""
        began = time.monotonic()
        with Freezer(f"/orchestrator/{run_id}") as freezer:
            while freezer.is_frozen():
                assert time.monotonic() - began < THAWED_S, "still frozen"
                time.sleep(0.01)
        return time.monotonic() - began

    def outcome(self, run_id: str) -> Outcome:
        """What the run has come to; its container is still there."""
        found = self.engine.find(f"orchestrator-{run_id}")
        assert found is not None
        volume = Path(next(mount["Source"] for mount in found["Mounts"] if mount["Destination"] == "/data"))
        tree = walk(found["GraphDriver"]["Data"]["MergedDir"], _LEFT_OUT)
        return Outcome(
            context=[_plain(message) for message in last_request(self.events(run_id))],
            tree=[_ageless(line, self.data_dir) for line in [*tree, *walk(str(volume))]],
            effects=(volume / "effects").read_text().split(),
            results=[event.name for event in _path(self.events(run_id)) if isinstance(event, ToolCallEvent)],
        )

    def left_behind(self, run_id: str) -> list[str]:
        """What ``clean`` does not take of the run: containers, volumes, cgroups, mounts, processes.

        It is asked again for a while: the engine may still be serving the last request of a dead process.
        """
        deadline = time.monotonic() + _ENGINE_S
        while True:
            ended = self.command("clean", "--json")
            assert ended.code == 0, ended.output
            left = self._left(run_id)
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.5)

    def _left(self, run_id: str) -> list[str]:
        left = [container.name for container in self.engine.list_ours(run_id=run_id, data_dir=self.data_dir.root)]
        left += self.engine.list_our_volumes(run_id=run_id, data_dir=self.data_dir.root)
        for hierarchy in hierarchies():
            parent = hierarchy.directory("/orchestrator")
            left += [str(path) for path in parent.glob(f"{run_id}*") if path.is_dir()]
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        left += [line for line in mounts if str(self.data_dir.root) in line or run_id in line]
        shown = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        return left + [line for line in shown.splitlines() if run_id in line]

    def forget(self, run_id: str) -> None:
        """Nothing is left of the run, whatever became of it."""
        self.command("rm", run_id)


@dataclass(frozen=True)
class Outcome:
    """What two runs of the same script must have in common, however often they were killed."""

    context: list[Message]
    """Messages of the last request, less what a restart adds."""
    tree: list[str]
    """The container's files and its volume's, by the independent walker."""
    effects: list[str]
    results: list[str]
    """Names of the tool calls on the live path."""


# Big, of the image, and no command of the script writes there; the rest of what the walker leaves out is the engine's.
_LEFT_OUT = (
    b"/usr", b"/proc", b"/sys", b"/dev", b"/etc/hosts", b"/etc/hostname", b"/etc/resolv.conf", b"/.dockerenv",
    b"/.orchestrator", b"/data",
)  # fmt: skip
_RESTARTED = re.compile(r"^The container was interrupted and has been started again;[^\n]*\n*")
_BREAKPOINT = re.compile(r'(rewound to breakpoint |"rewound_to_breakpoint": )\d+')


def last_request(events: list[Event]) -> list[Message]:
    """The messages of the run's last request, proven to be those by the digest of what was sent."""
    call = [event for event in events if isinstance(event, ModelCallEvent)][-1]
    assert call.parent_seq is not None
    found = messages(live_path(events, call.parent_seq))
    sent = {
        "model": call.model,
        "parameters": call.parameters,
        "tools": events[0].tools,  # type: ignore[union-attr]
        "messages": [sendable(message) for message in found],
    }
    assert digest(sent) == call.request_digest, "the log's context is not what was sent"
    return [message for message in found if not _only_restart(message)]


def _path(events: list[Event]) -> list[Event]:
    at = head(events)
    assert at is not None
    return live_path(events, at.seq)


def _only_restart(message: Message) -> bool:
    content = message.get("content")
    return message["role"] == "user" and isinstance(content, str) and _RESTARTED.sub("", content) == ""


def _plain(message: Message) -> Message:
    """Without what must differ: breakpoint numbers, and the word that the container was started again."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _BREAKPOINT.sub(r"\1N", _RESTARTED.sub("", content))}
    return message


def _ageless(line: str, data_dir: DataDir) -> str:
    """A walker's line; the time of what the run itself has written is its own."""
    path, mode, owner, mtime, rest = _FIELDS.fullmatch(line).groups()  # type: ignore[union-attr]
    born = os.stat(data_dir.root).st_ctime_ns - 3600 * 10**9
    return f"{path} {mode} {owner} {'new' if int(mtime) > born else mtime} {rest}"


_FIELDS = re.compile(r"(b'.*?'|b\".*?\") ([0-7]+) (\d+:\d+) (\d+) (.*)", re.DOTALL)


def _run(arguments: list[str], crash_at: str | None, output: str) -> None:
    """The child: as the command line would run it."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if crash_at is not None:
        point, _, passes = crash_at.partition(":")
        crash_points.arm(point, passes=int(passes or 0))
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_until(come: Callable[[], bool], within_s: float) -> None:
    """It has come."""
    until = time.monotonic() + within_s
    while not come():
        assert time.monotonic() < until
        time.sleep(0.02)


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.e2e.kill_preload"])
