"""What is sent to a model, and how a request is named: pure functions over chat messages and parameters."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from orchestrator.events import Message

_SECRET_NAME = re.compile(
    r"(^|_)(api_?key|access_?key|secret|password|credentials?|headers?|authorization|ad_token|session_token)($|_)",
    re.IGNORECASE,
)
_TOOL_NAME = re.compile(r"[^A-Za-z0-9_-]")


def digest(value: Any) -> str:
    """SHA-256, in hex, of the canonical JSON of ``value`` (sorted keys, no spaces, ASCII)."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def public_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """``parameters`` without keys, headers and other secrets: what may stand in the log."""
    return {
        name: public_parameters(value) if isinstance(value, dict) else value
        for name, value in parameters.items()
        if not _SECRET_NAME.search(name)
    }


def sendable(message: Message) -> Message:
    """A copy of ``message`` that every provider accepts; the same message always gives the same copy.

    The log keeps what came; only the copy that is sent differs, and only where strict providers (or their JSON
    encoder) fail: lone surrogates become U+FFFD, tool arguments that are no JSON object stand as text inside one,
    and a tool's name loses the characters that the APIs refuse. A refusal's text stands in the content.
    """
    copy: Message = _without_surrogates(message)
    copy.pop("refusal", None)
    if "tool_calls" in copy:
        copy["tool_calls"] = [_strict_call(call) for call in copy["tool_calls"]]
    return copy


def _strict_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    name = _TOOL_NAME.sub("_", function["name"])[:64] or "unnamed"
    arguments = function["arguments"]
    if not is_json_object(arguments):
        arguments = json.dumps({"malformed_arguments": arguments})
    return {**call, "function": {**function, "name": name, "arguments": arguments}}


def is_json_object(text: str) -> bool:
    """Whether ``text`` parses as a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {key: _without_surrogates(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(inner) for inner in value]
    return value
