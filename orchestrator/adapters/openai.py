"""The OpenAI SDK: ``create`` and ``parse`` of chat completions and responses, sync and async, plain and streamed.

The hook is on the classes, so that it sees every client, whenever it was made, and what frameworks call.
"""

from __future__ import annotations

import json
from typing import Any

from orchestrator.adapters import http_exchange
from orchestrator.adapters.answer_body import answer_of
from orchestrator.adapters.http_exchange import HttpExchange
from orchestrator.adapters.patch import hook_method
from orchestrator.adapters.response_chain import rebuilt_input
from orchestrator.recording.current_execution import current_execution
from orchestrator.recording.execution import Execution
from orchestrator.recording.harness_call import Asked, Call
from orchestrator.recording.model_hook import call_model, call_model_async, model_asked, with_inserts
from orchestrator.sse import DONE, EventReader, parsed

PACKAGE = "openai"
_METHODS = ("create", "parse")
_MESSAGES = {"chat.completions": "messages", "responses": "input"}


def install() -> None:
    """Every client's calls are recorded where a run is. Repeatable."""
    from openai.resources.chat.completions import AsyncCompletions, Completions
    from openai.resources.responses import AsyncResponses, Responses

    http_exchange.install()
    for api, sync, asynchronous in (
        ("chat.completions", Completions, AsyncCompletions),
        ("responses", Responses, AsyncResponses),
    ):
        for method in _METHODS:
            hook_method(sync, method, _hook(api, method))
            hook_method(asynchronous, method, _async_hook(api, method))


def _hook(api: str, method: str) -> Any:
    def make_hook(original: Any) -> Any:
        def hooked(resource: Any, **given: Any) -> Any:
            execution = current_execution()
            if execution is None:
                return original(resource, **given)

            def made(call: Call, served: dict[str, Any] | None = None) -> Any:
                with _exchange(execution, call, served).current(), call.inside():
                    asked = _told(api, given, call)
                    try:
                        return original(resource, **asked)
                    except Exception as error:
                        again = _without_the_providers_copy(execution, asked, error)
                        if again is None:
                            raise
                        return original(resource, **again)

            return call_model(execution, _asked(api, method, resource, given), made, made)

        return hooked

    return make_hook


def _async_hook(api: str, method: str) -> Any:
    def make_hook(original: Any) -> Any:
        async def hooked(resource: Any, **given: Any) -> Any:
            execution = current_execution()
            if execution is None:
                return await original(resource, **given)

            async def made(call: Call, served: dict[str, Any] | None = None) -> Any:
                with _exchange(execution, call, served).current(), call.inside():
                    asked = _told(api, given, call)
                    try:
                        return await original(resource, **asked)
                    except Exception as error:
                        again = _without_the_providers_copy(execution, asked, error)
                        if again is None:
                            raise
                        return await original(resource, **again)

            return await call_model_async(execution, _asked(api, method, resource, given), made, made)

        return hooked

    return make_hook


def _exchange(execution: Execution, call: Call, served: dict[str, Any] | None) -> HttpExchange:
    def ended(record: dict[str, Any]) -> None:
        execution.end_model(call, answer_of({"http": record}, _body(record), requests=call.requests))

    return HttpExchange(execution, call, served=served and served["http"], ended=ended)


def _asked(api: str, method: str, resource: Any, given: dict[str, Any]) -> Asked:
    said = {key: value for key, value in given.items() if type(value).__name__ not in ("NotGiven", "Omit")}
    model, tools = str(said.pop("model", "")), said.pop("tools", None)
    messages = _as_list(said.pop(_MESSAGES[api], []))
    said["base_url"] = str(resource._client.base_url)
    return model_asked(f"openai.{api}.{method}", model, messages, tools, said)


def _told(api: str, given: dict[str, Any], call: Call) -> dict[str, Any]:
    """The request with the memories that the harness does not know of, if there are any."""
    if not call.inserts:
        return given
    name = _MESSAGES[api]
    return {**given, name: with_inserts(_as_list(given.get(name, [])), call.inserts, dict)}


def _without_the_providers_copy(execution: Execution, asked: dict[str, Any], error: Exception) -> dict[str, Any] | None:
    """The request with its whole conversation, where the provider has forgotten the response that it continues."""
    continued = asked.get("previous_response_id")
    if getattr(error, "status_code", None) != 404 or not isinstance(continued, str):
        return None
    items = rebuilt_input(execution, continued)
    if items is None:
        return None
    execution.note(f"the provider does not know {continued} any more: the whole conversation was sent, from the log")
    rest = {key: value for key, value in asked.items() if key != "previous_response_id"}
    return {**rest, "input": [*items, *_as_list(asked.get("input", []))]}


def _as_list(messages: Any) -> list[Any]:
    """A text alone is short for one message of the user's (the Responses API)."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _body(record: dict[str, Any]) -> Any:
    """The answer's JSON, or the events of a stream."""
    if "event-stream" not in record["headers"].get("content-type", ""):
        try:
            return json.loads(record["body"])
        except ValueError:
            return None
    reader = EventReader()
    found = [*reader.feed(record["body"].encode("utf-8", "surrogateescape")), *reader.end()]
    events = []
    for data in found:
        if not data.startswith(DONE):
            try:
                events.append(parsed(data))
            except ValueError:
                events.append(data)
    return events
