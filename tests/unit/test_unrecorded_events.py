"""A model of LangChain that makes events by itself is either recorded below them, or the run ends with a word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import UsageError
from tests.unit.recorded_bench import RecordedBench

USER = {"role": "user", "content": "go"}


def model_of(bench: RecordedBench, *, recorded_below: bool) -> Any:
    pytest.importorskip("langchain_core")
    from langchain_core.language_models.fake_chat_models import FakeListChatModel

    from orchestrator.adapters import langchain

    langchain.install()

    class Native(FakeListChatModel):
        def _stream_chat_model_events(self, messages: Any, **options: Any) -> Iterator[Any]:
            if recorded_below:
                bench.ask([USER])
            yield {"event": "message-start"}
            yield {"event": "message-finish"}

        async def _astream_chat_model_events(self, messages: Any, **options: Any) -> AsyncIterator[Any]:
            for event in self._stream_chat_model_events(messages):
                yield event

    return Native(responses=["hello"])


@pytest.mark.parametrize("is_async", [False, True])
def test_events_without_a_recorded_request_end_the_run(tmp_path: Path, is_async: bool) -> None:
    bench = RecordedBench(tmp_path)
    model = model_of(bench, recorded_below=False)

    async def read() -> None:
        async for _ in model._astream_chat_model_events([]):
            pass

    with pytest.raises(UsageError, match="Native streams events of its own"):
        bench.run.drive(lambda: asyncio.run(read()) if is_async else list(model._stream_chat_model_events([])))


def test_events_of_a_recorded_request_pass(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    model = model_of(bench, recorded_below=True)
    assert len(bench.run.drive(lambda: list(model._stream_chat_model_events([])))) == 2
