"""Calls of several threads and tasks: in order and in their place in the log, and found again in a second pass."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from orchestrator.recording.tool_hook import tool
from snapshot_drivers.errors import EngineError
from tests.unit.recorded_bench import RecordedBench

USER = {"role": "user", "content": "go"}


def test_calls_of_several_tasks_find_their_recorded_ones_whatever_their_order(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)

    async def one(name: str, pauses: list[float]) -> list[str]:
        async def slowly(_sent: Any) -> str:
            await asyncio.sleep(pauses.pop(0))
            return f"{name}{len(pauses)}"

        return [await bench.ask_async([{"role": "user", "content": f"{name} {step}"}], slowly) for step in range(2)]

    async def harness() -> list[list[str]]:
        await bench.ask_async([USER])
        found = await asyncio.gather(one("a", [0.03, 0.0]), one("b", [0.0, 0.05]), one("c", [0.02, 0.02]))
        await bench.ask_async([USER, USER])
        return list(found)

    first = asyncio.run(bench.run.drive_async(harness))
    assert len(bench.requests) == 8
    # The first and the last request stand alone; of those in flight together only the first is a breakpoint.
    assert any(call.call.beside for call in bench.of("model_call"))
    bench.reopen()
    assert asyncio.run(bench.run.drive_async(harness)) == first
    assert len(bench.requests) == 8


def test_calls_of_several_threads_find_their_recorded_ones_and_stand_beside_each_other(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    barrier = threading.Barrier(3)
    wait = True

    def look(name: str) -> str:
        if wait:
            barrier.wait(30)
        return name.upper()

    looking = tool(look)

    def harness() -> list[str]:
        bench.ask([USER])
        with ThreadPoolExecutor(3) as pool:
            found = [pool.submit(copy_context().run, looking, name) for name in "abc"]
            answers = [one.result() for one in found]
        bench.ask([USER, USER])
        return answers

    assert bench.run.drive(harness) == ["A", "B", "C"]
    tools = bench.of("tool_call")
    assert len(tools) == 3 and all(one.shared for one in tools) and len({one.call.lane for one in tools}) == 3
    chain = {event.seq: event for event in bench.events}
    assert all(chain[one.parent_seq].after == one.before for one in tools)
    bench.reopen()
    wait = False
    assert bench.run.drive(harness) == ["A", "B", "C"] and len(bench.requests) == 2


def test_a_failure_of_the_engine_is_no_tools_result(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)

    def lost() -> Any:
        raise EngineError("the container is gone")

    def harness() -> None:
        bench.ask([USER])
        bench.session.exec = lambda *_args, **_options: lost()  # type: ignore[method-assign]
        with suppress(Exception):
            tool(lambda: bench.sh("true"), "sh")()

    with pytest.raises(EngineError, match="the container is gone"):
        bench.run.drive(harness)
    assert bench.of("tool_call") == []


def test_two_runs_in_one_process_do_not_mix(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    benches = {name: RecordedBench(tmp_path / name) for name in "ab"}
    barrier = threading.Barrier(2)

    def drive(name: str) -> None:
        def harness() -> None:
            for step in range(3):
                barrier.wait(30)
                benches[name].ask([{"role": "user", "content": f"{name}{step}"}])

        benches[name].run.drive(harness)

    threads = [threading.Thread(target=drive, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, bench in benches.items():
        asked = [message["content"] for message in bench.session.journal.conversation() if message["role"] == "user"]
        assert asked == [f"{name}{step}" for step in range(3)]


def test_a_call_waits_for_those_of_other_threads_that_were_made_before_it(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    first_asked, may_ask = threading.Event(), threading.Event()
    live: list[str] = []

    def other() -> None:
        may_ask.wait(30)
        bench.ask([{"role": "user", "content": "other"}])

    def harness() -> str:
        bench.ask([USER])
        thread = threading.Thread(target=copy_context().run, args=(other,))
        thread.start()
        if not first_asked.is_set():
            may_ask.set()
            thread.join()
            first_asked.set()
            may_ask.clear()
            return ""
        # The new call comes before the other thread has repeated its own.
        threading.Timer(0.2, may_ask.set).start()
        live.append(bench.ask([USER, USER]))
        thread.join()
        return live[0]

    bench.run.drive(harness)
    bench.reopen()
    assert bench.run.drive(harness) == "answer to 2" and len(bench.requests) == 3
