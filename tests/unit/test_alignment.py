"""The alignment rules of the design, one by one: each test fails when its rule is broken."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.events import CheckpointEvent, Event, ModelCallEvent
from orchestrator.live_path import head, live_path, messages, unfinished_intent
from orchestrator.model import Model
from orchestrator.recording.tool_hook import tool
from orchestrator.runner import run
from snapshot_drivers.base import (
    CoverageItem,
    CoverageState,
    StateKind,
)
from snapshot_drivers.errors import CaptureError, EngineError, RestoreError, RestoreRefused
from tests.tree_walker import walk
from tests.unit.directory_container import SUBMIT, Bench, bash, call, rewind
from tests.unit.recorded_bench import RecordedBench
from tests.unit.troubled_driver import Trouble, trouble

WORK: list[dict[str, Any]] = [
    bash("echo 1 > one"),
    {"calls": [call("bash", command="echo 2 > two"), call("bash", command="rm one")]},
    {"say": "thinking aloud"},
    rewind(1, "removing one was wrong"),
    bash("cat one two; touch done"),
    SUBMIT,
]


@pytest.fixture
def worked(tmp_path: Path) -> Bench:
    """A run that has worked, rewound and succeeded."""
    bench = Bench(tmp_path, WORK, keep=True)
    assert bench.run().status == "succeeded"
    return bench


def path_to(events: list[Event], event: Event) -> list[Event]:
    return live_path(events, event.seq)


def test_rule_1_every_request_has_a_breakpoint_with_its_context_and_snapshot(worked: Bench) -> None:
    calls: list[ModelCallEvent] = worked.of("model_call")
    assert len(calls) == len(worked.requests) == len(WORK)
    for request, answer in zip(worked.requests, calls, strict=True):
        breakpoint_taken = next(event for event in worked.events if event.seq == answer.parent_seq)
        assert isinstance(breakpoint_taken, CheckpointEvent) and breakpoint_taken.after is not None
        assert breakpoint_taken.breakpoint_id == answer.breakpoint_id
        context = messages(path_to(worked.events, breakpoint_taken))
        assert request == context, "the checkpoint's context is what the model was asked"
    assert len({event.breakpoint_id for event in worked.of("checkpoint")}) == len(worked.of("checkpoint"))


def test_rule_2_every_event_names_the_snapshots_around_it_and_they_join(worked: Bench) -> None:
    by_seq = {event.seq: event for event in worked.events}
    for event in worked.events:
        if event.kind in ("run", "note", "end", "model_start", "tool_start"):
            continue
        assert event.after is not None, event
        parent = by_seq[event.parent_seq]  # type: ignore[index]
        if event.kind in ("model_call", "checkpoint", "submission"):
            assert event.before == event.after
        if event.kind in ("model_call", "tool_call", "submission"):
            assert event.before == parent.after, "it starts where the last one ended"
        if event.kind == "rewind":
            assert event.after == parent.after
    for event in worked.of("tool_call"):
        if event.before == event.after:
            assert event.files_changed == []


def test_rule_3_a_line_stands_in_the_log_only_after_the_snapshot_that_it_names(tmp_path: Path) -> None:
    bench = Bench(tmp_path, WORK)
    driver = bench.driver
    original = bench.recorder.event
    unknown: list[str] = []

    def check(event: Event) -> None:
        for snapshot_id in (event.before, event.after):
            if snapshot_id is not None:
                driver.load(snapshot_id)
        if isinstance(event, ModelCallEvent):
            before = [old for old in bench.events if isinstance(old, CheckpointEvent)]
            if event.breakpoint_id not in [old.breakpoint_id for old in before]:
                unknown.append(f"answer {event.seq} before its checkpoint")
        original(event)

    bench.recorder.event = check  # type: ignore[method-assign, assignment, unused-ignore]
    assert bench.run().status == "succeeded"
    assert unknown == []
    order = [event.seq for event in bench.events if event.kind in ("checkpoint", "model_call")]
    assert order == sorted(order)


def test_rule_3_an_answer_whose_breakpoint_could_not_be_captured_is_dropped_with_its_cost(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch done", cost=0.25, usage={"prompt_tokens": 5})], driver=Trouble)
    with trouble(bench, fail_capture=CaptureError("no space left")):
        result = bench.run()
    assert (result.status, result.reason) == ("failed", "engine_error")
    assert bench.of("model_call") == [] and bench.of("checkpoint") == []
    failure = bench.of("engine_error")[0]
    assert "no space left" in failure.text and failure.cost_usd == 0.25
    assert result.cost_usd == 0.25
    assert not (bench.container.root / "done").exists(), "nothing is done without a way back"


def test_a_failed_capture_may_leave_a_breakpoint_that_is_never_offered(tmp_path: Path) -> None:
    replies = [bash("touch a"), {"calls": [call("backtrack_candidates")]}, rewind(0), bash("touch done"), SUBMIT]
    bench = Bench(tmp_path, replies, driver=Trouble, snapshots={"on_failure": "degrade"})
    with trouble(bench, fail_capture=CaptureError("no space left")):
        result = bench.run()
    assert (result.status, result.rewinds) == ("succeeded", 0)
    assert {event.error for event in bench.of("checkpoint")} == {"no space left"}
    assert not any(event.coverage.complete for event in bench.of("checkpoint"))
    assert bench.requests[2][-1]["content"] == "There is no breakpoint to go back to."
    assert "no breakpoint to go back to" in bench.requests[3][-1]["content"]


def test_rule_4_the_log_only_grows_and_the_conversation_is_its_live_path(tmp_path: Path) -> None:
    bench = Bench(tmp_path, WORK)
    log, original = tmp_path / "events.jsonl", bench.recorder.event
    sizes: list[bytes] = [b""]

    def grown(event: Event) -> None:
        now = log.read_bytes()
        assert now.startswith(sizes[-1]) and now != sizes[-1]
        sizes.append(now)
        original(event)

    bench.recorder.event = grown  # type: ignore[method-assign, assignment, unused-ignore]
    bench.run()
    after = bench.requests[4]
    assert after[:-1] == bench.requests[1], "the context of breakpoint 1, and the memory"
    assert "removing one was wrong" in after[-1]["content"]
    events = bench.events
    conversation = messages(path_to(events, head(events)))  # type: ignore[arg-type]
    assert conversation[: len(bench.requests[-1])] == bench.requests[-1]
    assert "thinking aloud" not in json.dumps(conversation)


def test_rule_4_the_head_after_a_rewind_is_not_the_newest_checkpoint(worked: Bench) -> None:
    rewound = worked.of("rewind")[0]
    older = [event for event in worked.events if event.seq <= rewound.seq]
    newest = [event for event in older if isinstance(event, CheckpointEvent)][-1]
    at = head(older)
    assert at is not None and at.seq == rewound.seq
    assert newest.checkpoint_kind == "before_rewind" and newest not in path_to(older, at)


def test_rule_5_a_rewind_moves_both_sides(tmp_path: Path) -> None:
    trees: list[list[str]] = []
    bench = Bench(tmp_path, WORK)
    original = bench.model.complete

    def seen(sent: Any, tools: Any, **options: Any) -> Any:
        trees.append(walk(str(bench.container.root)))
        return original(sent, tools, **options)

    bench.model.complete = seen  # type: ignore[method-assign, assignment, unused-ignore]
    bench.run()
    assert trees[4] == trees[1], "the tree after the rewind is that at the breakpoint, by an independent walker"
    assert trees[3] != trees[1]
    assert json.dumps(bench.requests[4][: len(bench.requests[1])]) == json.dumps(bench.requests[1])


FAILURES = {
    "staging": {"fail_stage": RestoreError("disk full")},
    "restoring": {"fail_apply": [RestoreError("bad blob")]},
    "starting": {"fail_apply": [EngineError("the engine is gone")]},
    "a part lost": {"loses": True},
}


@pytest.mark.parametrize("what", FAILURES.values(), ids=FAILURES.keys())
def test_rule_5_a_rewind_that_fails_moves_neither_side(tmp_path: Path, what: dict[str, Any]) -> None:
    bench = Bench(tmp_path, [bash("touch a"), rewind(0), bash("ls; touch done"), SUBMIT], driver=Trouble)
    original = bench.session.rewinder.rewind

    def in_trouble(*arguments: Any) -> Any:
        before.extend(walk(str(bench.container.root)))
        with trouble(bench, **what):
            try:
                return original(*arguments)
            finally:
                assert walk(str(bench.container.root)) == before, "by an independent walker"
                assert unfinished_intent(bench.events) is None, "and the log says that nothing is left to be done"

    before: list[str] = []
    bench.session.rewinder.rewind = in_trouble  # type: ignore[method-assign, assignment, unused-ignore]
    result = bench.run()
    assert (result.status, result.rewinds) == ("succeeded", 0)
    told = bench.requests[2]
    assert told[: len(bench.requests[1])] == bench.requests[1], "the conversation went on where it stood"
    assert told[-1]["content"].startswith("error: not rewound")
    listed = bench.of("tool_call")[2].result
    assert listed == "a\nexit code 0", "and so did the container"
    if "fail_stage" in what:
        assert bench.of("rewind_intent") == [] and bench.container.starts == 0, "nothing was touched at all"


def test_rule_5_when_putting_back_fails_too_the_run_ends_and_keeps_its_container(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch a"), rewind(0)], driver=Trouble)
    with trouble(bench, fail_apply=[RestoreError("bad blob"), RestoreError("bad disk")]):
        result = bench.run()
    assert (result.status, result.reason) == ("failed", "engine_error")
    assert not bench.container.removed and result.container is not None
    assert "bad blob" in bench.of("engine_error")[0].text and "bad disk" in bench.of("engine_error")[0].text
    with bench.open() as again:
        assert again.rewinder.finish_unfinished() is not None, "the next start finishes what the intent says"
    assert [path.name for path in bench.container.root.iterdir()] == []


class Crash(BaseException):
    """The process dies here."""


@pytest.mark.parametrize("where", ["before the restore", "in the middle of it", "before the commit line"])
def test_rule_5_a_crash_between_intent_and_commit_is_finished_at_the_next_start(tmp_path: Path, where: str) -> None:
    bench = Bench(tmp_path, [bash("touch a"), rewind(0, "a was wrong"), bash("ls; touch done"), SUBMIT], driver=Trouble)
    original_add = bench.session.journal.add

    def dying(event: Any) -> Any:
        if event.kind == "rewind" and where == "before the commit line":
            raise Crash
        written = original_add(event)
        if event.kind == "rewind_intent" and where == "before the restore":
            raise Crash
        return written

    bench.session.journal.add = dying  # type: ignore[method-assign, assignment, unused-ignore]
    fail = [Crash()] if where == "in the middle of it" else []
    with trouble(bench, fail_apply=fail), bench.session as session, pytest.raises(Crash):
        run(session, bench.model, bench.recorder)
    trouble_over = bench.open()
    assert trouble_over.rewinder.finish_unfinished() is not None
    assert trouble_over.rewinder.finish_unfinished() is None, "once"
    assert (
        walk(str(bench.container.root)) == walk(str(bench.container.root)) and not (bench.container.root / "a").exists()
    )
    bench.session = trouble_over
    result = bench.run()
    assert (result.status, result.rewinds) == ("succeeded", 1)
    assert bench.requests[2][:-1] == bench.requests[0]
    assert "a was wrong" in bench.requests[2][-1]["content"]


def test_rule_6_a_harness_comes_to_its_breakpoint_without_asking_or_running_anything(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    write = tool(lambda line: bench.sh(f"echo {line} >> file; cat file"), "write")
    back = tool(bench.run.backtrack_commit, "back")
    asked_at: list[int] = []

    def harness() -> None:
        asked_at.append(len(bench.requests))
        conversation: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        for step in range(4):
            conversation.append({"role": "assistant", "content": bench.ask(conversation)})
            conversation.append({"role": "user", "content": write(f"line{step}")})
        if len(asked_at) == 1:
            back(3, "not the fourth line")

    bench.run.drive(harness)
    # Three of four calls and three of four tools lie before breakpoint 3: the second pass made one of each.
    assert asked_at == [0, 4] and len(bench.requests) == 5 and len(bench.of("tool_start")) == 4 + 1 + 1
    assert bench.requests[4][:-1] == bench.requests[3] and bench.sh("cat file") == "line0\nline1\nline2\nline3\n"
    for answer, request in zip(bench.of("model_call"), bench.requests, strict=True):
        before = next(event for event in bench.events if event.seq == answer.parent_seq)
        assert messages(path_to(bench.events, before)) == request, (
            "the checkpoint's context is what the model was asked"
        )


def test_rule_7_the_state_before_a_rewind_is_kept_for_the_operator_and_not_offered(worked: Bench) -> None:
    kept = [event for event in worked.of("checkpoint") if event.checkpoint_kind == "before_rewind"]
    assert len(kept) == 1
    with worked.open() as session:
        done = session.restore(kept[0].breakpoint_id)
        assert done.breakpoint_id == kept[0].breakpoint_id
        assert sorted(path.name for path in worked.container.root.iterdir()) == ["two"]
        assert "thinking aloud" in json.dumps(session.journal.conversation())
        assert len([e for e in session.journal.events if getattr(e, "checkpoint_kind", "") == "before_rewind"]) == 2


def test_rule_8_a_restore_of_less_than_was_there_refuses_unless_it_is_told_to(tmp_path: Path) -> None:
    lacks = CoverageItem(kind=StateKind.TMPFS, path="/run", state=CoverageState.MISSING, reason="not reachable")
    bench = Bench(tmp_path, [bash("touch a"), bash("touch done"), SUBMIT], driver=Trouble, keep=True)
    with trouble(bench, lacks=lacks):
        bench.run()
        row = bench.of("checkpoint")[1]
        assert not row.coverage.complete and lacks in row.coverage.items
        before = walk(str(bench.container.root))
        with bench.open() as session:
            with pytest.raises(RestoreRefused, match=r"tmpfs /run: not reachable.*--accept-partial"):
                session.restore(1)
            assert walk(str(bench.container.root)) == before and head(session.journal.events) != row
            session.restore(1, accept_partial=True)
    assert sorted(path.name for path in bench.container.root.iterdir()) == ["a"]


def test_rule_8_a_rewind_says_what_it_did_not_bring_back(tmp_path: Path) -> None:
    lacks = CoverageItem(kind=StateKind.TMPFS, path="/run", state=CoverageState.MISSING, reason="not reachable")
    replies = [bash("touch a"), rewind(0), bash("touch done"), SUBMIT]
    bench = Bench(tmp_path, replies, driver=Trouble, snapshots={"excluded": ["/cache"]})
    with trouble(bench, lacks=lacks):
        bench.run()
    told = bench.requests[2][-1]["content"]
    assert "Not brought back: tmpfs /run (not reachable)" in told and "/cache" in told


def test_rule_9_the_capture_runs_while_the_model_thinks(tmp_path: Path) -> None:
    slow = [bash("touch done", delay_s=0.5), {**SUBMIT, "delay_s": 0.5}]
    bench = Bench(tmp_path, slow, driver=Trouble)
    with trouble(bench, capture_s=0.4):
        began = time.monotonic()
        assert bench.run().status == "succeeded"
        took = time.monotonic() - began
    assert took < 2 * 0.5 + 3 * 0.4 - 0.3, "the two captures before a request cost nothing"
    thinking = next(at for at, what in bench.recorder.seen if what == "thinking 1")
    committed = next(at for at, what in bench.recorder.seen if isinstance(what, CheckpointEvent))
    answered = next(at for at, what in bench.recorder.seen if isinstance(what, ModelCallEvent))
    assert thinking < committed < answered
    assert [event.waited_ms for event in bench.of("checkpoint")[:2]] == [0.0, 0.0]


def test_rule_9_the_step_waits_for_a_capture_that_is_slower_and_says_how_long(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch done"), SUBMIT], driver=Trouble)
    with trouble(bench, capture_s=0.4):
        bench.run()
    first, second, last = bench.of("checkpoint")
    assert 200 < first.waited_ms < 2000 and 200 < second.waited_ms < 2000 and last.waited_ms == 0.0


def test_rule_10_steps_are_counted_over_abandoned_stretches_too(tmp_path: Path) -> None:
    replies = [bash("touch a"), rewind(0), bash("touch b"), rewind(0), bash("touch done"), SUBMIT]
    bench = Bench(tmp_path, replies, limits={"steps": 5})
    result = bench.run()
    assert (result.status, result.reason, result.rewinds) == ("failed", "limit_steps", 2)
    assert len(bench.requests) == 5 and bench.container.removed


def test_rule_10_a_rewind_does_not_reset_the_stuck_count(tmp_path: Path) -> None:
    replies = [SUBMIT, SUBMIT, rewind(0), SUBMIT, rewind(0), SUBMIT]
    bench = Bench(tmp_path, replies, limits={"stuck_submissions": 3})
    result = bench.run()
    assert (result.status, result.reason) == ("stopped", "stuck")
    assert len(bench.of("submission")) == 3 and len(bench.requests) == 4


def test_rule_10_cost_is_counted_over_the_whole_log(tmp_path: Path) -> None:
    paid = {"cost": 0.4, "usage": {"prompt_tokens": 10, "completion_tokens": 1}}
    replies = [bash("touch a", **paid), {**rewind(0), **paid}, bash("touch b", **paid), SUBMIT]
    bench = Bench(tmp_path, replies, limits={"cost_usd": 1.0})
    result = bench.run()
    assert (result.status, result.reason) == ("failed", "limit_cost")
    assert result.cost_usd == pytest.approx(1.2)


def test_rule_10_submissions_of_one_message_count_one_by_one(tmp_path: Path) -> None:
    many = {"calls": [call("submit")] * 4}
    bench = Bench(tmp_path, [many, SUBMIT], limits={"stuck_submissions": 2})
    assert bench.run().reason == "stuck"
    assert len(bench.of("submission")) == 2
    assert [event.error for event in bench.of("tool_call")] == [None, None, "not run", "not run"]


def test_the_wall_time_limit_ends_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("sleep 0.3"), bash("touch done"), SUBMIT], limits={"wall_time_s": 0.25})
    assert bench.run().reason == "limit_time"


def test_a_second_process_goes_on_from_the_log_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch a"), rewind(0, "first"), bash("touch b"), rewind(0, "second")])
    bench.run()
    assert bench.of("end")[0].reason == "model_error"
    (tmp_path / "replies.yaml").write_text(json.dumps([bash("touch done"), SUBMIT]))
    bench.model = Model(bench.loaded.spec.model, tmp_path)  # type: ignore[arg-type]
    bench.session = bench.open()
    assert bench.run().status == "succeeded"
    assert "first" in bench.requests[0][-1]["content"] and "second" in bench.requests[0][-1]["content"]
