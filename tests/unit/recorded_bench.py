"""A recorded run in a temporary directory, with a harness that the test writes and the in-memory driver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from orchestrator.context_log import ContextLog
from orchestrator.desk import Desk
from orchestrator.events import Event
from orchestrator.recording.current_execution import current_execution
from orchestrator.recording.harness_call import Answer, Call
from orchestrator.recording.model_hook import call_model, call_model_async, model_asked, with_inserts
from orchestrator.recording.run import RecordedRun
from orchestrator.resume import put_at_head
from orchestrator.session import Session
from orchestrator.task import load_task_data
from snapshot_drivers.memory import MemoryDriver
from tests.unit.directory_container import DirectoryContainer, Recorder

Message = dict[str, Any]


class RecordedBench:
    """The session of one recorded run, and a model of which every request is kept."""

    def __init__(self, directory: Path, *, agent: dict[str, Any] | None = None, **task: Any) -> None:
        self.directory = directory
        keys = {"name": "bench", "image": "none", "agent": {"kind": "python", **(agent or {})}, **task}
        self.loaded = load_task_data(keys, source_dir=directory, environ={})
        self.container = DirectoryContainer(directory / "root", "bench")
        self.driver = MemoryDriver(directory / "store")
        self.recorder = Recorder()
        self.requests: list[list[Message]] = []
        """What the model received."""
        self.desk = Desk()
        self.session = self._open()
        self.run = RecordedRun(self.session, self.desk)

    def _open(self) -> Session:
        log = ContextLog.open(self.directory / "events.jsonl", "bench", writer=True)
        resources = ExitStack()
        resources.callback(log.close)
        session = Session(
            self.loaded,
            log,
            self.container,
            self.driver,
            check=lambda session: self._check(),
            observer=self.recorder,
            resources=resources,
        )
        if not log.events:
            session.begin()
        return session

    def _check(self) -> Any:
        raise AssertionError("no checklist here")

    def reopen(self, news: str | None = None) -> RecordedRun:
        """As another process would, after this one has died; it has ``news`` for the agent."""
        self.session.close()
        self.session = self._open()
        put_at_head(self.session, {})
        self.run = RecordedRun(self.session, self.desk, news=news)
        return self.run

    def ask(self, messages: list[Message], say: Callable[[list[Message]], str] | None = None, **parameters: Any) -> str:
        """A model call through the hook. ``say``: what it answers, else how many messages it got."""
        execution = current_execution()
        assert execution is not None

        def made(call: Call) -> str:
            text = self._said(messages, call, say)
            execution.end_model(call, _answer(text))
            return text

        return call_model(execution, _asked(messages, parameters), made, _again)

    async def ask_async(
        self, messages: list[Message], say: Callable[[list[Message]], Any] | None = None, **parameters: Any
    ) -> str:
        """As ``ask``; ``say`` may be awaited."""
        execution = current_execution()
        assert execution is not None

        async def made(call: Call) -> str:
            sent = with_inserts(messages, call.inserts, dict)
            self.requests.append(sent)
            text = f"answer to {len(sent)}" if say is None else await say(sent)
            execution.end_model(call, _answer(text))
            return str(text)

        return await call_model_async(execution, _asked(messages, parameters), made, _again_async)

    def _said(self, messages: list[Message], call: Call, say: Callable[[list[Message]], str] | None) -> str:
        sent = with_inserts(messages, call.inserts, dict)
        self.requests.append(sent)
        return say(sent) if say is not None else f"answer to {len(sent)}"

    @property
    def events(self) -> list[Event]:
        """As a reader finds them in the file."""
        return ContextLog.open(self.directory / "events.jsonl", "bench").events

    def of(self, kind: str) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.events if event.kind == kind]

    def sh(self, command: str) -> str:
        """A command in the container, as a tool would run it."""
        return self.run.exec(command).output.decode()


def _asked(messages: list[Message], parameters: dict[str, Any]) -> Any:
    return model_asked("bench.ask", "m", messages, [], parameters)


def _answer(text: str) -> Answer:
    return Answer({"text": text}, message={"role": "assistant", "content": text}, finish_reason="stop")


async def _again_async(call: Call, recorded: dict[str, Any]) -> str:
    return _again(call, recorded)


def _again(_call: Call, recorded: dict[str, Any]) -> str:
    return str(recorded["text"])
