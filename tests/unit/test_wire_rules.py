"""The test server's rules: a request that a strict provider refuses is found."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.e2e.wire_rules import anthropic_problems, openai_problems

OPENAI_HEADERS = {"authorization": "Bearer x"}
ANTHROPIC_HEADERS = {"x-api-key": "x", "anthropic-version": "1"}
USER = {"role": "user", "content": "x"}


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "ok"}


OPENAI = [USER, {"role": "assistant", "tool_calls": [call("a"), call("b")]}, result("a"), result("b")]
OPENAI_BREACHES: dict[str, list[Any]] = {
    "a call without an answer": OPENAI[:3],
    "in between": [*OPENAI[:3], USER],
    "another order": [*OPENAI[:2], OPENAI[3], OPENAI[2]],
    "an orphan": [USER, result("a")],
    "one too many": [*OPENAI, result("a")],
    "equal ids": [USER, {"role": "assistant", "tool_calls": [call("a"), call("a")]}, result("a"), result("a")],
    "no id": [USER, {"role": "assistant", "tool_calls": [call("")]}, result("")],
    "arguments": [USER, {"role": "assistant", "tool_calls": [call("a", "{")]}, result("a")],
    "no calls": [USER, {"role": "assistant", "content": "x", "tool_calls": []}, USER],
    "empty": [USER, {"role": "assistant", "content": ""}, USER],
    "nothing asked": [USER, {"role": "assistant", "content": "x"}],
}


def test_a_valid_openai_request_has_no_problem() -> None:
    assert openai_problems({"messages": OPENAI}, OPENAI_HEADERS) == []
    assert openai_problems({"messages": OPENAI}, {}) == ["no key"]


@pytest.mark.parametrize("messages", OPENAI_BREACHES.values(), ids=OPENAI_BREACHES.keys())
def test_each_breach_of_the_openai_rules_is_found(messages: list[Any]) -> None:
    assert openai_problems({"messages": messages}, OPENAI_HEADERS)


def use(call_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "bash", "input": {}}


def used(*ids: str) -> dict[str, Any]:
    blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": "ok"} for call_id in ids]
    return {"role": "user", "content": blocks}


THOUGHT = {"type": "thinking", "thinking": "x", "signature": "s"}
ANTHROPIC = [USER, {"role": "assistant", "content": [THOUGHT, use("a"), use("b")]}, used("a", "b")]
BODY = {"max_tokens": 9, "thinking": {"type": "enabled"}}
ANTHROPIC_BREACHES: dict[str, list[Any]] = {
    "a call without a result": ANTHROPIC[:2],
    "one result": [*ANTHROPIC[:2], used("a")],
    "another order": [*ANTHROPIC[:2], used("b", "a")],
    "an orphan": [used("a")],
    "text first": [
        *ANTHROPIC[:2],
        {"role": "user", "content": [{"type": "text", "text": "x"}, *used("a", "b")["content"]]},
    ],
    "two of a role": [USER, USER],
    "assistant first": ANTHROPIC[1:],
    "empty text": [{"role": "user", "content": [{"type": "text", "text": " "}]}],
    "no signature": [USER, {"role": "assistant", "content": [{**THOUGHT, "signature": ""}, use("a")]}, used("a")],
    "no thought": [USER, {"role": "assistant", "content": [use("a")]}, used("a")],
    "equal ids, later": [*ANTHROPIC, {"role": "assistant", "content": [THOUGHT, use("a")]}, used("a")],
    "nothing asked": [USER, {"role": "assistant", "content": "x"}],
}


def test_a_valid_anthropic_request_has_no_problem() -> None:
    body = {**copy.deepcopy(BODY), "messages": ANTHROPIC}
    assert anthropic_problems(body, ANTHROPIC_HEADERS) == []
    assert anthropic_problems({**body, "temperature": 0}, ANTHROPIC_HEADERS)
    assert anthropic_problems({"messages": ANTHROPIC}, {})


@pytest.mark.parametrize("messages", ANTHROPIC_BREACHES.values(), ids=ANTHROPIC_BREACHES.keys())
def test_each_breach_of_the_anthropic_rules_is_found(messages: list[Any]) -> None:
    assert anthropic_problems({**BODY, "messages": messages}, ANTHROPIC_HEADERS)
