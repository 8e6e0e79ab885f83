"""Where conversation or snapshot of a breakpoint is damaged, neither half moves; the rest can be restored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.errors import LogDamaged
from orchestrator.events import RewindIntentEvent
from orchestrator.live_path import unfinished_intent
from orchestrator.session import Session
from snapshot_drivers.errors import SnapshotError
from tests.tree_walker import walk
from tests.unit.directory_container import SUBMIT, Bench, bash, call, rewind

WORK = [bash("echo 1 > a"), bash("echo 2 > a"), bash("echo 3 > a; touch done"), SUBMIT]


@pytest.fixture
def worked(tmp_path: Path) -> Bench:
    """Breakpoints 0 to 4: the file a holds the number of the breakpoint, at most 3."""
    bench = Bench(tmp_path, WORK, keep=True)
    assert bench.run().status == "succeeded"
    return bench


def damage(bench: Bench, kind: str, count: int) -> int:
    """The line of the ``count``-th event of that kind is rubbish; its number."""
    path = bench.directory / "events.jsonl"
    lines = path.read_bytes().split(b"\n")
    number = [index for index, line in enumerate(lines) if line and json.loads(line)["kind"] == kind][count]
    lines[number] = b"#" * len(lines[number])
    path.write_bytes(b"\n".join(lines))
    return number + 1


def state(bench: Bench) -> tuple[list[str], int]:
    return walk(str(bench.container.root)), len((bench.directory / "events.jsonl").read_bytes())


def test_a_breakpoint_whose_conversation_is_damaged_moves_neither_half(worked: Bench) -> None:
    damage(worked, "tool_call", 1)
    before = state(worked)
    with worked.open() as session:
        for breakpoint_id in (2, 3):
            with pytest.raises(LogDamaged, match="cannot be read"):
                session.restore(breakpoint_id)
    assert state(worked) == before


def test_breakpoints_from_before_the_damage_can_be_restored_and_gone_on_from(worked: Bench) -> None:
    damage(worked, "tool_call", 1)
    with worked.open() as session:
        session.restore(1)
        assert (worked.container.root / "a").read_text() == "1\n"
        assert [message["role"] for message in session.journal.conversation()] == [
            "system",
            "user",
            "assistant",
            "tool",
        ]
        assert session.checkpoint("again").breakpoint_id == 6, "5 is the state before the restore"
        session.restore(6)
    assert unfinished_intent(worked.events) is None


def test_a_damaged_checkpoint_is_said_to_be_damaged_and_its_number_stays_its_own(worked: Bench) -> None:
    damage(worked, "checkpoint", -1)
    with worked.open() as session:
        assert session.checkpoint("next").breakpoint_id == 5
        with pytest.raises(LogDamaged, match="breakpoint 4"):
            session.restore(4)
        session.restore(3)


def test_a_breakpoint_whose_snapshot_is_gone_moves_neither_half(worked: Bench) -> None:
    target = worked.of("checkpoint")[1]
    worked.driver.forget(target.after)
    before = state(worked)
    with worked.open() as session:
        with pytest.raises(SnapshotError):
            session.restore(target.breakpoint_id)
        assert state(worked) == before
        session.restore(2)
    assert (worked.container.root / "a").read_text() == "2\n"


def test_the_agent_is_not_offered_a_breakpoint_whose_snapshot_is_gone(tmp_path: Path) -> None:
    listing = {"calls": [call("backtrack_candidates")]}
    bench = Bench(
        tmp_path, [bash("echo 1 > a"), bash("rm a"), listing, rewind(1), bash("touch done"), SUBMIT], keep=True
    )
    original = bench.recorder.event

    def forget(event: object) -> None:
        original(event)  # type: ignore[arg-type]
        if getattr(event, "kind", "") == "checkpoint" and getattr(event, "breakpoint_id", None) == 2:
            bench.driver.forget(bench.of("checkpoint")[1].after)

    bench.recorder.event = forget  # type: ignore[method-assign, assignment, unused-ignore]
    assert bench.run().status == "succeeded"
    listed = next(event.result for event in bench.of("tool_call") if event.name == "backtrack_candidates")
    assert [json.loads(line)["breakpoint_id"] for line in listed.splitlines() if line.startswith("{")] == [2, 0]
    refused = next(event for event in bench.of("tool_call") if event.name == "backtrack_commit")
    assert "not rewound" in refused.result
    assert bench.of("rewind") == bench.of("rewind_intent") == []


def test_a_cut_off_restore_whose_breakpoint_has_been_damaged_is_undone(worked: Bench) -> None:
    with worked.open() as session:
        guard = session.checkpointer.checkpoint("before_rewind")
        target = worked.of("checkpoint")[1]
        session.journal.add(
            RewindIntentEvent(
                **session.journal.place(), before=guard.after, after=target.after, breakpoint_id=1, memory=None
            )
        )
    (worked.container.root / "a").write_text("half")
    damage(worked, "checkpoint", 1)
    with worked.open() as session:
        assert _finish(session) is None
        session.restore(0)
    assert unfinished_intent(worked.events) is None


def _finish(session: Session) -> object:
    return session.rewinder.finish_unfinished()
