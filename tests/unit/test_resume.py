"""Taking a run up again: where it goes on is a function of its log; what was cut off is undone, repeated, counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.ending import limits_now
from orchestrator.events import EndEvent, ModelStartEvent, ResumeEvent, ToolStartEvent
from orchestrator.lineage import left_open, status
from orchestrator.live_path import messages
from orchestrator.model import Model
from orchestrator.resume import take_up
from orchestrator.resume_point import resume_point, tries
from orchestrator.runner import RunResult, run
from orchestrator.task import Limits
from orchestrator.totals import requests_lost_now, totals
from tests.unit.directory_container import SUBMIT, Bench, bash, call, rewind
from tests.unit.run_builder import RunBuilder

THREE: dict[str, Any] = {
    "calls": [call("bash", command=f"echo {name} >> log; echo {name} > {name}") for name in ("a", "b", "c")]
}


def resumed(bench: Bench) -> RunResult:
    """Another process takes the run up, with a model of its own, and drives it to its end."""
    spec = bench.loaded.spec.model
    assert spec is not None
    bench.model = Model(spec, bench.directory, sleep=bench.pauses.append, jitter=lambda: 0.0)
    bench.session = bench.open()
    with bench.session:
        assert bench.model.script is not None
        bench.model.script.take_up(bench.session.log.events)
        return run(bench.session, bench.model, bench.recorder, begin=lambda: take_up(bench.session, {}))


def interrupt_at(bench: Bench, monkeypatch: pytest.MonkeyPatch, text: str, *, half_done: bool = True) -> None:
    """The first command that holds ``text`` is begun, and then the process is interrupted."""
    original = bench.container.exec
    seen: list[str] = []

    def interrupted(command: Any, **options: Any) -> Any:
        if text in command and not seen:
            seen.append(command)
            if half_done:
                original(command, **options)
            raise KeyboardInterrupt
        return original(command, **options)

    monkeypatch.setattr(bench.container, "exec", interrupted)


def test_the_call_that_was_cut_off_runs_again_from_its_own_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, [THREE, bash("touch done"), SUBMIT])
    interrupt_at(bench, monkeypatch, "echo b")
    assert bench.run().status == "interrupted"
    assert resumed(bench).status == "succeeded"
    assert (bench.container.root / "log").read_text() == "a\nb\nc\n", "each effect once"
    assert [event.attempt for event in bench.of("tool_call")] == [1, 2, 1, 1, 1]
    assert len(bench.of("model_call")) == 3, "no logged answer was asked for again"
    assert bench.of("checkpoint")[-1].progress.satisfied == 1


def test_the_conversation_is_that_of_an_undisturbed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [THREE, rewind(0), bash("touch done"), SUBMIT]
    (tmp_path / "quiet").mkdir()
    (tmp_path / "disturbed").mkdir()
    quiet, disturbed = Bench(tmp_path / "quiet", replies), Bench(tmp_path / "disturbed", replies)
    quiet.run()
    interrupt_at(disturbed, monkeypatch, "touch done")
    disturbed.run()
    resumed(disturbed)
    told = [message for message in disturbed.requests[-1] if "has been started again" in str(message.get("content"))]
    assert len(told) == 1 and told[0]["role"] == "tool", "inside a step, the next result says that programs ended"
    told[0]["content"] = told[0]["content"].rpartition("\n\n")[2]
    assert disturbed.requests[-1] == quiet.requests[-1]


def test_resuming_twice_is_resuming_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, [THREE, bash("touch done"), SUBMIT])
    interrupt_at(bench, monkeypatch, "echo b")
    bench.run()
    for _ in range(2):  # taken up, and cut off before it did anything
        bench.session = bench.open()
        with bench.session:
            assert take_up(bench.session, {}).step is not None
    assert resumed(bench).status == "succeeded"
    assert (bench.container.root / "log").read_text() == "a\nb\nc\n"
    assert [event.attempt for event in bench.of("tool_call")][:3] == [1, 2, 1]


def test_a_submission_that_is_in_the_log_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, [SUBMIT, bash("touch done"), SUBMIT])
    original = bench.session.journal.add

    def cut_off(event: Any) -> Any:
        written = original(event)
        if event.kind == "submission":
            raise KeyboardInterrupt
        return written

    monkeypatch.setattr(bench.session.journal, "add", cut_off)
    assert bench.run().status == "interrupted"
    assert resumed(bench).status == "succeeded"
    assert [event.progress.satisfied for event in bench.of("submission")] == [0, 1]
    assert "The file done is missing." in bench.of("tool_call")[0].result


def test_a_lost_request_is_counted_once_and_only_if_no_answer_came(tmp_path: Path) -> None:
    made = RunBuilder(tmp_path / "events.jsonl")
    resume = ResumeEvent(step=0, parent_seq=0, container="c", container_id="1", previous_container_id=None)
    made.checkpoint()
    made.add(ModelStartEvent(step=0, parent_seq=made.head_seq()))
    made.call("first", tools=["bash"])
    made.add(resume)
    assert totals(made.events).requests_lost == 0
    made.tool()
    made.checkpoint()
    for _ in range(2):
        made.add(ModelStartEvent(step=1, parent_seq=made.head_seq()))
        made.add(resume)
    assert requests_lost_now(made.events) == 2
    made.call("second")
    assert requests_lost_now(made.events) == 0 and totals(made.events).requests_lost == 2


def test_tries_belong_to_one_call_of_one_answer(tmp_path: Path) -> None:
    made = RunBuilder(tmp_path / "events.jsonl")
    made.checkpoint()
    made.call(tools=["bash", "bash"])
    seq = made.head_seq()
    for position in (0, 1, 1):
        made.add(ToolStartEvent(step=1, parent_seq=seq, answer_seq=seq, position=position, name="bash"))
    assert [tries(made.events, seq, position) for position in (0, 1, 2)] == [1, 2, 0]
    assert made.head_seq() == seq, "it moves no head"


def test_the_point_is_read_from_the_head(tmp_path: Path) -> None:
    made = RunBuilder(tmp_path / "events.jsonl")
    assert resume_point(made.events).before_first_step
    made.checkpoint()
    assert resume_point(made.events).at_breakpoint
    made.call(tools=["bash", "bash"])
    made.tool(after="s-x")
    found = resume_point(made.events)
    assert found.step is not None and found.step.answered == 1
    assert found.snapshot_id == "s-x" and not found.at_breakpoint
    made.tool(after="s-y")
    assert resume_point(made.events).step is None
    assert messages([]) == []


def test_a_resumed_run_is_neither_ended_nor_left_open_and_the_time_before_it_is_not_its_own(tmp_path: Path) -> None:
    made = RunBuilder(tmp_path / "events.jsonl")
    made.step()
    made.add(EndEvent(step=1, parent_seq=made.head_seq(), status="failed", reason="limit_steps"))
    assert status(made.events, locked=False).status == "failed"
    before = totals(made.events).duration_s
    event = ResumeEvent(
        step=1, parent_seq=1, container="c", container_id="1", previous_container_id=None, limits={"steps": 9}
    )
    made.add(event)
    late = made.events[-1].model_copy(update={"at": "2999-01-01T00:00:00+00:00"})
    events = [*made.events[:-1], late]
    assert totals(events).duration_s == before
    assert status(events, locked=False).status == "interrupted" and not left_open(events)
    assert limits_now(Limits(steps=3), events).steps == 9
