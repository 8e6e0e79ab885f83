"""The loop that people write by hand around an SDK, in its forms: sync, async and streamed, OpenAI and LiteLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, Iterable
from typing import Any

from orchestrator import tool
from orchestrator.recording.run import RecordedRun
from tests.e2e.provider_server import ProviderServer

Message = dict[str, Any]

SYSTEM = {"role": "system", "content": "You work in a container."}


def tool_schemas(names: Iterable[str]) -> list[dict[str, Any]]:
    """Schemas as the APIs want them."""
    parameters = {"type": "object", "properties": {}}
    return [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]


class ToolLoop:
    """Asks, runs what the model wants, asks again, until it wants nothing; ``seen`` is all that the harness saw."""

    def __init__(self, run: RecordedRun, server: ProviderServer, api: str, *, stream: bool) -> None:
        functions = (run.bash, run.submit, run.backtrack_candidates, run.backtrack_commit)
        self.tools = {function.__name__: tool(function) for function in functions}
        self.server = server
        self.api = api
        self.stream = stream
        self.seen: list[Any] = []
        self.messages: list[Message] = []

    def run(self, instruction: str) -> list[Any]:
        """Synchronous; answers what was seen."""
        self._start(instruction)
        while True:
            answer = self._sync()
            self.seen.append(answer)
            if not self._takes(message_of(answer)):
                return self.seen

    async def run_async(self, instruction: str) -> list[Any]:
        """Asynchronous; tools run in threads."""
        self._start(instruction)
        while True:
            answer = await self._async()
            self.seen.append(answer)
            if not await asyncio.to_thread(self._takes, message_of(answer)):
                return self.seen

    def _start(self, instruction: str) -> None:
        self.seen = []
        self.messages = [SYSTEM, {"role": "user", "content": instruction}]

    @property
    def _request(self) -> dict[str, Any]:
        request: dict[str, Any] = {"messages": list(self.messages), "tools": tool_schemas(self.tools)}
        if self.stream:
            request["stream"] = True
        if self.api == "litellm":
            return {**request, "model": "openai/m", "api_base": f"{self.server.url}/v1"}
        return {**request, "model": "m"}

    def _sync(self) -> Any:
        if self.api == "litellm":
            import litellm

            found = litellm.completion(**self._request)
        else:
            import openai

            with openai.OpenAI(base_url=f"{self.server.url}/v1") as client:
                found = client.chat.completions.create(**self._request)
                return [chunk.model_dump() for chunk in found] if self.stream else found.model_dump()
        return [chunk.model_dump() for chunk in found] if self.stream else found.model_dump()

    async def _async(self) -> Any:
        if self.api == "litellm":
            import litellm

            return await _dumped(await litellm.acompletion(**self._request))
        import openai

        async with openai.AsyncOpenAI(base_url=f"{self.server.url}/v1") as client:
            return await _dumped(await client.chat.completions.create(**self._request))

    def _takes(self, message: Message) -> bool:
        """The calls of the message have been run; false: there were none."""
        self.messages.append(message)
        for call in message.get("tool_calls") or []:
            function = call["function"]
            result = self.tools[function["name"]](**json.loads(function["arguments"]))
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result or "(no output)"})
        return bool(message.get("tool_calls"))


async def _dumped(found: Any) -> Any:
    if isinstance(found, AsyncIterable):
        return [chunk.model_dump() async for chunk in found]
    return found.model_dump()


def message_of(answer: Any) -> Message:
    """The assistant's message of an answer or of its chunks, as it is sent back."""
    if not isinstance(answer, list):
        found = answer["choices"][0]["message"]
        kept = {key: found[key] for key in ("role", "content", "tool_calls") if found.get(key)}
        return {**kept, "tool_calls": [_call(one) for one in found["tool_calls"]]} if found.get("tool_calls") else kept
    text, calls = "", []
    for chunk in answer:
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            calls += choice["delta"].get("tool_calls") or []
    message: Message = {"role": "assistant"}
    if text:
        message["content"] = text
    if calls:
        message["tool_calls"] = [_call(one) for one in calls]
    return message


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}
