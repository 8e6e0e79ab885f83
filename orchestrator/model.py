"""The one gateway to the model: one request in, one answer out, retries inside. LiteLLM knows the providers.

LiteLLM makes the request and sends it; what came back is read from the wire (``wire``), where a provider's HTTP client
reports there. LiteLLM is imported when the first `Model` is made, not before: the import takes seconds.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import tenacity

from orchestrator.errors import ModelError
from orchestrator.events import FailedTry, Message, Usage
from orchestrator.litellm_setup import import_litellm
from orchestrator.model_errors import Failure, NoAnswer, failure_of
from orchestrator.provider_answer import ProviderAnswer, conversation_message, read_answer
from orchestrator.request import digest, public_parameters, sendable
from orchestrator.scripted import ScriptedModel, is_scripted
from orchestrator.stream import assembled
from orchestrator.task import ModelSpec
from orchestrator.wire import Exchange

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
    """The provider's answer: its body, or ``{"events": […]}`` of a stream; of a provider off the wire, LiteLLM's."""
    finish_reason: str | None
    """In OpenAI's words where they are known."""
    usage: Usage | None
    """``None``: the provider did not say."""
    cost_usd: float | None
    """``None``: not known (never 0 for unknown)."""
    latency_ms: float
    """From the first request to the answer, pauses between tries included."""
    attempts: int
    parameters: dict[str, Any]
    """What was sent beside messages and tools; nothing secret."""
    request_digest: str
    request_messages: int
    failed_tries: list[FailedTry] = field(default_factory=list)
    """The tries before the answer."""


class _TryFailed(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class _Answer(NamedTuple):
    """What one try brought."""

    said: ProviderAnswer
    raw: dict[str, Any]
    litellm_answer: Any


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
        self._library = import_litellm()
        self._litellm = self._library.litellm
        self.script = ScriptedModel.load(spec.name, source_dir) if is_scripted(spec.name) else None
        """The script of a ``scripted/`` model."""
        if self.script:
            self._address = self.script.register(self._litellm)
        else:
            self._address = {"model": spec.name, **self._library.client_for(spec.name)}
            if spec.api_base is not None:
                self._address["api_base"] = spec.api_base

    def complete(
        self, messages: list[Message], tools: list[dict[str, Any]], *, dropped: Callable[[], bool] = lambda: False
    ) -> Completion:
        """The model's answer to ``messages``; they are left untouched.

        Rate limits, time-outs, dropped connections, cut streams and server errors are tried again, ``retries`` times,
        unless ``dropped`` says that nobody waits for the answer any more.

        Raises: NoAnswer: none after all tries, or the provider refused the request.
        """
        sent = [sendable(message) for message in messages]
        parameters: dict[str, Any] = {"timeout": self._spec.timeout_s, **self._spec.extra}
        if self._spec.temperature is not None:
            parameters["temperature"] = self._spec.temperature
        if self._spec.stream:
            parameters["stream"] = True
        public = public_parameters(parameters)
        if self._spec.api_base is not None:
            public["api_base"] = self._spec.api_base
        request: dict[str, Any] = {**parameters, **self._address, "messages": json.loads(json.dumps(sent))}
        request["stream"] = self._spec.stream and self.script is None
        if tools:
            request["tools"] = tools
        request_digest = digest({"model": self.name, "parameters": public, "tools": tools, "messages": sent})
        started = time.monotonic()
        failed: list[FailedTry] = []
        try:
            answer = self._ask(request, failed, dropped)
        except _TryFailed as error:
            raise NoAnswer(
                self._no_answer(error.failure, len(failed)),
                tries=failed,
                parameters=public,
                request_digest=request_digest,
            ) from error
        return Completion(
            message=conversation_message(answer.said.message, stem=digest(sent)[:8], before=messages),
            response=answer.raw,
            finish_reason=answer.said.finish_reason,
            usage=answer.said.usage,
            cost_usd=self._cost(answer),
            latency_ms=(time.monotonic() - started) * 1000,
            attempts=len(failed) + 1,
            parameters=public,
            request_digest=request_digest,
            request_messages=len(sent),
            failed_tries=failed,
        )

    def _no_answer(self, failure: Failure, tries: int) -> str:
        said = f"model {self.name} gave no answer after {tries} {'try' if tries == 1 else 'tries'}: {failure.text}"
        return f"{said}: {failure.remedy}" if failure.remedy else said

    def _ask(self, request: dict[str, Any], failed: list[FailedTry], dropped: Callable[[], bool]) -> _Answer:
        """The first answer; what each try before it met is appended to ``failed``.

        Raises: _TryFailed: the last try's.
        """

        def pause(seconds: float) -> None:
            self._sleep(seconds)
            if dropped():
                raise ModelError(f"model {self.name} was not asked again: nobody waits for its answer")

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._spec.retries + 1),
            wait=self._pause_s,
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, _TryFailed) and error.failure.may_pass),
            sleep=pause,
            reraise=True,
        )
        return retrying(self._try, request, failed)

    def _try(self, request: dict[str, Any], failed: list[FailedTry]) -> _Answer:
        exchange = Exchange(self._spec.timeout_s, self._spec.stall_timeout_s)
        answer: Any = None
        error: Exception | None = None
        with exchange.current():
            try:
                # num_retries and max_retries: neither LiteLLM nor the provider's SDK may retry behind our count.
                answer = self._litellm.completion(**request, num_retries=0, max_retries=0)
                off_the_wire = self._off_the_wire(answer, exchange)
            except (
                self._library.openai.OpenAIError,
                self._litellm.exceptions.BudgetExceededError,
                httpx.HTTPError,
                # LiteLLM's own translation of a request or an answer that it does not understand.
                ValueError, TypeError, LookupError, AttributeError,
            ) as raised:  # fmt: skip
                error, off_the_wire = raised, None
        failure = failure_of(exchange, error, self._litellm)
        if failure is None:
            found = self._found(exchange, off_the_wire, answer)
            if found is not None:
                return found
            text = exchange.redacted(str(error)) if error else "the answer holds no message"
            failure = Failure("invalid_body", text, True)
        failed.append(failure.record(exchange))
        raise _TryFailed(failure) from error

    def _found(self, exchange: Exchange, off_the_wire: dict[str, Any] | None, answer: Any) -> _Answer | None:
        """The answer as the wire has it; where that is neither OpenAI's nor Anthropic's form, LiteLLM's."""
        raw = exchange.raw if exchange.body else None
        said = read_answer(exchange.answer_body()) if exchange.body else None
        if said is not None and isinstance(raw, list | dict):
            return _Answer(said, {"events": raw} if isinstance(raw, list) else raw, answer)
        said = read_answer(off_the_wire)
        if said is None or off_the_wire is None:
            return None
        # A body that LiteLLM could make nothing of is an empty answer to it.
        made_up = bool(exchange.sent) and not said.message.get("content") and not said.message.get("tool_calls")
        return None if made_up else _Answer(said, off_the_wire, answer)

    def _off_the_wire(self, answer: Any, exchange: Exchange) -> dict[str, Any] | None:
        """LiteLLM's own form of the answer; ``None``: it is not needed."""
        if exchange.body and read_answer(exchange.answer_body()) is not None:
            return None
        if hasattr(answer, "model_dump"):
            body: dict[str, Any] = json.loads(json.dumps(answer.model_dump(), default=str))
            return body
        return assembled([json.loads(json.dumps(chunk.model_dump(), default=str)) for chunk in answer])

    def _pause_s(self, state: tenacity.RetryCallState) -> float:
        """What the provider asked for, else exponential with full jitter."""
        error = state.outcome.exception() if state.outcome else None
        asked = error.failure.retry_after_s if isinstance(error, _TryFailed) else None
        if asked is not None:
            return min(asked, RETRY_AFTER_MAX_S)
        backoff: float = min(BACKOFF_FIRST_S * 2 ** (state.attempt_number - 1), BACKOFF_MAX_S)
        return backoff * (0.5 + 0.5 * self._jitter())

    def _cost(self, answer: _Answer) -> float | None:
        """What the provider or the script stated, else LiteLLM's price list; ``None`` for a model that is not on it."""
        body = answer.raw
        if isinstance(body.get("events"), list):
            body = assembled(body["events"]) or {}
        stated = (body.get("usage") or {}).get("cost")
        if isinstance(stated, int | float) and not isinstance(stated, bool):
            return float(stated)
        if answer.said.usage is None:
            return None
        if "events" in answer.raw:
            return self._price(answer.said.usage)
        # LiteLLM's own completion_cost(), which it has called already, with the errors of unpriced models caught.
        priced = getattr(answer.litellm_answer, "_hidden_params", {}).get("response_cost")
        return float(priced) if priced is not None else None

    def _price(self, usage: Usage) -> float | None:
        """Of a streamed answer, which LiteLLM has not counted."""
        if not {self.name, self.name.partition("/")[2]} & set(self._litellm.model_cost):
            return None
        prompt_usd, completion_usd = self._litellm.cost_per_token(
            model=self.name,
            prompt_tokens=usage.prompt_tokens or 0,
            completion_tokens=usage.completion_tokens or 0,
            cache_read_input_tokens=usage.cached_tokens or 0,
        )
        return float(prompt_usd + completion_usd)
