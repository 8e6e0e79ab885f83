"""What is kept up to date event by event is what the whole log says, at every moment of it."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.events import Event
from orchestrator.lineage import next_breakpoint_id
from orchestrator.live_path import head, way_back
from orchestrator.standing import Standing
from orchestrator.totals import requests_lost_now, totals
from tests.unit.run_builder import RunBuilder


@cache
def long_run() -> tuple[Event, ...]:
    with tempfile.TemporaryDirectory() as place:
        return tuple(_long_run(RunBuilder(Path(place) / "events.jsonl")))


def _long_run(run: RunBuilder) -> list[Event]:
    for number in range(3):
        run.step(f"step {number}", paths=[f"/f{number}"])
    run.submit(1)
    run.submit(1)
    run.rewind(1)
    run.note("a note")
    run.step("again")
    run.submit(3, failed=None)
    run.restore(2)
    run.end("interrupted", None)
    run.step("after all")
    run.close()
    return run.events


@settings(max_examples=40, deadline=None)
@given(lost=st.sets(st.integers(0, 40), max_size=4), cuts=st.sets(st.integers(0, 40), max_size=6))
def test_standing_says_what_the_whole_log_says(lost: set[int], cuts: set[int]) -> None:
    """Also of a log with damaged lines, whatever is asked in between."""
    events = [event for event in long_run() if event.seq not in lost]
    growing: list[Event] = []
    standing = Standing(growing)
    for number, event in enumerate(events):
        growing.append(event)
        if number in cuts or number == len(events) - 1:
            at = head(growing)
            assert standing.head is at
            assert standing.totals() == totals(growing)
            assert standing.requests_lost_now() == requests_lost_now(growing)
            assert standing.newest_checkpoint[0] + 1 == next_breakpoint_id(growing)
            if at is not None:
                assert list(standing.way_back(at.seq)) == list(way_back(growing, at.seq))
