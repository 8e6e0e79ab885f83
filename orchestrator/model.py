"""The one gateway to the model: one request in, one answer out, retries inside. LiteLLM knows the providers.

LiteLLM is imported when the first `Model` is made, not before: the import takes seconds.
"""

from __future__ import annotations

import json
import os
import random
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tenacity

from orchestrator.errors import ModelError
from orchestrator.events import Message, Usage
from orchestrator.request import digest, public_parameters, sendable
from orchestrator.scripted import ScriptedModel, is_scripted
from orchestrator.task import ModelSpec

if TYPE_CHECKING:
    from types import ModuleType

BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 60.0
RETRY_AFTER_MAX_S = 300.0
"""A provider that asks for a longer pause gets this one."""


@dataclass(frozen=True)
class Completion:
    """One answer of the model."""

    message: Message
    """The assistant message as it is appended to the conversation; arguments unrepaired."""
    response: dict[str, Any]
    """The provider's answer, as JSON."""
    finish_reason: str | None
    usage: Usage | None
    cost_usd: float | None
    """``None``: not known (never 0 for unknown)."""
    latency_ms: float
    """From the first request to the answer, pauses between tries included."""
    attempts: int
    parameters: dict[str, Any]
    """What was sent beside messages and tools; nothing secret."""
    request_digest: str
    request_messages: int


class Model:
    """A model that answers chat requests with tools. One instance serves one run; keeps nothing but the script."""

    def __init__(
        self,
        spec: ModelSpec,
        source_dir: Path,
        *,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Ready to answer; ``scripted/<file>`` is read from ``source_dir``. ``sleep`` and ``jitter`` pace the retries.

        Raises: TaskError: the script cannot be read.
        """
        self.name = spec.name
        self._spec = spec
        self._sleep = sleep
        self._jitter = jitter
        self._litellm, self._openai = _import_litellm()
        self.script = ScriptedModel.load(spec.name, source_dir) if is_scripted(spec.name) else None
        """The script of a ``scripted/`` model."""
        self._address = self.script.register(self._litellm) if self.script else {"model": spec.name}

    def complete(self, messages: list[Message], tools: list[dict[str, Any]]) -> Completion:
        """The model's answer to ``messages``; they are left untouched.

        Rate limits, time-outs, dropped connections and server errors are tried again, ``retries`` times at most.

        Raises: ModelError: no answer after all tries, or the provider refused the request.
        """
        sent = [sendable(message) for message in messages]
        parameters = {"timeout": self._spec.timeout_s, **self._spec.extra}
        if self._spec.temperature is not None:
            parameters["temperature"] = self._spec.temperature
        public = public_parameters(parameters)
        request: dict[str, Any] = {**parameters, **self._address, "messages": json.loads(json.dumps(sent))}
        if tools:
            request["tools"] = tools
        started = time.monotonic()
        answer, attempts = self._ask(request)
        response = json.loads(json.dumps(answer.model_dump(), default=str))
        usage = _usage(response.get("usage"))
        choice = (response.get("choices") or [{}])[0]
        return Completion(
            message=_assistant_message(choice.get("message") or {}, stem=digest(sent)[:8]),
            response=response,
            finish_reason=choice.get("finish_reason"),
            usage=usage,
            cost_usd=self._cost(answer, response, usage),
            latency_ms=(time.monotonic() - started) * 1000,
            attempts=attempts,
            parameters=public,
            request_digest=digest({"model": self.name, "parameters": public, "tools": tools, "messages": sent}),
            request_messages=len(sent),
        )

    def _ask(self, request: dict[str, Any]) -> tuple[Any, int]:
        """The provider's answer and how many requests it took."""
        errors = self._litellm.exceptions
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._spec.retries + 1),
            wait=self._pause_s,
            retry=tenacity.retry_if_exception_type(
                (
                    errors.RateLimitError,
                    errors.Timeout,
                    errors.APIConnectionError,
                    errors.InternalServerError,
                    errors.ServiceUnavailableError,
                    errors.BadGatewayError,
                )
            ),
            sleep=self._sleep,
            reraise=True,
        )
        attempts = 0

        def once() -> Any:
            nonlocal attempts
            attempts += 1
            # num_retries and max_retries: neither LiteLLM nor the provider's SDK may retry behind our count.
            return self._litellm.completion(**request, num_retries=0, max_retries=0, stream=False)

        try:
            return retrying(once), attempts
        except (self._openai.OpenAIError, errors.BudgetExceededError, ValueError, TypeError, LookupError) as error:
            # The last three: LiteLLM's own translation of a request or an answer that it does not understand.
            tries = f"{attempts} {'try' if attempts == 1 else 'tries'}"
            raise ModelError(f"model {self.name} gave no answer after {tries}: {error}") from error

    def _pause_s(self, state: tenacity.RetryCallState) -> float:
        """What the provider asked for, else exponential with full jitter."""
        error = state.outcome.exception() if state.outcome else None
        asked = _retry_after_s(error)
        if asked is not None:
            return min(asked, RETRY_AFTER_MAX_S)
        backoff: float = min(BACKOFF_FIRST_S * 2 ** (state.attempt_number - 1), BACKOFF_MAX_S)
        return backoff * (0.5 + 0.5 * self._jitter())

    def _cost(self, answer: Any, response: dict[str, Any], usage: Usage | None) -> float | None:
        """What the provider or the script stated, else LiteLLM's price list; ``None`` for a model that is not on it."""
        stated = (response.get("usage") or {}).get("cost")
        if isinstance(stated, int | float):
            return float(stated)
        # LiteLLM's own completion_cost(), which it has called already, with the errors of unpriced models caught.
        priced = getattr(answer, "_hidden_params", {}).get("response_cost")
        return float(priced) if usage is not None and priced is not None else None


def _import_litellm() -> tuple[ModuleType, ModuleType]:
    """LiteLLM and the SDK whose error tree it extends, quiet and without a fetch of price lists at import."""
    # LiteLLM reads this at import and fetches a price list from the network without it.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    # Its own types make pydantic warn about them, at import and at the first call; a run's output is no place for that.
    warnings.filterwarnings("ignore", message=r".*TypedDict class .*`ReadOnly` qualifier", category=UserWarning)
    import litellm
    import openai

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm, openai


def _retry_after_s(error: BaseException | None) -> float | None:
    """Seconds of a ``Retry-After`` header; the form with a date is left to the backoff."""
    headers: list[Any] = [getattr(error, "headers", None), getattr(getattr(error, "response", None), "headers", None)]
    for candidate in headers:
        if isinstance(candidate, Mapping):
            value = {str(name).lower(): value for name, value in candidate.items()}.get("retry-after")
            try:
                return max(0.0, float(value)) if value is not None else None
            except ValueError:
                return None
    return None


def _usage(raw: Any) -> Usage | None:
    """Tokens as stated; a request always has some, so all zeros mean that nobody counted."""
    if not isinstance(raw, dict) or not any(raw.get(name) for name in ("prompt_tokens", "completion_tokens")):
        return None
    return Usage(
        prompt_tokens=raw.get("prompt_tokens"),
        completion_tokens=raw.get("completion_tokens"),
        total_tokens=raw.get("total_tokens"),
        cached_tokens=(raw.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


def _assistant_message(raw: dict[str, Any], stem: str) -> Message:
    """The provider's message reduced to what a later request needs; arguments as they came.

    Every call gets an id that is its own within the message: some servers send none, or the same one twice. Beside
    calls, an empty ``content`` is left out, as LiteLLM would do when it is sent back.
    """
    message: Message = {"role": "assistant", "content": raw.get("content")}
    for name in ("reasoning_content", "thinking_blocks"):
        if raw.get(name):
            message[name] = raw[name]
    calls: list[dict[str, Any]] = []
    for position, call in enumerate(raw.get("tool_calls") or []):
        function = call.get("function") or {}
        call_id = call.get("id")
        if not isinstance(call_id, str) or not call_id or call_id in [known["id"] for known in calls]:
            call_id = f"call_{stem}_{position}"
        kept: dict[str, Any] = {
            "id": call_id,
            "type": "function",
            "function": {"name": function.get("name") or "", "arguments": _raw_arguments(function.get("arguments"))},
        }
        if call.get("provider_specific_fields"):
            kept["provider_specific_fields"] = call["provider_specific_fields"]
        calls.append(kept)
    if calls:
        message["tool_calls"] = calls
        if not message["content"]:
            del message["content"]
    return message


def _raw_arguments(arguments: Any) -> str:
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
