"""A streamed answer put together: OpenAI chunks, or Anthropic events, become the body that a plain answer would have.

Nothing is repaired: half-written arguments stay half-written. However the same deltas are cut, the same body comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Json = dict[str, Any]

_TEXTS = ("content", "refusal", "reasoning_content", "reasoning")
"""Parts of a message that come in pieces of text."""


def is_complete(events: Sequence[Any]) -> bool:
    """The model said that it had finished: without that a stream is cut, whatever else it holds."""
    return any(
        isinstance(event, dict)
        and (
            event.get("type") == "message_stop"
            or (event.get("type") == "message_delta" and _part(event.get("delta")).get("stop_reason"))
            or any(_part(choice).get("finish_reason") for choice in _list(event.get("choices")))
        )
        for event in events
    )


def assembled(events: Sequence[Any]) -> Json | None:
    """The body that the stream's ``events`` make; ``None``: of neither protocol."""
    known = [event for event in events if isinstance(event, dict)]
    if any(event.get("type") == "message_start" for event in known):
        return _anthropic(known)
    if any("choices" in event for event in known):
        return _openai(known)
    return None


def _openai(chunks: Iterable[Json]) -> Json:
    body: Json = {}
    message: Json = {"role": "assistant", "content": None}
    calls = _Calls()
    details: list[Any] = []
    finish: str | None = None
    for chunk in chunks:
        body |= {name: value for name, value in chunk.items() if name != "choices" and value is not None}
        for choice in map(_part, _list(chunk.get("choices"))):
            if choice.get("index") not in (None, 0):
                continue
            delta = _part(choice.get("delta"))
            for name in _TEXTS:
                if isinstance(delta.get(name), str):
                    message[name] = (message.get(name) or "") + delta[name]
            details += _list(delta.get("reasoning_details"))
            for call in _list(delta.get("tool_calls")):
                calls.add(_part(call))
            finish = choice.get("finish_reason") or finish
    if details:
        message["reasoning_details"] = details
    if calls.all:
        message["tool_calls"] = calls.all
    return {**body, "choices": [{"index": 0, "message": message, "finish_reason": finish}]}


class _Calls:
    """Tool calls from their pieces. A piece belongs to the call with its index."""

    def __init__(self) -> None:
        self.all: list[Json] = []
        self._by_index: dict[Any, Json] = {}

    def add(self, piece: Json) -> None:
        function = _part(piece.get("function"))
        call = self._call_of(piece, function)
        for name, value in piece.items():
            if name not in ("index", "function", "id", "type") and value is not None:
                call[name] = value
        if piece.get("id") and not call["id"]:
            call["id"] = piece["id"]
        if function.get("name") and not call["function"]["name"]:
            call["function"]["name"] = function["name"]
        if isinstance(function.get("arguments"), str):
            call["function"]["arguments"] += function["arguments"]

    def _call_of(self, piece: Json, function: Json) -> Json:
        index = piece.get("index")
        known = self._by_index.get(index) if index is not None else (self.all[-1] if self.all else None)
        # Some servers number all calls 0, or not at all: another id together with a name is another call.
        if (
            known is not None
            and piece.get("id")
            and function.get("name")
            and piece["id"] != known["id"]
            and known["id"]
        ):
            known = None
        if known is None:
            known = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            self.all.append(known)
        self._by_index[index] = known
        return known


def _anthropic(events: Iterable[Json]) -> Json:
    body: Json = {}
    blocks: dict[Any, Json] = {}
    for event in events:
        match event.get("type"):
            case "message_start":
                body = dict(_part(event.get("message")))
            case "content_block_start":
                blocks[event.get("index")] = dict(_part(event.get("content_block")))
            case "content_block_delta":
                _extend(blocks.setdefault(event.get("index"), {}), _part(event.get("delta")))
            case "message_delta":
                body |= _part(event.get("delta"))
                usage = {**_part(body.get("usage")), **_part(event.get("usage"))}
                body["usage"] = usage or None
    return {**body, "content": list(blocks.values())}


def _extend(block: Json, delta: Json) -> None:
    match delta.get("type"):
        case "text_delta":
            block["text"] = (block.get("text") or "") + str(delta.get("text") or "")
        case "thinking_delta":
            block["thinking"] = (block.get("thinking") or "") + str(delta.get("thinking") or "")
        case "signature_delta":
            block["signature"] = (block.get("signature") or "") + str(delta.get("signature") or "")
        case "input_json_delta":
            block["partial_json"] = (block.get("partial_json") or "") + str(delta.get("partial_json") or "")


def _part(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
