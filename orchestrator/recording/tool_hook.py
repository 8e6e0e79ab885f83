"""The hook around a tool: any callable of the harness, recorded, and answered from the log when it runs again."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar, cast

from orchestrator.recording.current_execution import current_execution
from orchestrator.recording.execution import Execution
from orchestrator.recording.harness_call import Asked, Call, ToolAnswer
from orchestrator.recording.typed_json import decode, encode, readable

P = ParamSpec("P")
R = TypeVar("R")

_ERROR_CHARS = 500


def tool(function: Callable[P, R], name: str | None = None) -> Callable[P, R]:
    """``function``, sync or async, as a tool: inside a recorded run its calls are recorded, elsewhere it is itself."""
    named = str(name or getattr(function, "__name__", type(function).__name__))
    signature = inspect.signature(function)

    def asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
        return tool_asked(named, signature.bind(*args, **kwargs).arguments)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def recorded_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            execution = current_execution()
            if execution is None:
                return await function(*args, **kwargs)
            return await call_tool_async(execution, asked(args, kwargs), lambda: function(*args, **kwargs))

        return cast("Callable[P, R]", recorded_async)

    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        execution = current_execution()
        if execution is None:
            return function(*args, **kwargs)
        return call_tool(execution, asked(args, kwargs), lambda: function(*args, **kwargs))

    return recorded


def tool_asked(name: str, arguments: Any, *, call_id: str | None = None) -> Asked:
    """A tool call as it is recorded."""
    return Asked("tool", "tool", {"name": name, "arguments": readable(arguments)}, name, call_id)


def call_tool(execution: Execution, asked: Asked, make: Callable[[], R]) -> R:
    """What ``make`` returns or raises, or what stands in the log.

    Raises: LeaveHarness: the harness does not go on.
    """
    call = execution.begin(asked)
    if call.past is not None:
        return cast(R, answered(call.past.answer()))
    try:
        with call.inside():
            result = make()
    except BaseException as error:
        _failed(execution, call, error)
        raise
    execution.end_tool(call, _returned(result))
    return result


async def call_tool_async(execution: Execution, asked: Asked, make: Callable[[], Awaitable[R]]) -> R:
    """As ``call_tool``. A call that was cancelled waits, when it is repeated, to be cancelled again."""
    call = await execution.begin_async(asked)
    if call.past is not None:
        found = call.past.answer()
        if "cancelled" in found:
            await asyncio.Event().wait()
        return cast(R, answered(found))
    try:
        with call.inside():
            result = await make()
    except BaseException as error:
        _failed(execution, call, error)
        raise
    execution.end_tool(call, _returned(result))
    return result


def answered(outcome: dict[str, Any]) -> Any:
    """The recorded result. Raises: what was raised then, as its own type; LogDamaged: it cannot be made again."""
    if "raised" in outcome:
        raise decode(outcome["raised"])
    return decode(outcome.get("returned"))


def _returned(result: Any) -> ToolAnswer:
    written = encode(result)
    text = result if isinstance(result, str) else _text(getattr(result, "content", result))
    code = result.get("returncode") if isinstance(result, dict) else None
    return ToolAnswer(
        {"returned": written.json},
        text,
        exit_code=code if isinstance(code, int) and not isinstance(code, bool) else None,
        readable_only=not written.whole,
    )


def _failed(execution: Execution, call: Call, error: BaseException) -> None:
    """The line of a call that raised; one that left the harness, or was interrupted from outside, has none."""
    if isinstance(error, asyncio.CancelledError):
        execution.end_tool(call, ToolAnswer({"cancelled": True}, "cancelled", error="cancelled"))
    elif isinstance(error, Exception):
        written = encode(error)
        text = f"{type(error).__name__}: {error}"
        answer = ToolAnswer({"raised": written.json}, text, text[:_ERROR_CHARS], readable_only=not written.whole)
        execution.end_tool(call, answer)
    else:
        execution.forget(call)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(readable(value), ensure_ascii=False)
