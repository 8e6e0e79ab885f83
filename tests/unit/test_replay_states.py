"""A harness whose framework can put it back: its state is used where it gives the same, else it repeats itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.memory import is_rewind_message
from orchestrator.recording.current_execution import current_execution
from orchestrator.recording.run import RunEnded
from orchestrator.recording.tool_hook import tool
from orchestrator.wishes import RewindWish
from tests.unit.recorded_bench import RecordedBench

USER = {"role": "user", "content": "go"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class Loop:
    """Asks, runs a command, asks again; what it knows is its list of messages, by which it can be put back."""

    def __init__(self, bench: RecordedBench, *backs: tuple[int, int], keeps: bool = True, steps: int = 4) -> None:
        """``backs``: after how many steps (of all passes) it goes back to which breakpoint."""
        self.bench = bench
        self.backs = dict(backs)
        self.keeps = keeps
        self.steps = steps
        self.messages: list[Any] = []
        self.ran: list[str] = []
        """Steps of all passes, those answered from the log too."""
        self.marks: Callable[[], Any] = lambda: len(self.messages)
        self.edit: Callable[[list[Any]], Any] = lambda messages: messages
        """What becomes of a state before it is put back."""
        self.first: Callable[[], Any] = lambda: None
        """Runs after the loop was put back."""
        self.write = tool(lambda text: bench.sh(f"echo {text} >> file; cat file"), "write")
        self.back = tool(bench.run.backtrack_commit, "backtrack_commit")

    def mark(self) -> Any:
        return self.marks()

    def state(self) -> Any:
        return [*self.messages]

    def run(self) -> list[Any]:
        self.messages = [USER]
        execution = current_execution()
        assert execution is not None
        kept = execution.kept_state() if self.keeps else None
        if kept is not None:
            self.messages = self.edit([*kept])
        if self.keeps:
            assert execution.keep_states(self, put_back=kept is not None)
        if kept is not None:
            self.first()
        while len(self.messages) < 2 * self.steps:
            step = len(self.messages) // 2
            self.ran.append(f"step{step}")
            answer = self.bench.ask(self.messages)
            self.messages = [*self.messages, said(answer), {"role": "user", "content": self.write(f"line{step}")}]
            if (to := self.backs.pop(len(self.ran), None)) is not None:
                self.back(to, f"memory {len(self.ran)}")
        return self.messages


def driven(directory: Path, *backs: tuple[int, int], keeps: bool) -> tuple[RecordedBench, Loop, list[Any]]:
    directory.mkdir()
    bench = RecordedBench(directory)
    loop = Loop(bench, *backs, keeps=keeps)
    return bench, loop, bench.run.drive(loop.run)


def test_what_was_done_before_the_breakpoint_is_not_repeated_and_all_else_is_as_by_replay(tmp_path: Path) -> None:
    # Three steps, back to the second one; then back to one of the new path; then to that of before again.
    put_back, loop, last = driven(tmp_path / "a", (3, 1), (5, 5), (7, 1), keeps=True)
    # By replay each pass begins with the steps that are answered.
    replayed, other, same = driven(tmp_path / "b", (3, 1), (6, 5), (10, 1), keeps=False)
    assert loop.ran == ["step0", "step1", "step2", "step1", "step2", "step2", "step3", "step1", "step2", "step3"]
    assert len(other.ran) == len(loop.ran) + 1 + 2 + 1

    def requests(bench: RecordedBench) -> list[Any]:
        """Memories name the count of steps, which differs: how many they are is compared, and where they stand."""
        return [
            [("memory", row["content"].count("memory")) if is_rewind_message(row) else row for row in sent]
            for sent in bench.requests
        ]

    assert requests(put_back) == requests(replayed) and last == same
    # The request after the second rewind has both memories, each at its place.
    told = [index for index, message in enumerate(put_back.requests[5]) if is_rewind_message(message)]
    assert told == [3, 6]
    execution = put_back.run.execution
    assert execution is not None and (execution.answered, execution.made) == (0, 6)
    assert put_back.sh("cat file") == replayed.sh("cat file") == "line0\nline1\nline2\nline3\n"
    kinds = [[event.kind for event in bench.events] for bench in (put_back, replayed)]
    assert kinds[0] == kinds[1]


def test_the_log_of_a_pass_from_a_state_answers_another_process(tmp_path: Path) -> None:
    bench, _, messages = driven(tmp_path / "a", (3, 1), (5, 5), keeps=True)
    asked = len(bench.requests)
    bench.reopen()
    again = Loop(bench)
    assert bench.run.drive(again.run) == messages
    assert len(bench.requests) == asked and again.ran == ["step0", "step1", "step2", "step3"]


def test_a_new_process_repeats_the_harness_and_keeps_its_states_from_then_on(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    with pytest.raises(ZeroDivisionError):
        bench.run.drive(lambda: (Loop(bench, steps=2).run(), 1 / 0))
    bench.reopen()
    loop = Loop(bench, (4, 2), (5, 1))
    bench.run.drive(loop.run)
    # One step is answered, the others made; back to 2, which this process has seen, and to 1, which it has not.
    assert loop.ran == ["step0", "step1", "step2", "step3", "step2", "step0", "step1", "step2", "step3"]


def answered(messages: list[Any]) -> list[Any]:
    return [*messages[:-1], {"role": "user", "content": "something else"}]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda loop: setattr(loop, "edit", answered), "its request differs at messages[2].content"),
        (lambda loop: setattr(loop, "edit", lambda messages: messages[:1]), "its request differs at messages[1]"),
        (lambda loop: setattr(loop, "first", lambda: loop.write("x")), "it began with tool (write)"),
        (lambda loop: setattr(loop, "first", lambda: loop.bench.sh("echo x >> file")), "it acted before its first"),
        (lambda loop: setattr(loop, "first", lambda: loop.bench.run.backtrack_commit(0, "x")), "it acted before"),
        (lambda loop: setattr(loop, "first", lambda: 1 / 0), "ZeroDivisionError: division by zero"),
        (lambda loop: setattr(loop, "edit", lambda messages: [messages[0]] * 9), "it ended without a request"),
    ],
)
def test_a_state_that_leads_elsewhere_is_given_up_before_anything_is_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Loop], None], why: str
) -> None:
    bench = RecordedBench(tmp_path)
    loop = Loop(bench, (3, 1))
    change(loop)
    with caplog.at_level(logging.WARNING, "orchestrator"):
        bench.run.drive(loop.run)
    assert why in caplog.text and "it repeats itself instead" in caplog.text
    assert loop.ran.count("step0") >= 2 and len(bench.requests) == 3 + 3
    execution = bench.run.execution
    assert execution is not None and (execution.answered, execution.made) == (2, 6)
    assert bench.sh("cat file") == "line0\nline1\nline2\nline3\n"
    assert bench.requests[3][:-1] == bench.requests[1] and is_rewind_message(bench.requests[3][-1])


def test_a_difference_that_may_be_overlooked_does_not_make_a_state_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = RecordedBench(tmp_path, agent={"ignore": ["messages[*].content"]})
    loop = Loop(bench, (3, 1))
    loop.edit = answered
    with caplog.at_level(logging.WARNING, "orchestrator"):
        bench.run.drive(loop.run)
    assert loop.ran.count("step0") == 1 and "although its request differs: messages[2].content" in caplog.text
    assert bench.requests[3][2]["content"] == "something else"


@pytest.mark.parametrize("marks", [[1, 1, 1, 1], [1, 1, 2, 2], [1, None, 3, 3]])
def test_a_call_that_is_not_surely_the_first_from_its_state_keeps_none(tmp_path: Path, marks: list[Any]) -> None:
    bench = RecordedBench(tmp_path)
    loop = Loop(bench, (2, 1))
    left = [*marks]
    # Model, tool, model, tool: what the second model call is made from.
    loop.marks = lambda: left.pop(0) if left else object()
    bench.run.drive(loop.run)
    repeats = marks != [1, 1, 2, 2]
    assert loop.ran.count("step0") == 1 + repeats


def test_a_state_stands_for_a_whole_pass_or_for_none(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    passes: list[Any] = []
    inside: list[Any] = []

    def harness() -> None:
        execution = current_execution()
        assert execution is not None
        bench.ask([USER])
        passes.append((execution.kept_state(), execution.keep_states(Loop(bench))))
        tool(lambda: inside.append(execution.keep_states(Loop(bench))), "inside")()
        if len(passes) == 1:
            Loop(bench).back(0, "again")

    bench.run.drive(harness)
    assert passes == [(None, False), (None, False)] and inside == [False, False]


def test_an_operator_takes_back_a_harness_that_keeps_its_states(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    loop = Loop(bench, steps=3)
    tickets: list[Any] = []

    def harness() -> None:
        loop.run()
        if not tickets:
            tickets.append(bench.desk.hand_in(RewindWish(breakpoint_id=1, memory="keep line0 only")))
            bench.ask([USER])

    bench.run.drive(harness)
    assert tickets[0].result.breakpoint_id == 1 and loop.ran == ["step0", "step1", "step2", "step1", "step2"]
    assert "keep line0 only" in bench.requests[3][-1]["content"]


@pytest.mark.parametrize("grouped", [False, True])
def test_a_harness_that_fails_over_what_it_was_left_by_is_left_all_the_same(tmp_path: Path, grouped: bool) -> None:
    bench = RecordedBench(tmp_path, limits={"steps": 2})
    back = tool(bench.run.backtrack_commit, "back")
    passes: list[int] = []

    def gathering(call: Any) -> Any:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001
            raise BaseExceptionGroup("tasks", [error]) if grouped else AttributeError("generations") from None

    def harness() -> None:
        passes.append(1)
        gathering(lambda: bench.ask([USER]))
        if len(passes) == 1:
            gathering(lambda: back(0, "again"))
        gathering(lambda: bench.ask([USER, USER]))

    with pytest.raises(RunEnded, match="2 steps were made"):
        bench.run.drive(harness)
    assert len(passes) == 2 and len(bench.requests) == 2
