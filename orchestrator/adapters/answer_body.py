"""What a body of one of OpenAI's APIs says: chat completions and responses, plain and streamed."""

from __future__ import annotations

from typing import Any

from orchestrator.events import Message
from orchestrator.provider_answer import read_answer
from orchestrator.recording.harness_call import Answer
from orchestrator.recording.model_hook import usage_of
from orchestrator.stream import assembled, is_complete

_ENDS = ("response.completed", "response.incomplete", "response.failed")
"""Events that end a streamed response; each holds all of it."""


def answer_of(
    response: dict[str, Any],
    body: Any,
    *,
    requests: int = 1,
    cost_usd: float | None = None,
    readable_only: bool = False,
    broken: bool = False,
) -> Answer:
    """The answer whose record is ``response`` and whose ``body`` is JSON, or the list of a stream's events.

    ``broken``: the stream was not read to its end.
    """
    incomplete = broken
    if isinstance(body, list):
        whole = _response_of(body)
        incomplete = broken or (whole is None and not is_complete(body))
        body = whole or assembled(body)
    message, finish, usage = None, None, None
    if isinstance(body, dict) and isinstance(body.get("output"), list):
        message, finish, usage = _of_response(body)
    elif (said := read_answer(body)) is not None:
        message, finish, usage = _without_empty(said.message), said.finish_reason, said.usage
    return Answer(
        response,
        message=message,
        finish_reason=finish,
        usage=usage,
        cost_usd=cost_usd,
        attempts=max(1, requests),
        incomplete=incomplete,
        readable_only=readable_only,
    )


def _response_of(events: list[Any]) -> Any:
    """The whole response of a stream that has ended; ``None``: of another API, or cut."""
    ends = [event for event in events if isinstance(event, dict) and event.get("type") in _ENDS]
    return ends[-1].get("response") if ends else None


def _of_response(body: dict[str, Any]) -> tuple[Message, str | None, Any]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for item in body["output"]:
        if item.get("type") == "message":
            texts += [
                str(part.get("text", "")) for part in item.get("content") or [] if part.get("type") == "output_text"
            ]
        elif item.get("type") == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
    message: Message = {"role": "assistant", "content": "".join(texts) or None}
    if calls:
        message["tool_calls"] = calls
    used = body.get("usage") or {}
    details = used.get("input_tokens_details") or {}
    usage = usage_of(
        used.get("input_tokens"), used.get("output_tokens"), used.get("total_tokens"), details.get("cached_tokens")
    )
    reason = "tool_calls" if calls else "stop"
    return message, reason if body.get("status") == "completed" else body.get("status"), usage


def _without_empty(message: dict[str, Any]) -> Message:
    return {key: value for key, value in message.items() if value is not None or key == "content"}
