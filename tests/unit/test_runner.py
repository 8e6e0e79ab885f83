"""The loop: what becomes of a run, of its answers and of its tool calls."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from orchestrator.events import Message
from tests.unit.directory_container import SUBMIT, Bench, bash, call, rewind


def answered_ids(messages: list[Message]) -> None:
    """Every call of an assistant is answered once, in order, before anything else is said."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            assert waiting, "a tool message that answers nothing"
            assert message["tool_call_id"] == waiting.pop(0)
            continue
        assert waiting == [], f"calls without an answer: {waiting}"
        if message["role"] == "assistant":
            calls = message.get("tool_calls") or []
            waiting = [item["id"] for item in calls]
            assert len(set(waiting)) == len(waiting)
            assert calls or message["content"]
            for item in calls:
                assert isinstance(json.loads(item["function"]["arguments"]), dict)
    assert waiting == []


def test_a_run_that_does_the_work_succeeds_and_its_container_goes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("echo hello; touch done"), SUBMIT])
    result = bench.run()
    assert (result.status, result.reason) == ("succeeded", "checklist")
    assert result.progress is not None and (result.progress.satisfied, result.progress.total) == (1, 1)
    assert result.container is None and bench.container.removed
    assert result.breakpoints == 3, "one before each request, and the last state"
    tool = bench.of("tool_call")[0]
    assert tool.result == "hello\nexit code 0" and tool.exit_code == 0
    assert [(change.status, change.path) for change in tool.files_changed] == [("A", "/done")]


def test_keep_leaves_the_container(tmp_path: Path) -> None:
    result = (bench := Bench(tmp_path, [bash("touch done"), SUBMIT], keep=True)).run()
    assert result.container == bench.container.name and not bench.container.removed


def test_a_failed_submission_tells_the_first_missing_thing_and_nothing_else(tmp_path: Path) -> None:
    checklist = [
        {"name": "one", "scratch": "test -e done", "feedback": "first is missing"},
        {"name": "two", "scratch": "test -e two", "feedback": "second is missing"},
    ]
    bench = Bench(tmp_path, [SUBMIT, bash("touch done"), SUBMIT, bash("touch two"), SUBMIT], checklist=checklist)
    assert bench.run().status == "succeeded"
    said = [event.result for event in bench.of("tool_call") if event.name == "submit"]
    assert said[:2] == ["Not done yet: first is missing", "Not done yet: second is missing"]
    assert [event.progress.satisfied for event in bench.of("submission")] == [0, 1, 2]


def test_parallel_calls_run_in_order_and_share_their_snapshots(tmp_path: Path) -> None:
    calls = [
        call("bash", command="echo 1 > a"),
        call("bash", command="cat a; echo 2 > b"),
        call("bash", command="cat b"),
    ]
    bench = Bench(tmp_path, [{"calls": calls}, bash("touch done"), SUBMIT])
    bench.run()
    one, two, three = bench.of("tool_call")[:3]
    assert [one.result, two.result, three.result] == ["exit code 0", "1\nexit code 0", "2\nexit code 0"]
    assert one.after == two.before and two.after == three.before
    assert [[change.path for change in event.files_changed] for event in (one, two, three)] == [["/a"], ["/b"], []]
    answered_ids(bench.requests[-1])


BAD_ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "malformed JSON": ({"calls": [{"name": "bash", "raw_arguments": '{"command": "ls'}]}, "no JSON"),
    "no object": ({"calls": [{"name": "bash", "raw_arguments": "[1]"}]}, "JSON object"),
    "missing field": ({"calls": [{"name": "bash", "arguments": {}}]}, "command"),
    "unknown field": ({"calls": [call("bash", command="ls", why="x")]}, "why"),
    "wrong type": ({"calls": [call("bash", command=["ls"])]}, "command"),
    "NUL": ({"calls": [call("bash", command="ls \0")]}, "NUL"),
    "unknown tool": ({"calls": [call("rm -rf", path="/")]}, "there is no tool"),
    "nothing at all": ({}, "called no tool"),
    "text only": ({"say": "I am done."}, "called no tool"),
    "cut off": ({"say": "I thi", "finish_reason": "length"}, "cut off"),
    "cut off call": (
        {"calls": [{"name": "bash", "raw_arguments": '{"comm'}], "finish_reason": "length"},
        "cut off at its token limit",
    ),
}


@pytest.mark.parametrize(("answer", "told"), BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
def test_whatever_the_model_answers_is_answered_in_words(tmp_path: Path, answer: dict[str, Any], told: str) -> None:
    bench = Bench(tmp_path, [answer, bash("touch done"), SUBMIT])
    assert bench.run().status == "succeeded"
    assert told in bench.requests[1][-1]["content"]
    for request in bench.requests:
        answered_ids(request)


def test_malformed_arguments_stand_in_the_log_as_they_came(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [{"calls": [{"name": "bash", "raw_arguments": "{oops"}]}, bash("touch done"), SUBMIT])
    bench.run()
    assert bench.of("tool_call")[0].arguments == "{oops"
    assert bench.of("model_call")[0].messages[0]["tool_calls"][0]["function"]["arguments"] == "{oops"


def test_a_command_that_runs_too_long_is_killed_and_said_so(tmp_path: Path) -> None:
    slow = {"calls": [call("bash", command="echo begun; sleep 60", timeout_s=0.3)]}
    bench = Bench(tmp_path, [slow, bash("touch done"), SUBMIT])
    bench.run()
    event = bench.of("tool_call")[0]
    assert event.timed_out and event.exit_code is None
    assert event.result == "begun\nkilled: the command ran longer than 0.3 s"


def test_output_that_is_no_text_and_too_long_arrives_cut_and_readable(tmp_path: Path) -> None:
    replies = [bash("printf '\\377\\376'; yes | head -c 100000; echo end"), bash("touch done"), SUBMIT]
    bench = Bench(tmp_path, replies, limits={"tool_output_bytes": 1000})
    bench.run()
    result = bench.of("tool_call")[0].result
    assert result.startswith("\ufffd\ufffdy") and "bytes cut here" in result and result.endswith("end\nexit code 0")
    assert len(result) < 1200


def test_secrets_are_in_no_file_of_the_run(tmp_path: Path) -> None:
    env = {"TOKEN": {"from_env": "TOKEN", "secret": True}}
    bench = Bench(
        tmp_path,
        [bash("echo got $TOKEN"), {"say": "so it is hunter2-hunter2"}, bash("touch done"), SUBMIT],
        environ={"TOKEN": "hunter2-hunter2"},
        env=env,
    )
    assert bench.run().status == "succeeded"
    assert bench.of("tool_call")[0].result == "got <secret>\nexit code 0"
    assert "hunter2" not in (tmp_path / "events.jsonl").read_text(encoding="utf-8")


def test_calls_before_a_rewind_run_and_those_after_it_do_not(tmp_path: Path) -> None:
    commit = call("backtrack_commit", breakpoint_id=0, memory_summary="not so")
    mixed = {
        "calls": [call("bash", command="touch before"), commit, call("bash", command="touch after"), call("submit")]
    }
    bench = Bench(tmp_path, [bash("touch first"), mixed, bash("ls; touch done"), SUBMIT])
    assert bench.run().status == "succeeded"
    ran = [json.loads(event.arguments).get("command") for event in bench.of("tool_call") if event.name == "bash"]
    assert ran == ["touch first", "touch before", "ls; touch done"]
    assert len(bench.of("submission")) == 1
    first_after = bench.requests[2]
    assert len(first_after) == 3 and first_after[-1]["content"].startswith("The run has been rewound to breakpoint 0")
    assert bench.of("tool_call")[2].result == "exit code 0", "neither first nor before is there any more"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"breakpoint_id": 99, "memory_summary": "x"}, "no breakpoint to go back to"),
        ({"breakpoint_id": 0, "memory_summary": " \n"}, "memory_summary"),
        ({"memory_summary": "x"}, "breakpoint_id"),
        ({"breakpoint_id": "first", "memory_summary": "x"}, "breakpoint_id"),
    ],
)
def test_a_bad_rewind_is_answered_without_rewinding(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    bad = {"calls": [call("backtrack_commit", **arguments), call("bash", command="touch after")]}
    bench = Bench(tmp_path, [bash("touch a"), bad, bash("touch done"), SUBMIT])
    assert bench.run().rewinds == 0
    assert told in bench.requests[2][-2]["content"] and "not run" in bench.requests[2][-1]["content"]
    assert (bench.container.root / "a").exists() and not (bench.container.root / "after").exists()
    answered_ids(bench.requests[-1])


def test_an_abandoned_breakpoint_is_no_candidate(tmp_path: Path) -> None:
    replies = [bash("touch a"), bash("touch b"), rewind(0), {"calls": [call("backtrack_candidates")]}, rewind(2)]
    bench = Bench(tmp_path, [*replies, bash("touch done"), SUBMIT])
    assert bench.run().rewinds == 1
    listed = bench.requests[4][-1]["content"].splitlines()
    assert [json.loads(line)["breakpoint_id"] for line in listed[1:]] == [4, 0]
    assert json.loads(listed[2])["earlier_failures"] == ["that way fails"]
    assert "no breakpoint to go back to" in bench.requests[5][-1]["content"]


def test_the_strategy_continue_offers_no_rewind(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [rewind(0), bash("touch done"), SUBMIT], strategy="continue")
    assert bench.run().rewinds == 0
    names = [tool["function"]["name"] for tool in bench.of("run")[0].tools]
    assert names == ["bash", "submit"]
    assert "there is no tool" in bench.requests[1][-1]["content"]
    assert "backtrack" not in bench.requests[0][0]["content"]


def test_a_lost_connection_costs_one_event(tmp_path: Path) -> None:
    flaky = bash("touch done", fail={"error": "rate_limit", "times": 2})
    bench = Bench(tmp_path, [flaky, SUBMIT])
    assert bench.run().status == "succeeded"
    assert [event.attempts for event in bench.of("model_call")] == [3, 1]
    assert Counter(event.kind for event in bench.events)["engine_error"] == 0


def test_a_model_that_gives_up_fails_the_run_at_a_committed_breakpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch a")])
    result = bench.run()
    assert (result.status, result.reason) == ("failed", "model_error")
    assert "no reply of the script fits request 1" in bench.of("end")[0].text
    assert bench.of("checkpoint")[-1].breakpoint_id == 1 and bench.of("tool_call")[0].after is not None


def test_an_interrupted_run_keeps_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, [bash("touch a"), bash("touch b")])
    original = bench.container.exec

    def interrupted(command: Any, **options: Any) -> Any:
        if command == "touch b":
            raise KeyboardInterrupt
        return original(command, **options)

    monkeypatch.setattr(bench.container, "exec", interrupted)
    result = bench.run()
    assert (result.status, result.reason) == ("interrupted", "user")
    assert not bench.container.removed and bench.of("end")[0].status == "interrupted"


def test_background_programs_make_later_changes_shared(tmp_path: Path) -> None:
    replies = [bash("sleep 30 &"), bash("touch a"), rewind(0), bash("touch done"), SUBMIT]
    bench = Bench(tmp_path, replies)
    bench.run()
    assert [event.shared for event in bench.of("tool_call") if event.name == "bash"] == [False, True, False]
