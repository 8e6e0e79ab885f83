"""Whole runs against a real HTTP endpoint: what the log holds, and that strict providers take every request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from orchestrator.aside import DIRECTORY, INLINE_BYTES, taken_back
from orchestrator.runner import RunResult
from orchestrator.totals import totals
from tests.e2e import provider_replies as wire
from tests.e2e.provider_server import ProviderServer, Reply, Script
from tests.e2e.test_endpoints import KEY, NAMES, _keys, error, routes, text  # noqa: F401 - a fixture
from tests.unit.directory_container import Bench

Call = tuple[str, dict[str, Any]]
TOUCH: Call = ("bash", {"command": "touch done"})
SUBMIT: Call = ("submit", {})


class Run(Bench):
    """A run whose model is a scripted provider."""

    def __init__(self, directory: Path, server: ProviderServer, route: str, **keys: Any) -> None:
        address = server.url + ("/v1" if route == "openai" else "")
        limits = {"timeout_s": 20, "stall_timeout_s": 1, "retries": 1}
        model = {"name": NAMES[route], "api_base": address, **limits, **keys.pop("model", {})}
        super().__init__(directory, [], model=model, **keys)
        self.server = server


def finished(
    directory: Path, route: str, *replies: Script, model: dict[str, Any] | None = None, **keys: Any
) -> tuple[Run, RunResult]:
    """A run to its end; strict providers would have taken each of its requests."""
    with ProviderServer(*replies) as server:
        run = Run(directory, server, route, model=model or {}, **keys)
        return run, run.run()


def calls(route: str, stream: bool, *wanted: Call, ids: list[str] | None = None, thought: str | None = None) -> Reply:
    """An answer that calls tools, with what the model thought of it."""
    names = ids or [f"toolu_{crc32(str(wanted).encode())}_{at}" for at in range(len(wanted))]
    if route == "anthropic":
        blocks: list[dict[str, Any]] = []
        if thought:
            blocks = [{"type": "thinking", "thinking": thought, "signature": f"S/{thought}=="}]
            blocks += [{"type": "redacted_thinking", "data": f"R/{thought}"}]
        blocks += [
            {"type": "tool_use", "id": i, "name": n, "input": a} for i, (n, a) in zip(names, wanted, strict=True)
        ]
        return (wire.anthropic_stream if stream else wire.anthropic)(blocks, "tool_use")
    parts = [
        wire.call(i, json.dumps(a), name=n, index=at) for at, (i, (n, a)) in enumerate(zip(names, wanted, strict=True))
    ]
    reasoning = {"reasoning_content": thought} if thought else {}
    if stream:
        return wire.openai_stream(
            [{"role": "assistant", "content": None}, reasoning, {"tool_calls": parts}], "tool_calls"
        )
    return wire.openai({"tool_calls": parts, **reasoning}, "tool_calls")


def odd(route: str, stream: bool) -> list[Reply]:
    """Answers as models and servers should not give them, each of which a run has to live with."""
    done = {"command": "true"}
    if route == "anthropic":
        make = wire.anthropic_stream if stream else wire.anthropic
        half = wire.anthropic_events([wire.tool_use("ls", "toolu_half")], "max_tokens")
        cut = wire.stream([wire.anthropic_event(event) for event in [*half[:5], *half[6:]]])
        return [
            calls(route, stream, ("bash", done), ("bash", done), ids=["toolu_same", "toolu_same"]),
            calls(route, stream, ("bash", done), ids=["toolu_same"]),
            cut if stream else make([], "max_tokens"),
            make([], "refusal"),
            make([{"type": "text", "text": " \n"}]),
            make(
                [{"type": "text", "text": "Grüße \u2028 😀 \ud83d"}, wire.tool_use("echo ü\u2028😀", "toolu_u")],
                "tool_use",
            ),
        ]
    odd_calls = [
        wire.call("", '{"command": "tr'),
        wire.call("x", "[1]"),
        wire.call("x", '{"command": "true"}', "no tool!"),
    ]
    messages: list[tuple[dict[str, Any], str | None]] = [
        ({"tool_calls": odd_calls}, "length"),
        ({"tool_calls": [wire.call("x", '{"command": "true"}')]}, "stop"),
        ({"refusal": "I will not."}, "stop"),
        ({"content": "half a sen"}, "content_filter"),
        ({"content": ""}, "stop"),
        (
            {"content": "Grüße \u2028 😀 \ud83d", "tool_calls": [wire.call("u", '{"command": "echo ü\u2028😀"}')]},
            "tool_calls",
        ),
    ]
    if not stream:
        return [wire.openai(message, finish) for message, finish in messages]
    numbered = [
        {**message, "tool_calls": [{**one, "index": at} for at, one in enumerate(message["tool_calls"])]}
        if "tool_calls" in message
        else message
        for message, _ in messages
    ]
    return [wire.openai_stream([delta], finish) for delta, (_, finish) in zip(numbered, messages, strict=True)]


@routes
def test_every_request_is_valid_after_odd_answers_and_after_a_rewind(tmp_path: Path, route: str, stream: bool) -> None:
    answers = odd(route, stream)
    back: Call = ("backtrack_commit", {"breakpoint_id": len(answers), "memory_summary": "no <b>"})
    more = [calls(route, stream, ("bash", {"command": "touch lost"})), calls(route, stream, back)]
    run, result = finished(
        tmp_path,
        route,
        *answers,
        *more,
        calls(route, stream, TOUCH),
        calls(route, stream, SUBMIT),
        model={"stream": stream},
    )
    assert (result.status, result.rewinds) == ("succeeded", 1)
    assert [event.attempts for event in run.of("model_call")] == [1] * (len(answers) + 4)
    told = json.dumps([event.messages for event in run.events if event.kind == "note"])
    assert "content filter" in told and (route == "anthropic" or "You refused" in told)
    if route == "openai":
        arguments = [event.arguments for event in run.of("tool_call")][:3]
        assert arguments == ['{"command": "tr', "[1]", '{"command": "true"}'], "unrepaired in the log"
    same_beginning(run, before=len(answers), after=len(answers) + 2)


def same_beginning(run: Run, *, before: int, after: int) -> None:
    """The bytes of request ``before`` stand at the beginning of ``after``, as prompt caches want it."""
    one, two = run.server.requests[before], run.server.requests[after]
    # Anthropic's last user message has the rewind's text added to it.
    prefix = one.messages_text.removesuffix("]}")
    assert two.messages_text.startswith(prefix) and len(two.messages_text) > len(one.messages_text)
    rest = [{name: value for name, value in request.json.items() if name != "messages"} for request in (one, two)]
    assert json.dumps(rest[0]) == json.dumps(rest[1])


@routes
def test_what_a_model_thought_is_sent_back_as_it_came_also_after_a_rewind(
    tmp_path: Path, route: str, stream: bool
) -> None:
    back: Call = ("backtrack_commit", {"breakpoint_id": 1, "memory_summary": "no"})
    thinking = {"extra": {"thinking": {"type": "enabled", "budget_tokens": 1024}}} if route == "anthropic" else {}
    run, result = finished(
        tmp_path,
        route,
        calls(route, stream, ("bash", {"command": "touch a"}), thought="Erst\u2028 ä"),
        calls(route, stream, back, thought="back"),
        calls(route, stream, TOUCH, thought="then"),
        calls(route, stream, SUBMIT, thought="end"),
        model={"stream": stream, "temperature": None, **thinking},
    )
    assert (result.status, result.rewinds) == ("succeeded", 1)
    same_beginning(run, before=1, after=2)
    first = next(message for message in run.server.requests[3].json["messages"] if message["role"] == "assistant")
    if route == "openai":
        assert first["reasoning_content"] == "Erst\u2028 ä"
    else:
        signed = {"type": "thinking", "thinking": "Erst\u2028 ä", "signature": "S/Erst\u2028 ä=="}
        assert first["content"][:2] == [signed, {"type": "redacted_thinking", "data": "R/Erst\u2028 ä"}]


@pytest.mark.parametrize("finish", [None, "length"])
def test_half_written_arguments_of_a_cut_stream_never_reach_the_conversation(
    tmp_path: Path, finish: str | None
) -> None:
    half = wire.openai_stream([{"tool_calls": [wire.call("t1", '{"command": "ls', index=0)]}], finish, done=False)
    run, result = finished(
        tmp_path, "openai", half, calls("openai", True, TOUCH), calls("openai", True, SUBMIT), model={"stream": True}
    )
    assert result.status == "succeeded"
    first = run.of("model_call")[0]
    assert first.breakpoint_id == 0 and len(run.of("model_call")) == (2 if finish is None else 3)
    if finish is None:
        (cut,) = first.failed_tries
        assert first.attempts == 2 and cut.incomplete and cut.raw[0]["choices"][0]["delta"]["tool_calls"]
        assert [call["id"] for call in first.messages[0]["tool_calls"]] != ["t1"]
    else:
        assert first.finish_reason == "length" and run.of("tool_call")[0].arguments == '{"command": "ls'


@routes
def test_a_model_that_stays_away_is_one_event_and_the_run_stands_at_its_breakpoint(
    tmp_path: Path, route: str, stream: bool
) -> None:
    first = calls(route, stream, ("bash", {"command": "touch a"}))
    run, result = finished(tmp_path, route, first, error(route, 503, f"no {KEY}"), model={"stream": stream})
    assert (result.status, result.reason) == ("failed", "model_error")
    (failure,) = run.of("model_failure")
    assert (failure.attempts, len(failure.failed_tries), failure.breakpoint_id) == (2, 2, 1)
    assert failure.text == run.of("end")[0].text and "after 2 tries: HTTP 503" in failure.text
    assert len(run.of("model_call")) == 1 and run.of("checkpoint")[-1].breakpoint_id == 1
    assert KEY not in "".join(file.read_text() for file in tmp_path.rglob("*") if file.is_file())


@routes
def test_a_conversation_that_is_too_long_ends_the_run_with_advice(tmp_path: Path, route: str, stream: bool) -> None:
    too_long = error(route, 400, "prompt is too long: 9 tokens > 8 maximum", "invalid_request_error")
    run, result = finished(tmp_path, route, too_long, model={"stream": stream})
    assert (result.status, result.reason) == ("failed", "model_error") and len(run.server.requests) == 1
    assert "restore an earlier breakpoint" in run.of("end")[0].text


@routes
def test_a_large_answer_stands_in_the_log_once(tmp_path: Path, route: str, stream: bool) -> None:
    value = "0123456789abcde\n" * 2**16 * 2
    replies = [text(route, stream, value), calls(route, stream, TOUCH), calls(route, stream, SUBMIT)]
    run, result = finished(tmp_path, route, *replies, model={"stream": stream})
    assert result.status == "succeeded"
    event = run.of("model_call")[0]
    assert event.messages[0]["content"] == value and set(event.response) == {"aside", "bytes"}
    assert (tmp_path / "events.jsonl").stat().st_size < 1.2 * len(value)
    (file,) = (tmp_path / DIRECTORY).iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and file.name == event.response["aside"]
    raw = taken_back(tmp_path, event.response)
    assert len(json.dumps(raw)) == event.response["bytes"] > INLINE_BYTES


def test_unknown_tokens_are_counted_as_unknown(tmp_path: Path) -> None:
    counted = wire.openai_stream(
        [{"tool_calls": [wire.call("s", "{}", name="submit", index=0)]}], usage=wire.OPENAI_USAGE
    )
    run, _ = finished(tmp_path, "openai", calls("openai", True, TOUCH), counted, model={"stream": True})
    used = totals(run.events)
    assert (used.usage.total_tokens, used.usage_unknown, used.cost_unknown) == (18, 1, 2)


def test_cache_breakpoints_are_sent_when_the_task_asks_for_them(tmp_path: Path) -> None:
    points = [{"location": "message", "role": "system"}, {"location": "message", "index": -1}]
    run, _ = finished(
        tmp_path,
        "anthropic",
        calls("anthropic", False, TOUCH),
        calls("anthropic", False, SUBMIT),
        model={"extra": {"cache_control_injection_points": points}},
    )
    body = run.server.requests[1].json
    mark = {"type": "ephemeral"}
    assert body["system"][-1]["cache_control"] == body["messages"][-1]["content"][-1]["cache_control"] == mark
    assert run.server.requests[1].body.count(b"cache_control") == 2
