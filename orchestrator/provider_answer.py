"""What a provider's body says: the assistant's message, why it ended, the tokens. OpenAI's and Anthropic's forms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.events import Message, Usage

FINISH_REASONS: Mapping[str, str] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}
"""Anthropic's words for why an answer ended, in OpenAI's."""

_KEPT = ("refusal", "reasoning_content", "reasoning", "reasoning_details", "thinking_blocks")
"""Parts of an assistant's message, beside text and calls, that stand in the conversation when the model sent them.

``request.sendable`` leaves ``refusal`` out again: its text is the content, and strict servers know no such field."""


@dataclass(frozen=True)
class ProviderAnswer:
    """One answer, in OpenAI's form."""

    message: dict[str, Any]
    """The assistant's message as it came."""
    finish_reason: str | None
    usage: Usage | None


def read_answer(body: Any) -> ProviderAnswer | None:
    """What ``body`` says; ``None``: it has neither form. A body without an answer is none."""
    if not isinstance(body, dict):
        return None
    if isinstance(body.get("content"), list) and body.get("role") == "assistant":
        return _anthropic(body)
    choices = body.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        message = choices[0].get("message")
        if isinstance(message, dict):
            return ProviderAnswer(message, choices[0].get("finish_reason"), usage_of(body.get("usage")))
    return None


def usage_of(raw: Any) -> Usage | None:
    """Tokens as stated; a request always has some, so all zeros mean that nobody counted."""
    if not isinstance(raw, dict) or not any(raw.get(name) for name in ("prompt_tokens", "completion_tokens")):
        return None
    details = raw.get("prompt_tokens_details")
    return Usage(
        prompt_tokens=_count(raw.get("prompt_tokens")),
        completion_tokens=_count(raw.get("completion_tokens")),
        total_tokens=_count(raw.get("total_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def conversation_message(raw: dict[str, Any], stem: str, before: Sequence[Message] = ()) -> Message:
    """The provider's message reduced to what a later request needs; arguments as they came.

    Every call gets an id that no other call of the conversation (``before``) has: some servers send none, or number the
    calls of each answer anew, and Anthropic wants all different. ``stem`` makes such ids. Beside calls, an empty
    ``content`` is left out, as LiteLLM would do when it is sent back.
    """
    content = raw.get("content")
    message: Message = {"role": "assistant", "content": _text(content) if isinstance(content, list) else content}
    for name in _KEPT:
        if raw.get(name):
            message[name] = raw[name]
    if message.get("refusal") and not message["content"]:
        message["content"] = str(message["refusal"])
    calls: list[dict[str, Any]] = []
    taken = {call["id"] for earlier in before for call in earlier.get("tool_calls") or []}
    given = raw.get("tool_calls")
    for position, call in (
        enumerate(item for item in given if isinstance(item, dict)) if isinstance(given, list) else ()
    ):
        function = call["function"] if isinstance(call.get("function"), dict) else {}
        call_id = call.get("id")
        if not isinstance(call_id, str) or not call_id or call_id in taken:
            call_id = f"call_{stem}_{position}"
        taken.add(call_id)
        kept: dict[str, Any] = {
            "id": call_id,
            "type": "function",
            "function": {
                "name": str(function.get("name") or ""),
                "arguments": _raw_arguments(function.get("arguments")),
            },
        }
        if call.get("provider_specific_fields"):
            kept["provider_specific_fields"] = call["provider_specific_fields"]
        calls.append(kept)
    if calls:
        message["tool_calls"] = calls
        if not message["content"]:
            del message["content"]
    return message


def _anthropic(body: dict[str, Any]) -> ProviderAnswer:
    blocks = [block for block in body["content"] if isinstance(block, dict)]
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks) or None}
    thinking = [block for block in blocks if block.get("type") in ("thinking", "redacted_thinking")]
    if thinking:
        message["thinking_blocks"] = thinking
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            # A stream's arguments are kept as written; without any, the input of the block's beginning counts.
            "function": {
                "name": block.get("name"),
                "arguments": block.get("partial_json") or json.dumps(block.get("input") or {}, ensure_ascii=False),
            },
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    stop = body.get("stop_reason")
    return ProviderAnswer(message, FINISH_REASONS.get(str(stop), stop), _anthropic_usage(body.get("usage")))


def _anthropic_usage(raw: Any) -> Usage | None:
    """Anthropic counts what the cache held or took apart from ``input_tokens``; here the prompt is all of it."""
    if not isinstance(raw, dict) or not any(raw.get(name) for name in ("input_tokens", "output_tokens")):
        return None
    cached = _count(raw.get("cache_read_input_tokens"))
    prompt, completion = _count(raw.get("input_tokens")), _count(raw.get("output_tokens"))
    if prompt is not None:
        prompt += (cached or 0) + (_count(raw.get("cache_creation_input_tokens")) or 0)
    total = prompt + completion if prompt is not None and completion is not None else None
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=total, cached_tokens=cached)


def _text(blocks: list[Any]) -> str:
    texts = [block.get("text") for block in blocks if isinstance(block, dict) and block.get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _raw_arguments(arguments: Any) -> str:
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
