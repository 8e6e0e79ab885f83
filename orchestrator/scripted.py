"""A model that answers from a file: for examples, tests and CI, without a key and without a network.

The model name is ``scripted/<file>``, the file being YAML or JSON, relative to the task file: a list of replies. Each
request takes the first reply, in the order of the file, that is unused and whose conditions all hold::

    - when: {position: 0}                   # the first request that this run sends
      say: "I look around."
      calls:
        - {name: bash, arguments: {command: "ls /etc"}}
      usage: {prompt_tokens: 900, completion_tokens: 40}
      cost: 0.002                           # dollars; left out: not known
    - when: {failed: "The app must answer", after_rewind: false}
      calls: [{name: backtrack_candidates}]
    - when: {after_rewind: true}
      fail: {error: rate_limit, times: 2}   # the first two tries of this reply fail
      calls: [{name: submit}]

Conditions (``when``; none: always):

- ``position``: answers given before by this model, from 0;
- ``last_contains`` (short: ``contains``), ``any_contains``, ``not_contains``: in the last message, in any, in none; a
  text, or a list of texts that must all hold;
- ``after_rewind``: a rewind's message stands in the conversation, or does not;
- ``failed``: a text in the last message, which answers a submission.

A reply has ``say`` (text), ``calls`` (``name`` and ``arguments``, or ``raw_arguments`` for text that is sent as it is;
``call_id`` is optional), ``finish_reason``, ``usage``, ``cost``, ``delay_s`` (pause before the answer), ``fail``
(``error``: ``rate_limit | timeout | connection | server``, ``times``, ``retry_after_s``) and ``repeat: true`` (never
used up). In texts of ``arguments``, ``{candidate:TEXT}`` stands for the id of the newest breakpoint that
``backtrack_candidates`` has listed on a line that holds TEXT.
"""

from __future__ import annotations

import json
import re
import time
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from orchestrator.errors import TaskError
from orchestrator.events import Event, Message, ModelCallEvent
from orchestrator.memory import is_rewind_message

if TYPE_CHECKING:
    from types import ModuleType

PROVIDER = "scripted"
_RESPONSE_ID = re.compile(r"scripted-\d+-reply-(\d+)")
"""The id of a response names its reply, so that the log says which of them are used up."""


def is_scripted(model_name: str) -> bool:
    """Whether the name is one of this provider's."""
    return model_name.startswith(f"{PROVIDER}/")


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class When(_Part):
    """What must hold for a reply to be taken."""

    position: int | None = None
    contains: Texts = ()
    last_contains: Texts = ()
    any_contains: Texts = ()
    not_contains: Texts = ()
    after_rewind: bool | None = None
    failed: str | None = None

    def holds(self, messages: list[Message], answered: int) -> bool:
        """Whether it all holds for a request with these messages, after ``answered`` answers."""
        texts = [_text(message) for message in messages]
        last, every = (texts[-1] if texts else ""), "\n".join(texts)
        return (
            self.position in (None, answered)
            and all(text in last for text in (*self.contains, *self.last_contains))
            and all(text in every for text in self.any_contains)
            and not any(text in every for text in self.not_contains)
            and self.after_rewind in (None, any(is_rewind_message(message) for message in messages))
            and (self.failed is None or (_answers_submission(messages) and self.failed in last))
        )


class Call(_Part):
    """One tool call of a reply."""

    name: str
    arguments: dict[str, Any] = {}
    raw_arguments: str | None = None
    call_id: str | None = None


class Fail(_Part):
    """Errors before the reply comes."""

    error: Literal["rate_limit", "timeout", "connection", "server"]
    times: int = 1
    retry_after_s: float | None = None


class Reply(_Part):
    """One answer of the script."""

    when: When = When()
    say: str | None = None
    calls: tuple[Call, ...] = ()
    finish_reason: str | None = None
    usage: dict[str, int] | None = None
    cost: float | None = None
    delay_s: float = 0.0
    fail: Fail | None = None
    repeat: bool = False


_REPLIES = TypeAdapter(list[Reply])


class ScriptedModel:
    """The replies of one file and which of them one run has used."""

    def __init__(self, name: str, replies: list[Reply]) -> None:
        self.name = name
        self._replies = replies
        self._used: set[int] = set()
        self._failures: dict[int, int] = {}
        self._answered = 0
        self.requests: list[list[Message]] = []
        """The messages of every request, as they came, failed tries included."""

    @classmethod
    def load(cls, model_name: str, source_dir: Path) -> ScriptedModel:
        """The script that ``scripted/<file>`` names.

        Raises: TaskError: it cannot be read, or is no list of replies.
        """
        path = source_dir / model_name.removeprefix(f"{PROVIDER}/")
        try:
            return cls(model_name, _REPLIES.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")) or []))
        except OSError as error:
            raise TaskError(f"model {model_name}: cannot read {path}: {error.strerror}") from error
        except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise TaskError(f"model {model_name}: {path} is no list of replies: {error}") from error

    def take_up(self, events: Sequence[Event]) -> None:
        """Goes on where the run with these events stands: an answer that is not in the log was never given."""
        responses = [event.response for event in events if isinstance(event, ModelCallEvent)]
        self._answered = len(responses)
        for response in responses:
            found = _RESPONSE_ID.fullmatch(str(response.get("id")))
            index = int(found[1]) if found else len(self._replies)
            if index < len(self._replies) and not self._replies[index].repeat:
                self._used.add(index)

    def register(self, litellm: ModuleType) -> dict[str, Any]:
        """The parameters that make ``litellm.completion`` answer from this script, as long as the caller holds it.

        There is one provider in a process; the address tells the runs apart.
        """
        address = f"script:{uuid.uuid4().hex}"
        _handler(litellm).scripts[address] = self
        return {"model": self.name, "api_base": address}

    def answer(self, litellm: ModuleType, messages: list[Message]) -> Any:
        """LiteLLM's response object for a request, or LiteLLM's error where the script says so."""
        self.requests.append(json.loads(json.dumps(messages)))
        for index, reply in enumerate(self._replies):
            if index not in self._used and reply.when.holds(messages, self._answered):
                break
        else:
            raise litellm.BadRequestError(
                f"no reply of the script fits request {self._answered} ({len(self._used)} of {len(self._replies)} are "
                f"used; the last message begins {_text(messages[-1])[:120]!r}): add one to {self.name}",
                model=self.name,
                llm_provider=PROVIDER,
            )
        if reply.fail and self._failures.get(index, 0) < reply.fail.times:
            self._failures[index] = self._failures.get(index, 0) + 1
            time.sleep(reply.delay_s)
            raise _error(litellm, reply.fail, self.name)
        # Taken before the pause: the run may drop the request meanwhile, and send another one.
        if not reply.repeat:
            self._used.add(index)
        self._answered += 1
        number = self._answered
        time.sleep(reply.delay_s)
        return _response(litellm, reply, index, number, messages, self.name)


def _response(
    litellm: ModuleType, reply: Reply, index: int, number: int, messages: list[Message], model_name: str
) -> Any:
    calls = [
        {
            "id": call.call_id or f"call_{number}_{position}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(_filled(call.arguments, messages))
                if call.raw_arguments is None
                else call.raw_arguments,
            },
        }
        for position, call in enumerate(reply.calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": reply.say}
    if calls:
        message["tool_calls"] = calls
    usage: dict[str, Any] = dict(reply.usage or {})
    if usage:
        usage.setdefault("total_tokens", usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0))
    if reply.cost is not None:
        usage["cost"] = reply.cost
    finish_reason = reply.finish_reason or ("tool_calls" if calls else "stop")
    return litellm.ModelResponse(
        id=f"scripted-{number}-reply-{index}",
        model=model_name,
        choices=[{"index": 0, "finish_reason": finish_reason, "message": message}],
        usage=usage,
    )


def _error(litellm: ModuleType, fail: Fail, model_name: str) -> Exception:
    kinds = {
        "rate_limit": litellm.RateLimitError,
        "timeout": litellm.Timeout,
        "connection": litellm.APIConnectionError,
        "server": litellm.InternalServerError,
    }
    error: Exception = kinds[fail.error](f"scripted: {fail.error}", model=model_name, llm_provider=PROVIDER)
    if fail.retry_after_s is not None:
        error.headers = {"Retry-After": str(fail.retry_after_s)}  # type: ignore[attr-defined]
    return error


_CANDIDATE = re.compile(r"\{candidate:([^}]*)\}")


def _filled(value: Any, messages: list[Message]) -> Any:
    """``value`` with ``{candidate:TEXT}`` replaced; a text that is nothing else becomes the number."""
    if isinstance(value, dict):
        return {key: _filled(inner, messages) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, messages) for inner in value]
    if not isinstance(value, str):
        return value
    whole = _CANDIDATE.fullmatch(value)
    if whole:
        return _candidate(whole[1], messages)
    return _CANDIDATE.sub(lambda found: str(_candidate(found[1], messages)), value)


def _candidate(text: str, messages: list[Message]) -> int:
    """The id on the first fitting line of the last answer that lists candidates; -1: there is none."""
    for message in reversed(messages):
        for line in _text(message).splitlines():
            found = re.search(r'"breakpoint_id": (\d+)', line)
            if found and text in line:
                return int(found[1])
    return -1


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content)


def _answers_submission(messages: list[Message]) -> bool:
    """Whether the last message is the tool's answer to a ``submit``."""
    if not messages or messages[-1].get("role") != "tool":
        return False
    call_id = messages[-1].get("tool_call_id")
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    return any(call["id"] == call_id and call["function"]["name"] == "submit" for call in calls)


def _handler(litellm: ModuleType) -> Any:
    """The provider as LiteLLM knows it, registered once a process."""
    for entry in litellm.custom_provider_map:
        if entry["provider"] == PROVIDER:
            return entry["custom_handler"]

    class ScriptedProvider(litellm.CustomLLM):  # type: ignore[misc, name-defined]
        """Finds the run's script by its address."""

        def __init__(self) -> None:
            super().__init__()
            self.scripts: weakref.WeakValueDictionary[str, ScriptedModel] = weakref.WeakValueDictionary()

        def completion(self, **request: Any) -> Any:
            return self.scripts[request["api_base"]].answer(litellm, request["messages"])

    handler = ScriptedProvider()
    litellm.custom_provider_map.append({"provider": PROVIDER, "custom_handler": handler})
    return handler
