"""Bodies of the two protocols, as providers write them: plain answers, streams, errors."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

from tests.e2e.provider_server import Reply

JSON = {"content-type": "application/json"}
SSE = {"content-type": "text/event-stream"}
OPENAI_USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
ANTHROPIC_USAGE = {"input_tokens": 11, "output_tokens": 7}


def as_json(value: Any) -> bytes:
    """UTF-8, nothing escaped that need not be: as most servers write."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def plain(value: Any, status: int = 200, **reply: Any) -> Reply:
    """A JSON body."""
    return Reply(status, {**JSON, **reply.pop("headers", {})}, (as_json(value),), **reply)


def call(call_id: str, arguments: str, name: str = "bash", **more: Any) -> dict[str, Any]:
    """An OpenAI tool call; with ``index`` a stream's delta."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def openai(message: dict[str, Any], finish: str | None = "stop", usage: Any = OPENAI_USAGE, **reply: Any) -> Reply:
    """A plain chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish}
    body = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return plain({**body, **({"usage": usage} if usage else {})}, **reply)


def bash(command: str, call_id: str = "t1") -> dict[str, Any]:
    """An OpenAI message that runs a command."""
    return {"tool_calls": [call(call_id, json.dumps({"command": command}))]}


def openai_events(deltas: Iterable[dict[str, Any]], finish: str | None = "stop", usage: Any = None) -> list[Any]:
    """The chunks of a streamed chat completion; ``usage`` in a last one without choices."""
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if finish is not None:
        chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if usage is not None:
        chunks.append({**head, "choices": [], "usage": usage})
    return chunks


def openai_stream(
    deltas: Iterable[dict[str, Any]], finish: str | None = "stop", usage: Any = None, *, done: bool = True, **reply: Any
) -> Reply:
    """A streamed chat completion, one event a piece."""
    pieces = [b"data: " + as_json(chunk) + b"\n\n" for chunk in openai_events(deltas, finish, usage)]
    return stream([*pieces, *([b"data: [DONE]\n\n"] if done else [])], **reply)


def anthropic(
    blocks: Sequence[dict[str, Any]], stop: str = "end_turn", usage: Any = ANTHROPIC_USAGE, **reply: Any
) -> Reply:
    """A plain message."""
    body = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": list(blocks)}
    return plain({**body, "stop_reason": stop, "stop_sequence": None, "usage": usage}, **reply)


def tool_use(command: str, call_id: str = "toolu_1") -> dict[str, Any]:
    """An Anthropic block that runs a command."""
    return {"type": "tool_use", "id": call_id, "name": "bash", "input": {"command": command}}


def anthropic_events(blocks: Sequence[dict[str, Any]], stop: str | None = "end_turn") -> list[dict[str, Any]]:
    """The events of a streamed message; texts and inputs come in several parts."""
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
    usage = {"input_tokens": 11, "output_tokens": 1}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {**head, "usage": usage}}, {"type": "ping"}]
    for index, block in enumerate(blocks):
        empty, deltas = _anthropic_deltas(block)
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    if stop is not None:
        delta = {"stop_reason": stop, "stop_sequence": None}
        events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 7}})
        events.append({"type": "message_stop"})
    return events


def anthropic_stream(blocks: Sequence[dict[str, Any]], stop: str | None = "end_turn", **reply: Any) -> Reply:
    """A streamed message, one event a piece."""
    return stream([anthropic_event(event) for event in anthropic_events(blocks, stop)], **reply)


def anthropic_event(event: dict[str, Any]) -> bytes:
    """One event on the wire."""
    return f"event: {event['type']}\ndata: ".encode() + as_json(event) + b"\n\n"


def stream(pieces: Sequence[bytes], **reply: Any) -> Reply:
    """Server-sent events, in HTTP chunks unless said otherwise."""
    return Reply(headers={**SSE, **reply.pop("headers", {})}, pieces=tuple(pieces), **{"framing": "chunked", **reply})


def recut(reply: Reply, seed: int, most_bytes: int = 9) -> Reply:
    """The same bytes in pieces of other sizes: cut anywhere, in the middle of a character too."""
    body, cuts = b"".join(reply.pieces), random.Random(seed)
    pieces = []
    while body:
        size = cuts.randint(1, most_bytes)
        pieces.append(body[:size])
        body = body[size:]
    return Reply(reply.status, reply.headers, tuple(pieces), framing=reply.framing)


def glued(reply: Reply) -> Reply:
    """The same bytes in one piece."""
    return Reply(reply.status, reply.headers, (b"".join(reply.pieces),), framing=reply.framing)


def _anthropic_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    match block["type"]:
        case "text":
            texts = [{"type": "text_delta", "text": part} for part in halves(block["text"])]
            return {**block, "text": ""}, texts
        case "tool_use":
            parts = halves(json.dumps(block["input"], ensure_ascii=False))
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": part} for part in ["", *parts]]
        case "thinking":
            thoughts = [{"type": "thinking_delta", "thinking": part} for part in halves(block["thinking"])]
            signature = {"type": "signature_delta", "signature": block["signature"]}
            return {"type": "thinking", "thinking": "", "signature": ""}, [*thoughts, signature]
        case _:
            return block, []


def halves(text: str) -> list[str]:
    """``text`` in two."""
    return [text[: len(text) // 2], text[len(text) // 2 :]]
