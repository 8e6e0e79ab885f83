"""A harness of its own: recorded, taken back, called again, and answered from the log up to where it stood."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from orchestrator.adapters.chunks import Chunks, Read, RecordedChunks
from orchestrator.errors import Divergence, UsageError
from orchestrator.memory import is_rewind_message
from orchestrator.recording.current_execution import current_execution
from orchestrator.recording.harness_call import Answer, Call
from orchestrator.recording.leaving import Rewound
from orchestrator.recording.model_hook import call_model, model_asked
from orchestrator.recording.run import RunEnded
from orchestrator.recording.tool_hook import tool
from orchestrator.recording.typed_json import encode
from orchestrator.wishes import RewindWish
from tests.unit.recorded_bench import RecordedBench

USER = {"role": "user", "content": "go"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class Agent:
    """A loop: ask, run a command, ask again; each of its tool's runs is counted."""

    def __init__(self, bench: RecordedBench, steps: int = 3) -> None:
        self.bench = bench
        self.steps = steps
        self.ran: list[str] = []
        self.write = tool(self._write, "write")
        self.back = tool(bench.run.backtrack_commit, "backtrack_commit")

    def _write(self, text: str) -> str:
        self.ran.append(text)
        return self.bench.sh(f"echo {text} >> file; cat file")

    def run(self) -> list[Any]:
        messages: list[Any] = [USER]
        for step in range(self.steps):
            answer = self.bench.ask(messages)
            messages += [said(answer), {"role": "user", "content": self.write(f"line{step}")}]
        return messages


def test_a_harness_is_answered_from_the_log_up_to_the_breakpoint_and_goes_on_with_the_memory(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    agent = Agent(bench)
    went_back: list[int] = []

    def harness() -> list[Any]:
        messages = agent.run()
        if not went_back:
            went_back.append(1)
            agent.back(1, "do not write line1")
        return messages

    messages = bench.run.drive(harness)
    # Three calls, then back to the second breakpoint: the first is answered from the log, two are made again.
    assert len(bench.requests) == 3 + 2 and agent.ran == ["line0", "line1", "line2", "line1", "line2"]
    execution = bench.run.execution
    assert execution is not None and (execution.answered, execution.made) == (2, 4)
    assert bench.sh("cat file") == "line0\nline1\nline2\n"
    memory = bench.requests[3][-1]
    assert is_rewind_message(memory) and "do not write line1" in memory["content"]
    assert bench.requests[3][:-1] == bench.requests[1]
    # It stays at its place in what follows, and the harness's own list does not hold it.
    assert bench.requests[4][3] == memory and not any(map(is_rewind_message, messages))


def test_every_call_has_its_breakpoint_and_snapshots_before_and_after(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    bench.run.drive(Agent(bench).run)
    calls, tools, checkpoints = bench.of("model_call"), bench.of("tool_call"), bench.of("checkpoint")
    assert [call.breakpoint_id for call in calls] == [row.breakpoint_id for row in checkpoints] == [0, 1, 2]
    assert [call.parent_seq for call in calls] == [row.seq for row in checkpoints]
    assert all(call.before == call.after for call in calls)
    assert [one.files_changed_count for one in tools] == [1, 1, 1] and all(one.before != one.after for one in tools)
    assert [row.after for row in checkpoints[1:]] != [row.before for row in tools]
    assert [one.call.number for one in [*calls, *tools]] == [1, 3, 5, 2, 4, 6]
    conversation = bench.session.journal.conversation()
    assert conversation[0] == USER and conversation[1] == said("answer to 1")
    assert [message["role"] for message in conversation[:4]] == ["user", "assistant", "user", "assistant"]


def test_another_process_answers_what_is_logged_and_makes_the_rest(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    agent = Agent(bench, steps=2)
    with pytest.raises(ZeroDivisionError):
        bench.run.drive(lambda: (agent.run(), 1 / 0))
    bench.reopen()
    again = Agent(bench, steps=3)
    bench.run.drive(again.run)
    assert again.ran == ["line2"] and len(bench.requests) == 3
    assert bench.sh("cat file") == "line0\nline1\nline2\n"


def test_a_changed_prompt_stops_the_replay_before_anything_is_sent(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    bench.run.drive(lambda: [bench.ask([USER]), bench.ask([{"role": "user", "content": "second"}]), bench.ask([USER])])
    bench.reopen()
    with pytest.raises(Divergence) as error:
        bench.run.drive(lambda: [bench.ask([USER]), bench.ask([{"role": "user", "content": "other"}])])
    assert 'call 2 (bench.ask, m) differs at messages[0].content: recorded "second", now "other"' in str(error.value)
    assert len(bench.requests) == 3


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"temperature": 0.5}, "parameters.temperature"),
        ({"seed": 1}, "parameters.seed"),
        ({"stop": ["x"]}, "parameters.stop"),
        ({"tool_choice": "auto"}, "parameters.tool_choice"),
        ({"response_format": {"type": "json_object"}}, "parameters.response_format"),
        ({"stream": True}, "parameters.stream"),
        ({"extra_body": {"top_k": 1}}, "parameters.extra_body"),
        ({"base_url": "http://elsewhere"}, "parameters.base_url"),
    ],
)
def test_whatever_can_change_the_answer_is_part_of_the_request(tmp_path: Path, change: Any, path: str) -> None:
    bench = RecordedBench(tmp_path)
    bench.run.drive(lambda: bench.ask([USER]))
    bench.reopen()
    with pytest.raises(Divergence, match=rf"differs at {path}"):
        bench.run.drive(lambda: bench.ask([USER], **change))


def test_keys_headers_time_limits_none_and_order_are_not_part_of_the_request(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    bench.run.drive(lambda: bench.ask([USER], api_key="sk-1", timeout=3, extra_headers={"a": "b"}, top_p=1, seed=None))
    bench.reopen()
    bench.run.drive(lambda: bench.ask([USER], top_p=1, api_key="sk-2", timeout=9))
    assert len(bench.requests) == 1
    assert "sk-1" not in (tmp_path / "events.jsonl").read_text()


def test_a_system_prompt_may_differ_in_its_text_and_a_declared_place_too(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path, agent={"ignore": ["messages[*].content"]})

    def harness(now: str) -> None:
        bench.ask([{"role": "system", "content": f"It is {now}."}, {"role": "user", "content": f"dir {now}"}])

    bench.run.drive(harness, "noon")
    bench.reopen()
    bench.run.drive(harness, "night")
    assert len(bench.requests) == 1
    assert any("differs" in note.text and "messages[0].content" in note.text for note in bench.of("note"))


def test_another_conversation_is_never_taken_for_the_recorded_one(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path, agent={"ignore": ["messages[*].content"]})
    bench.run.drive(lambda: bench.ask([{"role": "system", "content": "a"}, USER]))
    for other in ([{"role": "system", "content": "b"}], [{"role": "system", "content": "b"}, said("x")]):
        bench.reopen()
        with pytest.raises(Divergence):
            bench.run.drive(lambda other=other: bench.ask(other))
    assert len(bench.requests) == 1


def test_going_live_where_the_harness_diverges_is_asked_for_and_starts_at_the_recorded_breakpoint(
    tmp_path: Path,
) -> None:
    bench = RecordedBench(tmp_path, agent={"on_divergence": "live"})
    agent = Agent(bench, steps=3)
    bench.run.drive(agent.run)
    bench.reopen()
    other = Agent(bench, steps=3)

    def harness() -> None:
        messages: list[Any] = [USER]
        messages += [said(bench.ask(messages)), {"role": "user", "content": other.write("line0")}]
        messages[-1] = {"role": "user", "content": "something else"}
        bench.ask(messages)

    bench.run.drive(harness)
    assert other.ran == [] and len(bench.requests) == 4
    assert bench.sh("cat file") == "line0\n"


def test_what_was_raised_is_raised_again_as_its_own_type(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    ran: list[int] = []

    def refuse() -> None:
        ran.append(1)
        raise UsageError("no such thing")

    def failing(_messages: Any) -> str:
        raise TimeoutError("too slow")

    wrapped = tool(refuse)

    def harness() -> None:
        with pytest.raises(UsageError, match="no such thing"):
            wrapped()
        with pytest.raises(TimeoutError, match="too slow"):
            bench.ask([USER], failing)

    bench.run.drive(harness)
    bench.reopen()
    bench.run.drive(harness)
    assert ran == [1] and len(bench.requests) == 1


def test_a_result_that_is_no_json_is_readable_and_no_replay_gets_past_it(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    odd = tool(lambda: threading.Lock(), "odd")
    bench.run.drive(odd)
    (event,) = bench.of("tool_call")
    assert event.call.readable_only and "_thread:lock" in event.call.outcome["returned"]["$text"]["type"]
    bench.reopen()
    with pytest.raises(Divergence, match="kept as text only"):
        bench.run.drive(odd)


def test_a_harness_that_swallows_everything_still_does_not_go_on_after_a_rewind(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    back = tool(bench.run.backtrack_commit, "back")
    passes: list[int] = []

    def harness() -> None:
        passes.append(1)
        bench.ask([USER])
        if len(passes) == 1:
            try:
                back(0, "again")
            except BaseException as reason:  # noqa: BLE001
                assert isinstance(reason, Rewound)
            with pytest.raises(Rewound):
                bench.ask([USER])

    bench.run.drive(harness)
    assert len(passes) == 2 and len(bench.requests) == 2


def test_a_late_result_from_before_a_rewind_is_on_no_path(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    go_on, seen = threading.Event(), []
    slow = tool(lambda: go_on.wait(30), "slow")
    back = tool(bench.run.backtrack_commit, "back")
    passes: list[int] = []

    def late() -> None:
        try:
            slow()
        except BaseException as reason:  # noqa: BLE001
            seen.append(type(reason))

    def harness() -> None:
        passes.append(1)
        bench.ask([USER])
        if len(passes) == 1:
            thread = threading.Thread(target=copy_context().run, args=(late,))
            thread.start()
            while not any(start.name == "slow" for start in bench.of("tool_start")):
                pass
            try:
                back(0, "again")
            finally:
                go_on.set()
                thread.join()

    bench.run.drive(harness)
    assert seen == [Rewound] and bench.of("tool_call") == []


def test_a_breakpoint_inside_a_tool_runs_that_tool_again_and_answers_what_it_had_asked(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    back = tool(bench.run.backtrack_commit, "back")
    entered: list[int] = []

    def research(topic: str) -> str:
        entered.append(1)
        first = bench.ask([{"role": "user", "content": topic}])
        second = bench.ask([{"role": "user", "content": topic}, said(first), USER])
        if len(entered) == 1:
            back(2, "the second question was wrong")
        return second

    researching = tool(research)

    def harness() -> str:
        bench.ask([USER])
        return researching("whales")

    assert bench.run.drive(harness) == "answer to 4"
    assert len(entered) == 2 and len(bench.requests) == 4  # the last one holds the memory
    bench.reopen()
    assert bench.run.drive(harness) == "answer to 4"
    assert len(entered) == 2 and len(bench.requests) == 4


def test_a_harness_that_stops_short_of_its_own_past_is_told(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    bench.run.drive(lambda: [bench.ask([USER]), bench.ask([USER, USER])])
    bench.reopen()
    with pytest.raises(Divergence, match="call 2"):
        bench.run.drive(lambda: bench.ask([USER]))


def test_an_operator_takes_a_driven_harness_back_between_two_calls(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    agent = Agent(bench, steps=2)
    tickets: list[Any] = []

    def harness() -> None:
        agent.run()
        if not tickets:
            tickets.append(bench.desk.hand_in(RewindWish(breakpoint_id=1, memory="keep line0 only")))
            bench.ask([USER])

    bench.run.drive(harness)
    assert tickets[0].error is None and tickets[0].result.breakpoint_id == 1
    assert agent.ran == ["line0", "line1", "line1"] and len(bench.requests) == 3
    assert "keep line0 only" in bench.requests[2][-1]["content"]


def test_a_stop_or_a_limit_leaves_the_harness_at_its_next_call(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path, limits={"steps": 2})
    agent = Agent(bench, steps=5)
    with pytest.raises(RunEnded, match="2 steps were made"):
        bench.run.drive(agent.run)
    # The second step's tool is refused too: a limit ends the run at once, as it ends ours.
    assert len(bench.requests) == 2 and agent.ran == ["line0"]
    (tmp_path / "stopped").mkdir()
    stopped = RecordedBench(tmp_path / "stopped")
    with pytest.raises(RunEnded, match="operator"):
        stopped.run.drive(lambda: [stopped.ask([USER]), stopped.desk.stop(), stopped.ask([USER, USER])])
    assert len(stopped.requests) == 1


def test_a_stream_that_is_read_on_after_another_call_is_noted_and_no_second_pass_gets_past_it(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)

    def stream(name: str) -> Iterator[str]:
        execution = current_execution()
        assert execution is not None
        request = model_asked("bench.stream", "m", [{"role": "user", "content": name}], [], {"stream": True})

        def made(call: Call) -> Any:
            return Chunks(execution, call, lambda chunk: (encode(chunk), chunk), answer), iter([f"{name}1", f"{name}2"])

        def again(call: Call, recorded: dict[str, Any]) -> Any:
            return RecordedChunks(execution, recorded, incomplete=call.past.call.incomplete), None  # type: ignore[union-attr]

        chunks, inner = call_model(execution, request, made, again)
        while True:
            try:
                yield chunks.next(inner)
            except StopIteration:
                return

    def answer(read: Read) -> Answer:
        return Answer(read.record, {"role": "assistant", "content": "".join(read.parts)}, incomplete=not read.exhausted)

    def harness() -> list[tuple[str, str]]:
        return [*zip(stream("a"), stream("b"), strict=True)]

    assert bench.run.drive(harness) == [("a1", "b1"), ("a2", "b2")]
    assert [call.call.incomplete for call in bench.of("model_call")] == [True, False]
    assert any("call 1 was read further" in note.text for note in bench.of("note"))
    bench.reopen()
    with pytest.raises(Divergence, match="reads a stream further"):
        bench.run.drive(harness)


def test_news_of_the_container_stand_in_the_next_new_request_and_at_the_same_place_in_the_log(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    agent = Agent(bench, steps=2)
    bench.run.drive(agent.run)
    bench.reopen(news="Your programs have ended.")
    again = Agent(bench, steps=4)
    bench.run.drive(again.run)
    told = {"role": "user", "content": "Your programs have ended."}
    assert bench.requests[2][-1] == told and bench.requests[3].count(told) == 1
    assert bench.session.journal.conversation()[: len(bench.requests[3])] == bench.requests[3]
    bench.reopen()
    bench.run.drive(Agent(bench, steps=5).run)
    assert bench.requests[4][: len(bench.requests[3])] == bench.requests[3] and len(bench.requests) == 5
