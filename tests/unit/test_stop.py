"""How a driven run ends before its work is done: by its operator, or by its wall time, in the middle of anything."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from orchestrator.wishes import StopWish
from tests.unit.directory_container import SUBMIT, Bench, bash
from tests.unit.driven_bench import driven


@pytest.mark.parametrize("under_way", ["tool", "model", "check"])
def test_stop_ends_the_run_whatever_is_under_way(tmp_path: Path, under_way: str) -> None:
    replies = {
        "tool": [bash("touch begun; sleep 60")],
        "model": [bash("touch begun"), bash("true", delay_s=60)],
        "check": [SUBMIT],
    }[under_way]
    check = "touch begun; sleep 60" if under_way == "check" else "test -e done"
    bench = Bench(tmp_path, replies, checklist=[{"name": "done", "scratch": check, "feedback": "not yet"}])
    with driven(bench) as it:
        it.begun()
        if under_way == "model":
            it.thinking(2)
        began = time.monotonic()
        answer = it.ask(StopWish())
        assert time.monotonic() - began < 5
    assert (answer["status"], answer["reason"], answer["container"]) == ("stopped", "user", None)
    assert bench.container.removed and bench.of("end")[0].status == "stopped"
    assert bench.of("checkpoint")[-1].after is not None, "the last state is in a checkpoint"
    assert bench.of("submission") == []
    if under_way == "model":
        assert "cost is not known" in bench.of("note")[-1].text
    else:
        cut = bench.of("tool_call")[-1]
        assert cut.error == "stopped" and "operator stopped" in cut.result and not cut.timed_out


def test_stop_leaves_the_container_where_the_task_keeps_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch begun; sleep 60")], keep=True)
    with driven(bench) as it:
        it.begun()
        assert it.ask(StopWish())["container"] == bench.container.name
    assert not bench.container.removed


@pytest.mark.parametrize("under_way", ["tool", "model"])
def test_the_wall_time_ends_what_is_under_way(tmp_path: Path, under_way: str) -> None:
    slow = bash("touch begun; sleep 60") if under_way == "tool" else bash("true", delay_s=60)
    bench = Bench(tmp_path, [slow, bash("touch done"), SUBMIT], limits={"wall_time_s": 1.0})
    began = time.monotonic()
    result = bench.run()
    assert time.monotonic() - began < 5
    assert (result.status, result.reason) == ("failed", "limit_time")
    assert bench.of("checkpoint")[-1].after is not None
    if under_way == "tool":
        assert bench.of("tool_call")[0].error == "limit_time"
        assert "wall time" in bench.of("tool_call")[0].result
