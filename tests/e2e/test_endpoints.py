"""One model call against a real HTTP endpoint, through LiteLLM's OpenAI and Anthropic routes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from orchestrator.events import FailedTry
from orchestrator.model import RETRY_AFTER_MAX_S, Completion, Model
from orchestrator.model_errors import NoAnswer
from orchestrator.task import ModelSpec
from orchestrator.tools import schemas
from tests.e2e import provider_replies as wire
from tests.e2e.provider_server import ProviderServer, Reply, Request, Script

KEY = "sk-very-secret-0123456789"
MESSAGES = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Héllo \u2028 😀"}]
NAMES = {"openai": "openai/some-model", "anthropic": "anthropic/claude-sonnet-4-5"}
ROUTES = [(route, stream) for route in NAMES for stream in (False, True)]
routes = pytest.mark.parametrize(
    ("route", "stream"), ROUTES, ids=[f"{r}-{'stream' if s else 'plain'}" for r, s in ROUTES]
)


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@dataclass
class Asked:
    """What became of one call."""

    answer: Completion | None
    error: NoAnswer | None
    requests: list[Request]
    pauses: list[float]
    seconds: float

    @property
    def tries(self) -> list[FailedTry]:
        return self.answer.failed_tries if self.answer else self.error.tries if self.error else []

    @property
    def message(self) -> dict[str, Any]:
        assert self.answer is not None, self.error
        return self.answer.message


def spec_of(url: str, route: str, **spec: Any) -> ModelSpec:
    base = url + ("/v1" if route == "openai" else "")
    limits = {"timeout_s": 5.0, "stall_timeout_s": 1.0, "retries": 2}
    return ModelSpec(name=NAMES[route], api_base=base, **{**limits, **spec})


def ask(route: str, *replies: Script, url: str | None = None, **spec: Any) -> Asked:
    """One call; the server's rules for strict providers hold for every request."""
    pauses: list[float] = []
    with ProviderServer(*replies) as server:
        model = Model(spec_of(url or server.url, route, **spec), Path(), sleep=pauses.append, jitter=lambda: 1.0)
        began, answer, error = time.monotonic(), None, None
        try:
            answer = model.complete(MESSAGES, schemas("rewind"))
        except NoAnswer as raised:
            error = raised
        return Asked(answer, error, server.requests, pauses, time.monotonic() - began)


def text(route: str, stream: bool, value: str = "fine", **reply: Any) -> Reply:
    """An answer that says something."""
    if route == "openai":
        if stream:
            return wire.openai_stream(
                [{"role": "assistant", "content": ""}, *[{"content": x} for x in wire.halves(value)]], **reply
            )
        return wire.openai({"content": value}, **reply)
    return (wire.anthropic_stream if stream else wire.anthropic)([{"type": "text", "text": value}], **reply)


def error(route: str, status: int, message: str = "bad", kind: str = "some_error", **reply: Any) -> Reply:
    problem = {"error": {"message": message, "type": kind, "code": kind}}
    return wire.plain({"type": "error", **problem} if route == "anthropic" else problem, status, **reply)


@routes
def test_an_answer_arrives_and_the_request_is_as_it_should_be(route: str, stream: bool) -> None:
    asked = ask(route, text(route, stream, "Grüße\u2028\U0001f600 \x00 end"), stream=stream)
    assert asked.message == {"role": "assistant", "content": "Grüße\u2028\U0001f600 \x00 end"}
    assert asked.answer is not None and (asked.answer.attempts, asked.answer.finish_reason) == (1, "stop")
    (request,) = asked.requests
    assert request.json.get("stream", False) is stream and "Héllo \u2028 😀" in json.dumps(
        request.json, ensure_ascii=False
    )
    assert "stream_options" not in request.json and "cache_control" not in request.body.decode()
    assert ("events" in asked.answer.response) is stream


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("route", NAMES)
def test_parallel_calls_come_out_of_a_stream_cut_or_glued_anywhere(route: str, seed: int) -> None:
    commands = ["echo Grüße 😀", 'printf "a\\nb"', "ls"]
    if route == "openai":
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None}]
        deltas += [{"tool_calls": [wire.call(f"t{at}", "", index=at) for at in range(3)]}]
        for halves in zip(*(wire.halves(json.dumps({"command": command})) for command in commands), strict=True):
            deltas += [
                {"tool_calls": [{"index": at, "function": {"arguments": half}} for at, half in enumerate(halves)]}
            ]
        reply = wire.openai_stream(deltas, "tool_calls")
    else:
        reply = wire.anthropic_stream(
            [wire.tool_use(command, f"t{at}") for at, command in enumerate(commands)], "tool_use"
        )
    asked = ask(route, wire.glued(reply) if seed == 0 else wire.recut(reply, seed), stream=True)
    calls = asked.message["tool_calls"]
    assert [call["id"] for call in calls] == ["t0", "t1", "t2"]
    assert [json.loads(call["function"]["arguments"])["command"] for call in calls] == commands


def test_usage_is_what_the_provider_said_or_nothing() -> None:
    with_usage = [{"content": "x"}]
    cases: list[tuple[str, Reply, dict[str, Any], int | None]] = [
        ("openai", wire.openai({"content": "x"}), {}, 18),
        ("openai", wire.openai({"content": "x"}, usage=None), {}, None),
        ("openai", wire.openai_stream(with_usage), {"stream": True}, None),
        ("openai", wire.openai_stream(with_usage, usage=wire.OPENAI_USAGE), {"stream": True}, 18),
        ("anthropic", wire.anthropic([{"type": "text", "text": "x"}]), {}, 18),
        ("anthropic", wire.anthropic([{"type": "text", "text": "x"}], usage=None), {}, None),
        ("anthropic", wire.anthropic_stream([{"type": "text", "text": "x"}]), {"stream": True}, 18),
    ]
    for route, reply, spec, total in cases:
        answer = ask(route, reply, **spec).answer
        assert answer is not None
        assert (answer.usage.total_tokens if answer.usage else None) == total, (route, spec)
        assert (answer.cost_usd is not None and answer.cost_usd > 0) is (route == "anthropic" and total is not None)
    wanted = {"stream_options": {"include_usage": True}}
    asked = ask("openai", wire.openai_stream(with_usage, usage=wire.OPENAI_USAGE), stream=True, extra=wanted)
    assert asked.requests[0].json["stream_options"] == {"include_usage": True}


@routes
@pytest.mark.parametrize(
    ("status", "headers", "pause_s"),
    [
        (429, {}, 1.0),
        (429, {"retry-after": "7"}, 7.0),
        (429, {"retry-after": "86400"}, RETRY_AFTER_MAX_S),
        (503, {"date": formatdate(1e9, usegmt=True), "retry-after": formatdate(1e9 + 9, usegmt=True)}, 9.0),
        (500, {"retry-after": "soon"}, 1.0),
        (529, {}, 1.0),
        (408, {}, 1.0),
    ],
)
def test_what_may_pass_is_tried_again(
    route: str, stream: bool, status: int, headers: dict[str, str], pause_s: float
) -> None:
    asked = ask(route, error(route, status, headers=headers), text(route, stream), stream=stream)
    assert asked.message["content"] == "fine"
    assert (len(asked.requests), asked.pauses) == (2, [pause_s])
    assert [(one.status, one.incomplete) for one in asked.tries] == [(status, False)]
    assert asked.requests[0].body == asked.requests[1].body


REFUSED: dict[str, tuple[int, str, str, str]] = {
    "wrong key": (401, f"Incorrect API key provided: {KEY}", "authentication_error", "put a key"),
    "no permission": (403, "no", "permission_error", "put a key"),
    "no such model": (404, "no such model", "not_found_error", "check model.name"),
    "context": (
        400,
        "This model's maximum context length is 8192 tokens",
        "context_length_exceeded",
        "restore an earlier",
    ),
    "context, Anthropic": (
        400,
        "prompt is too long: 210000 tokens > 200000 maximum",
        "invalid_request_error",
        "restore an",
    ),
    "context, as a server error": (500, "the input exceeds the model's context window", "x", "restore an earlier"),
    "too large": (413, "Request exceeds the maximum size", "request_too_large", "restore an earlier"),
    "no credit": (429, "You exceeded your current quota", "insufficient_quota", "top it up"),
    "content filter": (400, "filtered by the content management policy", "content_filter", "filter refuses"),
    "parameter": (400, "temperature: unsupported", "invalid_request_error", "check the parameters"),
    "other roles": (400, "Conversation roles must alternate user/assistant", "invalid_request_error", "check the"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
@routes
def test_what_another_try_would_meet_again_is_told_with_a_remedy(
    route: str, stream: bool, case: tuple[int, str, str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    status, message, kind, remedy = case
    asked = ask(route, error(route, status, message, kind), stream=stream)
    assert asked.error is not None and len(asked.requests) == 1 and asked.pauses == []
    said = str(asked.error)
    assert "after 1 try" in said and remedy in said and message.replace(KEY, "<secret>") in said
    assert KEY not in said + repr(asked.tries) + repr(asked.error.parameters) + "".join(capfd.readouterr())


@routes
@pytest.mark.parametrize("drop", ["before", "in", "after"])
def test_a_dropped_connection_is_tried_again_unless_the_answer_is_whole(
    route: str, stream: bool, drop: Any, request: pytest.FixtureRequest
) -> None:
    first = text(route, stream, "first", drop=drop)
    if stream and drop == "in":
        first = Reply(headers=first.headers, pieces=first.pieces[:3], framing="chunked", drop="after")
    asked = ask(route, first, text(route, stream), stream=stream)
    whole = drop == "after"
    assert asked.message["content"] == ("first" if whole else "fine")
    assert len(asked.requests) == len(asked.tries) + 1 == (1 if whole else 2)
    assert [one.incomplete for one in asked.tries] == [] if whole else [stream and drop == "in"]


@pytest.mark.parametrize("framing", ["chunked", "close", "length"])
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("route", NAMES)
def test_a_stream_without_a_finish_reason_is_incomplete_and_its_chunks_are_kept(
    route: str, done: bool, framing: Any
) -> None:
    if route == "openai":
        half = {"tool_calls": [wire.call("t1", '{"command": "ls', index=0)]}
        cut = wire.openai_stream([half], None, done=done, framing=framing)
    else:
        cut = wire.anthropic_stream([wire.tool_use("ls")], None, framing=framing)
    asked = ask(route, cut, cut, text(route, True), stream=True)
    assert asked.answer is not None and asked.answer.attempts == 3 and asked.message["content"] == "fine"
    assert [(one.kind, one.incomplete) for one in asked.tries] == [("incomplete", True)] * 2
    assert '"name": "bash"' in json.dumps(asked.tries[0].raw)
    given_up = ask(route, cut, stream=True, retries=1)
    assert given_up.error is not None and "ended without a finish reason" in str(given_up.error)
    assert len(given_up.tries) == len(given_up.requests) == 2


@routes
def test_no_answer_in_time_is_tried_again(route: str, stream: bool) -> None:
    asked = ask(route, text(route, stream, wait_s=3), text(route, stream), stream=stream, timeout_s=0.4)
    assert asked.message["content"] == "fine" and [one.kind for one in asked.tries] == ["timeout"]
    assert asked.seconds < 2.5


@pytest.mark.parametrize("route", NAMES)
def test_a_stream_may_neither_stall_nor_drip_for_ever(route: str) -> None:
    stalled = ask(route, text(route, True, gap_s=3), stream=True, stall_timeout_s=0.2, retries=0)
    assert "stopped coming" in str(stalled.error) and stalled.tries[0].incomplete and stalled.seconds < 2.5
    dripping = ask(route, text(route, True, gap_s=0.3), stream=True, timeout_s=0.4, retries=0)
    assert "not complete after 0.4 s" in str(dripping.error) and dripping.seconds < 2.5


def test_no_connection_is_tried_again_and_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused
        asked = ask("openai", text("openai", False), url=f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert asked.requests == [] and [one.kind for one in asked.tries] == ["connection"] * 3
    assert "after 3 tries: the connection failed" in str(asked.error)


def test_a_connection_that_does_not_come_about_is_given_up() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for one in (first, second):
            one.setblocking(False)
            one.connect_ex(full.getsockname())  # nobody accepts: the queue is full
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        asked = ask("openai", text("openai", False), url=url, timeout_s=0.3, retries=0)
    assert [one.text for one in asked.tries] == ["no connection in time"] and asked.seconds < 2.5


HTML = b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"


@routes
def test_what_is_no_answer_is_not_taken_for_one(route: str, stream: bool) -> None:
    page = {"content-type": "text/html"}
    gateway = ask(route, Reply(502, page, (HTML,)), text(route, stream), stream=stream)
    assert gateway.message["content"] == "fine" and "502 Bad Gateway nginx" in gateway.tries[0].text
    portal = ask(route, Reply(200, page, (HTML,)), stream=stream)
    assert "no model API answers there" in str(portal.error) and len(portal.requests) == 1
    whole = text(route, False).pieces[0]
    for broken in (whole[:-9], b"", b'{"unfinished', b"[]", b"{}"):
        asked = ask(route, Reply(200, wire.JSON, (broken,)), text(route, stream), stream=stream)
        assert asked.message["content"] == "fine" and len(asked.requests) == 2, broken
    error_in_200 = ask(route, error(route, 200, "busy", "overloaded_error"), text(route, stream), stream=stream)
    assert error_in_200.message["content"] == "fine" and len(error_in_200.requests) == 2


@pytest.mark.parametrize("route", NAMES)
def test_an_error_in_the_middle_of_a_stream_is_one(route: str) -> None:
    begun = text(route, True).pieces[:3]
    problem = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    asked = ask(route, wire.stream([*begun, wire.anthropic_event(problem)]), text(route, True), stream=True)
    assert asked.message["content"] == "fine" and "Overloaded" in asked.tries[0].text
    garbled = ask(route, wire.stream([*begun, b"data: {oops\n\n"]), text(route, True), stream=True)
    assert garbled.message["content"] == "fine" and garbled.tries[0].kind == "invalid_body"


@pytest.mark.parametrize("route", NAMES)
def test_a_wrong_content_type_or_the_other_form_is_read_all_the_same(route: str) -> None:
    plain, stream = text(route, False), text(route, True)
    assert ask(route, Reply(pieces=plain.pieces, headers={"content-type": "text/plain"})).message["content"] == "fine"
    assert ask(route, plain, stream=True).message["content"] == "fine", "the server knows no streams"
    odd = Reply(pieces=stream.pieces, headers={"content-type": "text/plain"}, framing="chunked")
    assert ask(route, odd, stream=True).message["content"] == "fine"


@pytest.mark.parametrize("route", NAMES)
@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(route: str, status: int) -> None:
    with ProviderServer(text(route, False)) as elsewhere:
        asked = ask(route, Reply(status, {"location": f"{elsewhere.url}/v1/messages"}))
        assert elsewhere.requests == []
    assert "redirects are not followed" in str(asked.error) and len(asked.requests) == 1


@routes
def test_an_answer_of_10_mb_arrives_whole(route: str, stream: bool) -> None:
    value = "0123456789abcde\n" * 2**16 * 10
    asked = ask(route, text(route, stream, value), stream=stream, timeout_s=60.0)
    assert asked.message["content"] == value and len(asked.requests) == 1


def test_an_answer_without_end_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.wire.ANSWER_MAX_BYTES", 10_000)
    asked = ask("openai", text("openai", True, "x" * 50_000), stream=True)
    assert "the answer has no end" in str(asked.error) and len(asked.requests) == 1


def test_a_row_of_equal_chunks_is_an_answer_like_any_other() -> None:
    asked = ask("openai", wire.openai_stream([{"content": "=" * 12}] * 300), stream=True)
    assert asked.message["content"] == "=" * 3600


def test_nobody_but_the_provider_is_called_and_the_terminal_stays_quiet() -> None:
    code = """
import sys
def audit(event, args):
    host = args[1][0] if event == "socket.connect" else args[0] if event == "socket.getaddrinfo" else "127.0.0.1"
    if host != "127.0.0.1":
        print("CALLED", event, host)
sys.addaudithook(audit)
from tests.e2e.test_endpoints import *
for route, stream in ROUTES:
    ask(route, error(route, 500), text(route, stream), stream=stream)
    ask(route, error(route, 400), stream=stream)
"""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
