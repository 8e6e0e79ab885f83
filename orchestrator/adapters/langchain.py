"""LangChain and LangGraph: every chat model and every tool, however an agent or a graph calls them.

All ways of asking a chat model come down to four methods of its class, all ways of using a tool to two of ``BaseTool``.
Models may make events by themselves instead: the request below them must be recorded by another hook then.
A framework's message ids and run ids are made anew each time; they are no part of a request.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.adapters.chunks import Chunks, Read, RecordedChunks
from orchestrator.adapters.patch import hook_method
from orchestrator.errors import UsageError
from orchestrator.events import Message
from orchestrator.recording.current_execution import current_execution
from orchestrator.recording.execution import Execution
from orchestrator.recording.harness_call import Answer, Asked, Call
from orchestrator.recording.leaving import RecorderFailed
from orchestrator.recording.model_hook import call_model, call_model_async, model_asked, usage_of, with_inserts
from orchestrator.recording.tool_hook import call_tool, call_tool_async, tool_asked
from orchestrator.recording.typed_json import Encoded, decode, encode

if TYPE_CHECKING:
    from orchestrator.recording.run import RecordedRun

PACKAGE = "langchain_core"
_FINISH = ("finish_reason", "stop_reason", "done_reason")


def install() -> None:
    """Chat models and tools are recorded where a run is, those of classes that are made later too. Repeatable."""
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.tools import BaseTool

    hook_method(BaseTool, "run", _tool_hook)
    hook_method(BaseTool, "arun", _async_tool_hook)
    if "__pydantic_init_subclass__" in vars(BaseChatModel):
        return
    inherited = BaseChatModel.__pydantic_init_subclass__.__func__

    def hook_subclass(cls: Any, /, **options: Any) -> None:
        inherited(cls, **options)
        _hook_class(cls)

    BaseChatModel.__pydantic_init_subclass__ = classmethod(hook_subclass)
    for kind in _with_subclasses(BaseChatModel):
        _hook_class(kind)


def tools(run: RecordedRun) -> list[Any]:
    """The container's shell and the run's own tools as LangChain tools."""
    from langchain_core.tools import StructuredTool

    functions = [run.bash, run.submit, run.backtrack_candidates, run.backtrack_commit]
    return [StructuredTool.from_function(function, name=function.__name__) for function in functions]


def middleware(run: RecordedRun) -> Any:
    """A middleware for ``create_agent`` that gives the agent ``tools(run)``."""
    from langchain.agents.middleware import AgentMiddleware

    class RunTools(AgentMiddleware):  # type: ignore[misc]
        tools = tools(run)

    return RunTools()


def _with_subclasses(kind: Any) -> Iterator[type]:
    yield kind
    for one in kind.__subclasses__():
        yield from _with_subclasses(one)


def _hook_class(kind: type) -> None:
    """Only what the class defines itself: the library looks at that to see what a model can do."""
    if not getattr(vars(kind).get("_generate"), "__isabstractmethod__", False):
        hook_method(kind, "_generate", _generate_hook)
        hook_method(kind, "_stream", _stream_hook)
    hook_method(kind, "_agenerate", _async_generate_hook)
    hook_method(kind, "_astream", _async_stream_hook)
    hook_method(kind, "_stream_chat_model_events", _events_hook)
    hook_method(kind, "_astream_chat_model_events", _async_events_hook)


def _generate_hook(original: Any) -> Any:
    def hooked(model: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
        execution = current_execution()
        if execution is None:
            return original(model, messages, *args, **kwargs)

        def made(call: Call) -> Any:
            return _recorded(execution, call, original(model, _told(messages, call), *args, **kwargs))

        asked = _asked(model, messages, args, kwargs, stream=False)
        return call_model(execution, asked, made, _result)

    return hooked


def _async_generate_hook(original: Any) -> Any:
    async def hooked(model: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
        execution = current_execution()
        if execution is None:
            return await original(model, messages, *args, **kwargs)

        async def made(call: Call) -> Any:
            return _recorded(execution, call, await original(model, _told(messages, call), *args, **kwargs))

        async def again(_call: Call, recorded: dict[str, Any]) -> Any:
            return _result(_call, recorded)

        return await call_model_async(execution, _asked(model, messages, args, kwargs, stream=False), made, again)

    return hooked


def _stream_hook(original: Any) -> Any:
    def hooked(model: Any, messages: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        execution = current_execution()
        if execution is None:
            yield from original(model, messages, *args, **kwargs)
            return

        def made(call: Call) -> Any:
            return Chunks(execution, call, _chunk, _streamed), original(model, _told(messages, call), *args, **kwargs)

        asked = _asked(model, messages, args, kwargs, stream=True)
        chunks, inner = call_model(execution, asked, made, functools.partial(_again, execution))
        try:
            while True:
                try:
                    chunk = chunks.next(inner)
                except StopIteration:
                    return
                yield chunk
        finally:
            chunks.left()

    return hooked


def _async_stream_hook(original: Any) -> Any:
    async def hooked(model: Any, messages: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        execution = current_execution()
        if execution is None:
            async for chunk in original(model, messages, *args, **kwargs):
                yield chunk
            return

        async def made(call: Call) -> Any:
            return Chunks(execution, call, _chunk, _streamed), original(model, _told(messages, call), *args, **kwargs)

        async def again(call: Call, recorded: dict[str, Any]) -> Any:
            return _again(execution, call, recorded)

        asked = _asked(model, messages, args, kwargs, stream=True)
        chunks, inner = await call_model_async(execution, asked, made, again)
        try:
            while True:
                try:
                    chunk = await chunks.next_async(inner)
                except StopAsyncIteration:
                    return
                yield chunk
        finally:
            chunks.left()

    return hooked


def _events_hook(original: Any) -> Any:
    """Events of a model's own are not recorded: the request below them has to be, by the hooks of its SDK."""

    def hooked(model: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        execution = current_execution()
        before = _calls(execution)
        for event in original(model, *args, **kwargs):
            _check_recorded(execution, before, model)
            yield event

    return hooked


def _async_events_hook(original: Any) -> Any:
    async def hooked(model: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        execution = current_execution()
        before = _calls(execution)
        async for event in original(model, *args, **kwargs):
            _check_recorded(execution, before, model)
            yield event

    return hooked


def _calls(execution: Execution | None) -> int:
    return 0 if execution is None else execution.made + execution.answered


def _check_recorded(execution: Execution | None, before: int, model: Any) -> None:
    """Raises: LeaveHarness: a request was made that the log does not hold."""
    if execution is not None and _calls(execution) == before:
        text = f"{type(model).__name__} streams events of its own, which are not recorded: use its invoke or stream"
        execution.leave(RecorderFailed(UsageError(text)))


def _tool_hook(original: Any) -> Any:
    def hooked(tool: Any, tool_input: Any, *args: Any, **kwargs: Any) -> Any:
        execution = current_execution()
        if execution is None:
            return original(tool, tool_input, *args, **kwargs)
        asked = _tool_asked(tool, tool_input, kwargs)
        return call_tool(execution, asked, lambda: original(tool, tool_input, *args, **kwargs))

    return hooked


def _async_tool_hook(original: Any) -> Any:
    async def hooked(tool: Any, tool_input: Any, *args: Any, **kwargs: Any) -> Any:
        execution = current_execution()
        if execution is None:
            return await original(tool, tool_input, *args, **kwargs)
        asked = _tool_asked(tool, tool_input, kwargs)
        return await call_tool_async(execution, asked, lambda: original(tool, tool_input, *args, **kwargs))

    return hooked


def _asked(model: Any, messages: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, stream: bool) -> Asked:
    said = {key: value for key, value in kwargs.items() if key != "run_manager"}
    if args:
        said["stop"] = args[0]
    name = getattr(model, "model_name", None) or getattr(model, "model", None) or type(model).__name__
    tools_given = said.pop("tools", None)
    address = {"base_url": getattr(model, "openai_api_base", None), "stream": stream or None}
    parameters = {**model._identifying_params, **said, **address}
    return model_asked(
        f"langchain.{type(model).__name__}", str(name), [_message(one) for one in messages], tools_given, parameters
    )


def _tool_asked(tool: Any, tool_input: Any, kwargs: dict[str, Any]) -> Asked:
    """Arguments that the framework injects (state, runtime) are not the model's: they are no part of the call."""
    shown = getattr(tool, "_filter_injected_args", dict)
    arguments = shown(tool_input) if isinstance(tool_input, dict) else tool_input
    return tool_asked(tool.name, arguments, call_id=kwargs.get("tool_call_id"))


def _told(messages: Any, call: Call) -> Any:
    from langchain_core.messages import HumanMessage

    if not call.inserts:
        return messages
    return with_inserts(messages, call.inserts, lambda message: HumanMessage(content=message["content"]))


def _recorded(execution: Execution, call: Call, result: Any) -> Any:
    generations = [(one.message, one.generation_info) for one in result.generations]
    written = encode({"generations": generations, "llm_output": result.llm_output})
    message, info = generations[0] if generations else (None, None)
    execution.end_model(call, _answer({"value": written.json}, message, info, readable_only=not written.whole))
    return result


def _again(execution: Execution, call: Call, recorded: dict[str, Any]) -> tuple[RecordedChunks, None]:
    incomplete = call.past is not None and call.past.call.incomplete
    return RecordedChunks(execution, recorded, incomplete=incomplete, read=_chunk_again), None


def _result(_call: Call, recorded: dict[str, Any]) -> Any:
    """Piece by piece: the library's own containers name a message's base class only."""
    from langchain_core.outputs import ChatGeneration, ChatResult

    value = decode(recorded["value"])
    generations = [ChatGeneration(message=message, generation_info=info) for message, info in value["generations"]]
    return ChatResult(generations=generations, llm_output=value["llm_output"])


def _chunk(chunk: Any) -> tuple[Encoded, Any]:
    return encode((chunk.message, chunk.generation_info)), chunk.message


def _chunk_again(written: Any) -> Any:
    from langchain_core.outputs import ChatGenerationChunk

    message, info = decode(written)
    return ChatGenerationChunk(message=message, generation_info=info)


def _streamed(read: Read) -> Answer:
    whole = functools.reduce(lambda one, other: one + other, read.parts) if read.parts else None
    answer = _answer(read.record, whole, readable_only=read.readable_only)
    ended = read.exhausted or answer.finish_reason is not None
    return replace(answer, incomplete=read.broken or not ended)


def _answer(record: dict[str, Any], message: Any, info: Any = None, *, readable_only: bool) -> Answer:
    metadata = {**(info or {}), **(getattr(message, "response_metadata", None) or {})}
    used = getattr(message, "usage_metadata", None) or {}
    cached = (used.get("input_token_details") or {}).get("cache_read")
    return Answer(
        record,
        message=None if message is None else _message(message),
        finish_reason=next((metadata[name] for name in _FINISH if metadata.get(name)), None),
        usage=usage_of(used.get("input_tokens"), used.get("output_tokens"), used.get("total_tokens"), cached),
        readable_only=readable_only,
    )


def _message(message: Any) -> Message:
    from langchain_core.messages import convert_to_openai_messages

    found: Message = convert_to_openai_messages(message)
    return found
