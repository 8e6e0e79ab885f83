"""What strict providers refuse in a request: the rules of the OpenAI and the Anthropic API, as problems in words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

Body = dict[str, Any]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ANTHROPIC_ID = re.compile(r"[A-Za-z0-9_-]+")
_MOST_CACHE_BREAKPOINTS = 4


def openai_problems(body: Body, headers: dict[str, str]) -> list[str]:
    """Breaches of the chat completions API."""
    return list(_openai(body, headers))


def anthropic_problems(body: Body, headers: dict[str, str]) -> list[str]:
    """Breaches of the messages API."""
    return list(_anthropic(body, headers))


def responses_problems(body: Body, headers: dict[str, str]) -> list[str]:
    """Breaches of the responses API."""
    return list(_responses(body, headers))


def _responses(body: Body, headers: dict[str, str]) -> Iterator[str]:
    if not headers.get("authorization", "").startswith("Bearer "):
        yield "no key"
    given = body.get("input")
    if not given:
        yield "no input"
    asked: list[str] = []
    for place, item in enumerate(given if isinstance(given, list) else []):
        if item.get("type") == "function_call":
            asked.append(item["call_id"])
        elif item.get("type") == "function_call_output":
            if item["call_id"] not in asked and not body.get("previous_response_id"):
                yield f"input.{place}: an output that answers no call"
        elif item.get("role") not in ("system", "developer", "user", "assistant"):
            yield f"input.{place}: role {item.get('role')!r}"


def _openai(body: Body, headers: dict[str, str]) -> Iterator[str]:
    if not headers.get("authorization", "").startswith("Bearer "):
        yield "no key"
    waiting: list[str] = []
    for place, message in enumerate(body["messages"]):
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            if not waiting:
                yield f"messages.{place}: a tool message that answers no call"
            elif message.get("tool_call_id") != waiting.pop(0):
                yield f"messages.{place}: tool_call_id {message.get('tool_call_id')!r} is not the call whose turn it is"
            if not isinstance(content, str):
                yield f"messages.{place}: a tool message without text"
            continue
        if waiting:
            yield f"messages.{place}: the calls {waiting} have no tool message"
            waiting = []
        if role not in ("system", "user", "assistant"):
            yield f"messages.{place}: role {role!r}"
        calls = message.get("tool_calls")
        if calls is not None and not calls:
            yield f"messages.{place}: tool_calls is empty"
        if not content and not (role == "assistant" and calls):
            yield f"messages.{place}: no content"
        ids = [call.get("id") for call in calls or []]
        if len(set(ids)) < len(ids) or not all(ids):
            yield f"messages.{place}: ids of calls {ids}"
        for call in calls or []:
            yield from _function_problems(place, call)
        waiting = ids
    if waiting:
        yield f"the last calls {waiting} have no tool message"
    if body["messages"] and body["messages"][-1]["role"] == "assistant":
        yield "nothing is asked: the last message is the assistant's"


def _function_problems(place: int, call: Body) -> Iterator[str]:
    function = call.get("function") or {}
    if call.get("type") != "function" or not _NAME.fullmatch(str(function.get("name"))):
        yield f"messages.{place}: call {call}"
    try:
        if not isinstance(json.loads(function["arguments"]), dict):
            yield f"messages.{place}: arguments are no object"
    except (ValueError, KeyError, TypeError):
        yield f"messages.{place}: arguments are no JSON: {function.get('arguments')!r}"


def _anthropic(body: Body, headers: dict[str, str]) -> Iterator[str]:
    if not headers.get("x-api-key") or not headers.get("anthropic-version"):
        yield "no key or no version"
    if not isinstance(body.get("max_tokens"), int):
        yield "no max_tokens"
    if json.dumps(body).count('"cache_control"') > _MOST_CACHE_BREAKPOINTS:
        yield "too many cache breakpoints"
    thinking = (body.get("thinking") or {}).get("type") == "enabled"
    if thinking and body.get("temperature", 1) != 1:
        yield "thinking needs temperature 1"
    every_id = [
        block["id"] for message in body["messages"] for block in _blocks(message) if block["type"] == "tool_use"
    ]
    if len(set(every_id)) < len(every_id):
        yield f"ids of calls must differ in the whole conversation: {every_id}"
    waiting: list[str] = []
    last_role = "assistant"
    for place, message in enumerate(body["messages"]):
        role, blocks = message["role"], _blocks(message)
        if role not in ("user", "assistant") or (place == 0 and role != "user"):
            yield f"messages.{place}: role {role!r}"
        if role == last_role:
            yield f"messages.{place}: two messages of {role} in a row"
        last_role = role
        if not blocks:
            yield f"messages.{place}: no content"
        answered = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if answered != waiting:
            yield f"messages.{place}: results {answered} for the calls {waiting}"
        kinds = [block["type"] for block in blocks]
        if "tool_result" in kinds[len(answered) :]:
            yield f"messages.{place}: text stands before a tool_result"
        calls = [block for block in blocks if block["type"] == "tool_use"]
        waiting = [block["id"] for block in calls]
        if len(set(waiting)) < len(waiting) or not all(_ANTHROPIC_ID.fullmatch(item) for item in waiting):
            yield f"messages.{place}: ids of calls {waiting}"
        for block in blocks:
            yield from _block_problems(place, role, block)
        if thinking and calls and kinds[0] not in ("thinking", "redacted_thinking"):
            yield f"messages.{place}: with thinking, an assistant's calls follow its thinking block"
    if waiting:
        yield f"the last calls {waiting} have no result"
    if last_role != "user":
        yield "nothing is asked: the last message is the assistant's"


def _blocks(message: Body) -> list[Body]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _block_problems(place: int, role: str, block: Body) -> Iterator[str]:
    kind = block["type"]
    if kind == "text" and not block["text"].strip():
        yield f"messages.{place}: a text block without text"
    if kind == "tool_use" and (not isinstance(block["input"], dict) or not _NAME.fullmatch(block["name"])):
        yield f"messages.{place}: call {block}"
    if kind in ("tool_use", "thinking", "redacted_thinking") and role != "assistant":
        yield f"messages.{place}: {kind} of a {role}"
    if kind == "thinking" and not block.get("signature"):
        yield f"messages.{place}: thinking without its signature"
    if kind not in ("text", "tool_use", "tool_result", "thinking", "redacted_thinking"):
        yield f"messages.{place}: block of type {kind}"
