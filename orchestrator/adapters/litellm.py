"""LiteLLM: ``completion``, ``acompletion``, ``responses`` and ``aresponses``, plain and streamed.

Its answers are recorded as the objects that it hands out: it makes up ids, times and chunks of its own, which must be
the same when the harness runs again.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

from orchestrator.adapters.answer_body import answer_of
from orchestrator.adapters.chunks import Chunks, RecordedChunks
from orchestrator.adapters.patch import hook_function
from orchestrator.litellm_setup import prepare_import
from orchestrator.recording.current_execution import current_execution
from orchestrator.recording.execution import Execution
from orchestrator.recording.harness_call import Asked, Call
from orchestrator.recording.model_hook import call_model, call_model_async, model_asked, with_inserts
from orchestrator.recording.typed_json import Encoded, decode, encode

PACKAGE = "litellm"
_FUNCTIONS = {
    "completion": "messages",
    "acompletion": "messages",
    "responses": "input",
    "aresponses": "input",
}


def install() -> None:
    """The library's calls are recorded where a run is. Repeatable."""
    prepare_import()
    import litellm

    for name, messages in _FUNCTIONS.items():
        asynchronous = inspect.iscoroutinefunction(inspect.unwrap(getattr(litellm, name)))
        hook_function(litellm, name, functools.partial(_async_hook if asynchronous else _hook, name, messages))


def _hook(name: str, messages: str, original: Any) -> Any:
    signature = inspect.signature(original)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        execution = current_execution()
        if execution is None:
            return original(*args, **kwargs)
        given = _arguments(signature, args, kwargs)

        def made(call: Call) -> Any:
            return _recorded(execution, call, original(**_told(messages, given, call)))

        return call_model(execution, _asked(name, messages, given), made, functools.partial(_again, execution))

    return hooked


def _async_hook(name: str, messages: str, original: Any) -> Any:
    signature = inspect.signature(original)

    async def hooked(*args: Any, **kwargs: Any) -> Any:
        execution = current_execution()
        if execution is None:
            return await original(*args, **kwargs)
        given = _arguments(signature, args, kwargs)

        async def made(call: Call) -> Any:
            return _recorded(execution, call, await original(**_told(messages, given, call)))

        async def again(call: Call, recorded: dict[str, Any]) -> Any:
            return _again(execution, call, recorded)

        return await call_model_async(execution, _asked(name, messages, given), made, again)

    return hooked


def _arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, as they were given: no defaults are filled in."""
    names = [name for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _asked(name: str, messages: str, given: dict[str, Any]) -> Asked:
    said = dict(given)
    model, tools = str(said.pop("model", "")), said.pop("tools", None)
    return model_asked(f"litellm.{name.removeprefix('a')}", model, _as_list(said.pop(messages, [])), tools, said)


def _told(messages: str, given: dict[str, Any], call: Call) -> dict[str, Any]:
    if not call.inserts:
        return given
    return {**given, messages: with_inserts(_as_list(given.get(messages, [])), call.inserts, dict)}


def _as_list(messages: Any) -> list[Any]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _recorded(execution: Execution, call: Call, result: Any) -> Any:
    """The library's answer; a stream passes through and is recorded as it is read."""
    if hasattr(result, "model_dump"):
        written = encode(result)
        body = result.model_dump(mode="json")
        cost = getattr(result, "_hidden_params", {}).get("response_cost")
        execution.end_model(
            call,
            answer_of({"value": written.json}, body, cost_usd=_number(cost), readable_only=not written.whole),
        )
        return result
    kind: Any = type(result)
    chunks = Chunks(execution, call, _chunk)
    stream = _stream_class(kind)(result, chunks)
    weakref.finalize(stream, chunks.left)  # who breaks off a loop over it closes nothing
    return stream


def _again(execution: Execution, call: Call, recorded: dict[str, Any]) -> Any:
    if "value" in recorded:
        return decode(recorded["value"])
    from litellm import CustomStreamWrapper

    past = call.past
    incomplete = past is not None and past.call.incomplete
    return _stream_class(CustomStreamWrapper)(None, RecordedChunks(execution, recorded, incomplete=incomplete))


def _chunk(chunk: Any) -> tuple[Encoded, Any]:
    return encode(chunk), chunk.model_dump(mode="json") if hasattr(chunk, "model_dump") else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@functools.cache
def _stream_class(base: Any) -> Any:
    """A stream that passes for the library's, and whose chunks go through ours."""

    class Stream(base):  # type: ignore[misc]
        def __init__(self, inner: Any, chunks: Any) -> None:
            self._inner = inner
            self._chunks = chunks

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["_inner"], name)

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            return self._chunks.next(self._inner)

        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> Any:
            return await self._chunks.next_async(self._inner)

        def close(self) -> None:
            self._chunks.left()
            if self._inner is not None and hasattr(self._inner, "close"):
                self._inner.close()

        async def aclose(self) -> None:
            self._chunks.left()
            if self._inner is not None and hasattr(self._inner, "aclose"):
                await self._inner.aclose()

    Stream.__name__ = Stream.__qualname__ = base.__name__
    return Stream
