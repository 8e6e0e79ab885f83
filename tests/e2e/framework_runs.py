"""What tests of agents of other frameworks share: opening a run, and how it must have gone."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.recording.run import RecordedRun
from tests.e2e.provider_server import ProviderServer
from tests.e2e.scripted_damage import MEMORY
from tests.e2e.test_endpoints import _keys  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """mini-swe-agent greets at import; LangChain would report to its makers if a key were set."""
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.delenv("LANGSMITH_API_KEY", raising=False)


def went_back_and_finished(run: RecordedRun, server: ProviderServer, answered: int = 2) -> None:
    """Two calls were answered from the log, three made; the memory was in the request, and the container is whole."""
    assert run.execution is not None and (run.execution.answered, run.execution.made) == (answered, 3)
    assert len(server.requests) == 5
    assert sum(event.kind == "tool_start" for event in run.session.log.events) == 4
    before, after = (server.requests[at].json["messages"] for at in (1, 3))
    assert after[:-1] == before and after[-1]["role"] == "user" and MEMORY in after[-1]["content"]
    assert run.exec("cat /srv/work/notes").output == b"one\ntwo\n"


def nothing_new(run: RecordedRun, server: ProviderServer) -> None:
    """The whole path was answered from the log."""
    assert run.execution is not None and run.execution.made == 0 and len(server.requests) == 5


def chat_model(server: ProviderServer, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="m", base_url=f"{server.url}/v1", **options)


def conversation(state: Any) -> list[tuple[str, Any, Any]]:
    """Without the ids that the framework makes up."""
    return [(one.type, one.content, getattr(one, "tool_calls", None)) for one in state["messages"]]
