"""The hook around a model call, as every adapter uses it; what a request and an answer look like is the adapter's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from orchestrator.events import Message, Usage
from orchestrator.recorded_call import MESSAGES
from orchestrator.recording.execution import Execution
from orchestrator.recording.harness_call import Answer, Asked, Call
from orchestrator.recording.told import Insert
from orchestrator.recording.typed_json import decode, encode, readable
from orchestrator.request import public_parameters

T = TypeVar("T")

VOLATILE = frozenset(
    {
        "timeout",
        "max_retries",
        "num_retries",
        "idempotency_key",
        "extra_headers",
        "headers",
        "client",
        "request_timeout",
    }
)
"""Parameters that say how a request travels, not what is asked."""


def model_asked(api: str, model: str, messages: Any, tools: Any, parameters: Mapping[str, Any]) -> Asked:
    """A request as it is recorded: without keys, headers and time limits; ``None`` is the same as absent."""
    said = {key: readable(value) for key, value in parameters.items() if value is not None and key not in VOLATILE}
    given = {
        "model": model,
        "parameters": public_parameters(said),
        "tools": _without_none(readable(tools or [])),
        MESSAGES: [_without_none(readable(message)) for message in messages],
    }
    return Asked("model", api, given, model)


def call_model(
    execution: Execution, asked: Asked, make: Callable[[Call], T], again: Callable[[Call, dict[str, Any]], T]
) -> T:
    """What ``make`` answers, or what ``again`` makes of the log. ``make`` ends the call; a failure is ended here.

    Raises: LeaveHarness: the harness does not go on. Otherwise what the call raises, or raised when it was recorded.
    """
    call = execution.begin(asked)
    if call.past is not None:
        return again(call, _not_raised(call.past.answer()))
    try:
        with call.inside():
            return make(call)
    except BaseException as error:
        failed(execution, call, error)
        raise


async def call_model_async(
    execution: Execution,
    asked: Asked,
    make: Callable[[Call], Awaitable[T]],
    again: Callable[[Call, dict[str, Any]], Awaitable[T]],
) -> T:
    """As ``call_model``. A call that was cancelled waits, when it is repeated, to be cancelled again."""
    call = await execution.begin_async(asked)
    if call.past is not None:
        found = call.past.answer()
        if "cancelled" in found:
            await asyncio.Event().wait()
        return await again(call, _not_raised(found))
    try:
        with call.inside():
            return await make(call)
    except BaseException as error:
        failed(execution, call, error)
        raise


def failed(execution: Execution, call: Call, error: BaseException) -> None:
    """The line of a call that raised; one that left the harness, or was interrupted from outside, has none."""
    if isinstance(error, asyncio.CancelledError):
        execution.end_model(call, Answer({"cancelled": True}, attempts=max(1, call.requests)))
    elif isinstance(error, Exception):
        written = encode(error)
        answer = Answer({"raised": written.json}, attempts=max(1, call.requests), readable_only=not written.whole)
        execution.end_model(call, answer)
    else:
        execution.forget(call)


def with_inserts(messages: Iterable[Any], inserts: Iterable[Insert], make: Callable[[Message], Any]) -> list[Any]:
    """A copy of ``messages`` with the memories in their places; the list itself is left alone."""
    copy = list(messages)
    for offset, insert in enumerate(inserts):
        copy.insert(insert.position + offset, make(insert.message))
    return copy


def usage_of(prompt: int | None, completion: int | None, total: int | None, cached: int | None = None) -> Usage | None:
    """The tokens as stated; ``None``: nobody counted."""
    if not prompt and not completion and not total:
        return None
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=total, cached_tokens=cached)


def _not_raised(found: dict[str, Any]) -> dict[str, Any]:
    if "raised" in found:
        raise decode(found["raised"])
    return found


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value
