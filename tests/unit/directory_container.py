"""A run without an engine: commands run in a directory, snapshots are in memory, the model is a script.

`DirectoryContainer` keeps the contract of ``orchestrator.run_container``, as the real one does: commands and their
results, the target of a driver, kill and start. Everything else of a `Bench` is the product's own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import yaml

from orchestrator.answer import BoundedOutput
from orchestrator.checks import CheckResult, Submission, run_checklist
from orchestrator.context_log import ContextLog
from orchestrator.events import Event, Message
from orchestrator.launcher import Cut, ExecResult, never
from orchestrator.model import Model
from orchestrator.observer import Observer
from orchestrator.runner import RunResult, run
from orchestrator.session import Session
from orchestrator.task import CheckSpec, LoadedTask, load_task
from snapshot_drivers.base import Mount, SnapshotDriver, Target
from snapshot_drivers.memory import MemoryDriver


class DirectoryContainer:
    """A directory in which shell commands run, with itself as their working directory."""

    def __init__(self, root: Path, run_id: str) -> None:
        root.mkdir(exist_ok=True)
        self.root = root
        self.name = f"orchestrator-{run_id}"
        self.container_id = "0" * 64
        self.exec_lock = threading.RLock()
        self.removed = False
        self.mounts: tuple[Mount, ...] = ()
        self.starts = 0
        self.fail_next_start: Exception | None = None
        self._groups: set[int] = set()

    def target(self) -> Target:
        """As the engine would state it."""
        return Target(
            run_id=self.name,
            container_id=self.container_id,
            init_pid=os.getpid(),
            engine_root=self.root.parent,
            storage_driver="directory",
            upper_hint=self.root,
            freeze_group=f"/{self.name}",
            image_id="sha256:0",
            layer_ids=(),
            architecture="amd64",
            mounts=self.mounts,
            etc_files=(),
            etc_is_new=False,
            lifecycle=self,
        )

    def kill(self) -> None:
        """See ``Lifecycle``."""
        for group in self._groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self._groups.clear()

    def start(self) -> int:
        """See ``Lifecycle``; fails once where a test wants it to."""
        self.starts += 1
        error, self.fail_next_start = self.fail_next_start, None
        if error is not None:
            raise error
        return os.getpid()

    def exec(
        self,
        command: str | Sequence[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 300.0,
        output_limit_bytes: int = 16_000,
        cut: Cut = never,
    ) -> ExecResult:
        """Runs as the tests' own user, whoever ``user`` is."""
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        output = BoundedOutput(output_limit_bytes)
        began = time.monotonic()
        written = self.root.parent / f"output-{self.starts}-{time.monotonic_ns()}"
        with written.open("w+b") as stream:
            process = subprocess.Popen(
                argv,
                cwd=self.root,
                env={"PATH": os.environ["PATH"], **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
            self._groups.add(process.pid)
            reason: str | None = None
            while process.poll() is None and reason is None and time.monotonic() < began + timeout_s:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(0.02, timeout_s))
                reason = cut()
            timed_out = process.poll() is None
            if timed_out:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            stream.seek(0)
            output.add(stream.read())
        written.unlink()
        kept, dropped = output.value()
        code = process.returncode
        return ExecResult(
            exit_code=None if timed_out else code if code >= 0 else 128 - code,
            output=kept,
            truncated_bytes=dropped,
            timed_out=timed_out and reason is None,
            duration_ms=(time.monotonic() - began) * 1000,
            left_running=not timed_out and _has_members(process.pid),
            cut=reason if timed_out else None,
        )

    def background(
        self,
        command: str | Sequence[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> int | None:
        """Left running."""
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        null = subprocess.DEVNULL
        process = subprocess.Popen(argv, cwd=self.root, stdin=null, stdout=null, stderr=null, start_new_session=True)
        self._groups.add(process.pid)
        return process.pid

    def other_processes(self) -> int:
        """Groups of commands in which something goes on."""
        return sum(_has_members(group) for group in self._groups)

    def commands(self) -> list[str]:
        """Nobody here asks for them."""
        return []

    def remove(self) -> None:
        """The directory stays: a test looks at it."""
        self.kill()
        self.removed = True


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class Recorder(Observer):
    """Keeps what it was told, with the time."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, Event | str]] = []

    def event(self, event: Event) -> None:
        """See ``Observer``."""
        self.seen.append((time.monotonic(), event))

    def thinking(self, step: int) -> None:
        """See ``Observer``."""
        self.seen.append((time.monotonic(), f"thinking {step}"))


Replies = list[dict[str, Any]]


class Bench:
    """A task, a script, and the session of one run in a temporary directory."""

    def __init__(
        self,
        directory: Path,
        replies: Replies,
        *,
        driver: Callable[[Path], SnapshotDriver] = MemoryDriver,
        environ: Mapping[str, str] | None = None,
        **task: Any,
    ) -> None:
        """``task``: keys of the task file beside the ones that every task has."""
        self.directory = directory
        (directory / "replies.yaml").write_text(yaml.safe_dump(replies), encoding="utf-8")
        text: dict[str, Any] = {
            "name": "bench",
            "image": "none",
            "instruction": "Make the file done.",
            "model": {"name": "scripted/replies.yaml"},
            "checklist": [{"name": "done", "scratch": "test -e done", "feedback": "The file done is missing."}],
            **task,
        }
        (directory / "task.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
        self.loaded: LoadedTask = load_task(directory / "task.yaml", environ=environ or {})
        self.container = DirectoryContainer(directory / "root", "bench")
        self.driver = driver(directory / "store")
        self.recorder = Recorder()
        self.pauses: list[float] = []
        self.model = Model(self.loaded.spec.model, directory, sleep=self.pauses.append, jitter=lambda: 0.0)  # type: ignore[arg-type]
        self.session = self.open()

    def open(self) -> Session:
        """The run, opened as a process would that finds it there; the first time it begins."""
        log = ContextLog.open(self.directory / "events.jsonl", "bench", writer=True)
        resources = ExitStack()
        resources.callback(log.close)
        session = Session(
            self.loaded,
            log,
            self.container,
            self.driver,
            check=lambda session: self.check(session.cut),
            observer=self.recorder,
            resources=resources,
        )
        if not log.events:
            session.begin()
        return session

    def check(self, cut: Cut = never) -> Submission:
        """The checklist, on the directory itself."""

        def result(check: CheckSpec) -> CheckResult:
            done = self.container.exec(check.probe or check.scratch or "", timeout_s=check.timeout_s, cut=cut)
            return CheckResult(satisfied=done.exit_code == 0, exit_code=done.exit_code)

        return run_checklist(self.loaded.spec.checklist, probe=result, scratch=result, cut=cut)

    def run(self) -> RunResult:
        """Drive the run to its end."""
        with self.session:
            return run(self.session, self.model, self.recorder)

    @property
    def events(self) -> list[Event]:
        """As a reader finds them in the file."""
        return ContextLog.open(self.directory / "events.jsonl", "bench").events

    def of(self, kind: str) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.events if event.kind == kind]

    @property
    def requests(self) -> list[list[Message]]:
        """Messages of every request that the model received."""
        assert self.model.script is not None
        return self.model.script.requests


def bash(command: str, **more: Any) -> dict[str, Any]:
    """A reply that runs one command."""
    return {"calls": [{"name": "bash", "arguments": {"command": command}}], **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """One call of a reply."""
    return {"name": name, "arguments": arguments}


def rewind(breakpoint_id: int, memory: str = "that way fails") -> dict[str, Any]:
    """A reply that rewinds."""
    return {"calls": [call("backtrack_commit", breakpoint_id=breakpoint_id, memory_summary=memory)]}


SUBMIT: dict[str, Any] = {"calls": [{"name": "submit"}]}
