"""Head, live path, candidates, memories and totals follow from the log alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import LogDamaged, UsageError
from orchestrator.events import EngineErrorEvent, ModelCallEvent
from orchestrator.lineage import (
    candidates,
    checkpoints,
    find_checkpoint,
    head,
    left_open,
    live_path,
    memories_to_inject,
    messages,
    next_breakpoint_id,
    status,
    totals,
    tree,
    unfinished_intent,
)
from tests.unit.run_builder import RunBuilder


@pytest.fixture
def run(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path / "events.jsonl")


def conversation(run: RunBuilder) -> list[str]:
    return [str(message["content"]) for message in messages(live_path(run.events, run.head_seq()))]


def test_an_empty_log_has_no_head_and_no_candidates() -> None:
    assert head([]) is None
    assert candidates([]) == []
    assert checkpoints([]) == []
    assert totals([]).steps == 0


def test_the_head_moves_along_calls_tools_submissions_and_checkpoints_only(run: RunBuilder) -> None:
    run.step("a")
    at = run.head_seq()
    run.checkpoint("before_rewind")
    run.note("the operator says hello")
    run.add(EngineErrorEvent(step=1, parent_seq=at, text="gone"))
    run.intent(0)
    run.end("stopped", "user")
    assert run.head_seq() == at
    run.submit(1)
    run.checkpoint("manual")
    assert run.head_seq() == run.events[-1].seq


def test_a_late_answer_of_an_abandoned_stretch_does_not_move_the_head(run: RunBuilder) -> None:
    first = run.step("a")
    old = run.head_seq()
    run.rewind(first)
    at = run.head_seq()
    run.call("late", parent_seq=old)
    assert run.head_seq() == at


def test_a_note_with_messages_is_part_of_the_conversation(run: RunBuilder) -> None:
    run.checkpoint()
    run.call("")
    run.note("nudge", messages=[{"role": "user", "content": "say something"}])
    run.checkpoint()
    assert conversation(run)[-1] == "say something"


def test_after_a_rewind_the_conversation_is_the_breakpoints_plus_one_message(run: RunBuilder) -> None:
    run.step("one")
    target = run.checkpoint()
    at_breakpoint = conversation(run)
    run.call("two", tools=["bash"])
    run.tool(result="broken")
    run.step("three")
    run.rewind(target, "do not do two")
    assert conversation(run) == [*at_breakpoint, "do not do two"]
    run.step("four")
    assert conversation(run)[-2:] == ["four", "ok"]


def test_a_restore_by_hand_goes_back_without_a_message_even_to_what_a_rewind_left(run: RunBuilder) -> None:
    target = run.step("one")
    run.step("two")
    before = conversation(run)
    run.rewind(target)
    undo = checkpoints(run.events)[-1]
    assert undo.kind == "before_rewind"
    run.restore(undo.breakpoint_id)
    assert conversation(run) == before


def test_rows_tell_live_from_abandoned_and_the_newest_live_one_is_the_head(run: RunBuilder) -> None:
    for text in ("a", "b", "c"):
        run.step(text)
    run.rewind(1)
    run.step("d")
    rows = checkpoints(run.events)
    assert [(row.breakpoint_id, row.parent_id, row.kind, row.live, row.head) for row in rows] == [
        (0, None, "model", True, False),
        (1, 0, "model", True, False),
        (2, 1, "model", False, False),
        (3, 2, "before_rewind", False, False),
        (4, 1, "model", True, True),
    ]
    roots = tree(rows)
    assert [node.row.breakpoint_id for node in roots] == [0]
    assert [node.row.breakpoint_id for node in roots[0].children[0].children] == [2, 4]


def test_right_after_a_rewind_the_head_is_the_breakpoint_and_not_the_newest_checkpoint(run: RunBuilder) -> None:
    run.step("a")
    run.step("b")
    run.rewind(0)
    assert [row.breakpoint_id for row in checkpoints(run.events) if row.head] == [0]


def test_breakpoint_ids_are_never_used_again(run: RunBuilder) -> None:
    run.step("a")
    run.rewind(0)
    assert next_breakpoint_id(run.events) == 2
    with pytest.raises(UsageError, match="there are 0 to 1"):
        find_checkpoint(run.events, 7)


def test_candidates_are_the_restorable_ones_of_the_live_path_newest_first(run: RunBuilder) -> None:
    run.step("plan a", paths=["/etc/a"])
    run.step("", name="submit")
    run.submit(1)
    run.checkpoint(snapshot=False, error="capture failed")
    run.checkpoint("manual")
    run.call("plan b", tools=["bash", "bash"])
    run.tool(paths=["/etc/a", "/etc/b"])
    run.tool(files_changed_count=5)
    found = candidates(run.events)
    assert [item.breakpoint_id for item in found] == [3, 1, 0]
    newest, middle, oldest = found
    assert newest.about_to == "plan b"
    assert newest.tools_since == {"bash": 2}
    assert (newest.files_changed_since, newest.files) == (7, ["/etc/a", "/etc/b"])
    assert newest.progress is not None
    assert newest.progress.satisfied == 1
    assert middle.about_to == "submit {}"
    assert middle.progress is None
    assert oldest.tools_since == {"bash": 3, "submit": 1}
    assert oldest.files_changed_since == 7


def test_candidates_name_earlier_failures_and_what_was_tried_there(run: RunBuilder) -> None:
    run.step("first try")
    run.step("x")
    run.rewind(0, "first try breaks")
    run.step("second try")
    run.rewind(0, "second too")
    found = candidates(run.events)
    assert [item.breakpoint_id for item in found] == [0]
    assert found[0].earlier_failures == ["first try breaks", "second too"]
    assert found[0].about_to == "first try"
    assert found[0].tools_since == {}


def test_at_most_80_candidates_with_at_most_20_paths(run: RunBuilder) -> None:
    for number in range(90):
        run.step("a" * 500, paths=[f"/f{number}"])
    found = candidates(run.events)
    assert len(found) == 80
    assert found[0].breakpoint_id == 89
    assert len(found[-1].files) == 20
    assert found[-1].files_changed_since == 80
    assert len(found[0].about_to) == 200


def test_every_memory_that_the_context_lacks_is_injected_oldest_first(run: RunBuilder) -> None:
    for text in ("a", "b", "c"):
        run.step(text)
    run.rewind(2, "m1")
    run.step("d")
    run.rewind(1, "m2", shown=["m1", "m2"])
    run.step("e")

    def lacking(breakpoint_id: int) -> list[str]:
        path = live_path(run.events, find_checkpoint(run.events, breakpoint_id).seq)
        return [event.memory for event in memories_to_inject(run.events, path)]

    assert lacking(0) == ["m1", "m2"]
    assert lacking(1) == ["m1", "m2"]
    assert lacking(2) == ["m1", "m2"]
    last = checkpoints(run.events)[-1]
    assert lacking(last.breakpoint_id) == []
    abandoned = next(row for row in checkpoints(run.events) if row.parent_id == 2 and row.kind == "model")
    assert lacking(abandoned.breakpoint_id) == ["m2"]


def test_totals_count_the_whole_log_and_never_take_unknown_for_zero(run: RunBuilder) -> None:
    run.step("a")
    run.checkpoint()
    run.call("b", cost=None, usage=None)
    run.add(EngineErrorEvent(step=3, parent_seq=run.head_seq(), text="dropped", cost_usd=0.5))
    run.rewind(0)
    run.step("c")
    found = totals(run.events)
    assert found.steps == 4
    assert found.cost_usd == pytest.approx(0.52)
    assert found.cost_unknown == 1
    assert found.usage.total_tokens == 30
    assert found.usage.cached_tokens is None
    assert found.usage_unknown == 1
    assert found.rewinds == 1
    assert found.checkpoints == 4


def test_the_stuck_count_goes_on_across_rewinds_and_begins_anew_at_another_criterion(run: RunBuilder) -> None:
    run.step("a")
    for _ in range(2):
        run.submit(1, failed="x")
    run.rewind(0)
    run.submit(1, failed="x")
    assert totals(run.events).stuck_count == 3
    run.submit(2, failed="y")
    assert totals(run.events).stuck_count == 1
    run.submit(3, failed=None)
    assert totals(run.events).stuck_count == 0
    assert totals(run.events).submissions == 5


def test_an_intent_is_unfinished_until_the_move_is_done_called_off_or_the_run_went_on(run: RunBuilder) -> None:
    run.step("a")
    assert unfinished_intent(run.events) is None
    intent = run.intent(0)
    run.note("an unrelated note")
    assert unfinished_intent(run.events) == intent
    run.note("the container was put back", parent_seq=intent.seq)
    assert unfinished_intent(run.events) is None
    again = run.intent(0)
    assert unfinished_intent(run.events) == again
    run.step("b")
    assert unfinished_intent(run.events) is None
    run.rewind(0)
    assert unfinished_intent(run.events) is None


def test_status_and_who_left_the_run_open(run: RunBuilder, tmp_path: Path) -> None:
    run.step("a")
    assert status(run.events, True) == ("running", None)
    assert status(run.events, False) == ("interrupted", None)
    assert not left_open(run.events)
    run.end("failed", "stuck")
    assert status(run.events, False) == ("failed", "stuck")
    run.restore(0)
    assert status(run.events, False) == ("failed", "stuck")
    assert left_open(run.events)
    run.step("taken up again")
    assert status(run.events, False) == ("interrupted", None)
    assert not left_open(run.events)
    manual = RunBuilder(tmp_path / "m", manual=True)
    manual.checkpoint("manual")
    assert status(manual.events, False) == ("running", None)
    assert left_open(manual.events)
    manual.end("stopped", "user")
    assert not left_open(manual.events)
    assert status(manual.events, False) == ("stopped", "user")
    manual.restore(0)
    assert status(manual.events, False) == ("running", None)
    assert left_open(manual.events)


def test_a_path_with_a_hole_is_an_error_and_not_a_shorter_conversation(run: RunBuilder) -> None:
    run.step("a")
    run.step("b")
    holed = [event for event in run.events if not (isinstance(event, ModelCallEvent) and event.step == 1)]
    with pytest.raises(LogDamaged, match="cannot be read"):
        live_path(holed, run.head_seq())
    with pytest.raises(LogDamaged):
        candidates(holed)
    assert len(checkpoints(holed)) == 2
