"""A hand-written loop around an SDK, in a real container: recorded, broken, taken back, finished, and repeated.

``ALL_FORMS=1`` tries every form of either SDK; without it two, since `test_recorded_answers` compares all forms.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator import instrument, recorded_run, resumed_run
from orchestrator.data_dir import DataDir
from orchestrator.engine import Engine
from orchestrator.recording.run import RecordedRun
from tests.e2e.case_cli import Cli
from tests.e2e.scripted_damage import MEMORY, TASK, damaging_model
from tests.e2e.test_endpoints import _keys  # noqa: F401 - a fixture
from tests.e2e.tool_loops import ToolLoop

pytestmark = pytest.mark.engine

ALL_FORMS = [(api, how) for api in ("openai", "litellm") for how in ("sync", "async", "stream", "async-stream")]
FORMS = ALL_FORMS if os.environ.get("ALL_FORMS") else [("openai", "sync"), ("litellm", "async-stream")]
Recorded = Callable[..., Any]


@pytest.fixture
def recorded(cli: Cli, base_image: str, engine: Engine, data_dir: DataDir) -> Recorded:
    """Opens a recorded run on the test's data directory; keywords are the keys of ``task.yaml``."""
    instrument("litellm", "openai")

    def open_run(run_id: str, **keys: Any) -> Any:
        task = {**TASK, "image": base_image, **keys}
        return recorded_run(task, run_id=run_id, data_dir=data_dir.root, engine=engine)

    return open_run


def drive(run: RecordedRun, loop: ToolLoop, how: str) -> list[Any]:
    if how.startswith("async"):
        return asyncio.run(run.drive_async(loop.run_async, run.instruction))
    return run.drive(loop.run, run.instruction)


def marks(run: RecordedRun, kind: str) -> int:
    """How many model calls or tools were begun: the log has a mark for each that was really made."""
    return sum(event.kind == f"{kind}_start" for event in run.session.log.events)


@pytest.mark.parametrize(("api", "how"), FORMS, ids=["-".join(form) for form in FORMS])
def test_a_loop_that_breaks_the_system_goes_back_and_finishes(
    recorded: Recorded, cli: Cli, engine: Engine, data_dir: DataDir, api: str, how: str
) -> None:
    stream = how.endswith("stream")
    with damaging_model(stream=stream) as server:
        with recorded("damage") as run:
            loop = ToolLoop(run, server, api, stream=stream)
            seen = drive(run, loop, how)
            assert run.execution is not None and (run.execution.answered, run.execution.made) == (2, 3)
            # Nothing before the breakpoint was asked or run again.
            assert len(server.requests) == marks(run, "model") == 5 and marks(run, "tool") == 4
            assert run.exec("cat /srv/work/notes").output == b"one\ntwo\n"
        assert run.result is not None and (run.result.status, run.result.rewinds) == ("succeeded", 1)
        # The request after the rewind is the one of its breakpoint, with the memory behind it; it stays there.
        before, after, last = (server.requests[at].json["messages"] for at in (1, 3, 4))
        assert after[:-1] == before and MEMORY in after[-1]["content"] and last[: len(after)] == after
        assert not any(MEMORY in str(message.get("content")) for message in loop.messages)
        # Another process finds the same without asking or running anything.
        with resumed_run("damage", data_dir=data_dir.root, engine=engine) as again:
            assert drive(again, ToolLoop(again, server, api, stream=stream), how) == seen
            assert len(server.requests) == 5 and marks(again, "tool") == 4
    rows = cli.json("breakpoints", "damage")
    # One for each of the five requests, the moment before the rewind, and the two ends.
    assert [row["kind"] for row in rows if row["note"] is None] == ["model"] * 5
    assert cli.json("verify", "damage")["whole"] is True


def test_restore_by_hand_then_the_program_again_goes_on_from_there(
    recorded: Recorded, cli: Cli, engine: Engine, data_dir: DataDir
) -> None:
    never = [{"name": "never", "probe": "false", "feedback": "There is no end."}]
    with damaging_model() as server:
        with recorded("by-hand", checklist=never) as run:
            drive(run, ToolLoop(run, server, "openai", stream=False), "sync")
        text = Path(data_dir.run("by-hand").events_path).read_text()
        assert "sk-very-secret" not in text and "Bearer" not in text
        _, said = cli("resume", "by-hand", code=2)
        assert "orchestrator.resumed_run('by-hand')" in said
        cli("restore", "by-hand", "1")
        assert cli("exec", "by-hand", "--", "cat", "/srv/work/notes")[0] == "one\n"
        server.replies[5:] = [server.replies[3], server.replies[4]]
        with resumed_run("by-hand", data_dir=data_dir.root, engine=engine) as run:
            drive(run, ToolLoop(run, server, "openai", stream=False), "sync")
            assert len(server.requests) == 7
            assert run.exec("cat /srv/work/notes").output == b"one\ntwo\n"
