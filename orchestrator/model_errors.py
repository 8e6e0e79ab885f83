"""Why a try gave no answer, whether another one may, and what to do: judged by what went over the wire.

LiteLLM's exceptions count only for a provider whose client does not report there: the same cut stream, or the same
error in a body with status 200, comes as one class from one route and as another, or as none, from the next.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from orchestrator.errors import ModelError
from orchestrator.events import FailedTry
from orchestrator.wire import ANSWER_MAX_BYTES, AnswerTooLong, Exchange, OutOfTime

if TYPE_CHECKING:
    from types import ModuleType

_TEXT_CHARS = 500
"""Of a provider's own words in a message."""

_PASSING_STATUS = frozenset({408, 409, 425, 429})
"""Beside 5xx (and Anthropic's 529, overloaded): what another try may not meet again."""
_PASSING_ERRORS = re.compile(r"overloaded|rate.?limit|server_error|api_error|timeout|unavailable|internal", re.I)
_QUOTA = re.compile(r"insufficient_quota|billing|credit balance|exceeded your current quota", re.I)
_CONTEXT = re.compile(
    r"context_length_exceeded|maximum context length|prompt is too long|input is too long|context window|context limit"
    r"|exceeds? the .{0,40}context|request_too_large|too many (input )?tokens|reduce the length of",
    re.I,
)
_CONTENT_FILTER = re.compile(r"content_filter|content_policy|content management policy", re.I)

CONTEXT_REMEDY = (
    "the conversation is longer than the model takes: restore an earlier breakpoint and resume, "
    "or give the task a model with a larger context or a smaller limits.tool_output_bytes"
)
_REMEDIES = {
    "auth": "put a key that is right for this provider and model into the environment of this command",
    "quota": "the account has no credit left: top it up and resume the run",
    "context_length": CONTEXT_REMEDY,
    "content_filter": "the provider's filter refuses this conversation: restore an earlier breakpoint and resume",
    "not_found": "check model.name and model.api_base",
    "redirect": "redirects are not followed, so that no key goes astray: put the right address into model.api_base",
    "no_api": "no model API answers there: check model.api_base, and proxies on the way",
    "refused": "check the parameters in model.extra and model.temperature against what this model takes",
    "too_long": f"answers of more than {ANSWER_MAX_BYTES // 2**20} MiB are broken off: limit max_tokens in model.extra",
}


class Failure(NamedTuple):
    """What became of one try."""

    kind: str
    text: str
    may_pass: bool
    retry_after_s: float | None = None

    def record(self, exchange: Exchange) -> FailedTry:
        """As it stands in the log."""
        raw = exchange.raw if exchange.body else None
        cut = isinstance(raw, list) and not _is_whole(exchange)
        return FailedTry(kind=self.kind, text=self.text, status=exchange.status, incomplete=cut, raw=raw)

    @property
    def remedy(self) -> str | None:
        """What to do about it."""
        return _REMEDIES.get(self.kind)


class NoAnswer(ModelError):
    """The model gave no answer after all tries."""

    def __init__(self, text: str, *, tries: list[FailedTry], parameters: dict[str, Any], request_digest: str) -> None:
        """``tries``: each that was made, in order."""
        super().__init__(text)
        self.tries = tries
        self.parameters = parameters
        self.request_digest = request_digest


def failure_of(exchange: Exchange, error: Exception | None, litellm: ModuleType) -> Failure | None:
    """Why the try gave no answer; ``None``: nothing on the wire says so (``error`` is LiteLLM's, if it raised one)."""
    if exchange.status is None:
        return _unanswered(exchange, error, litellm) if error is not None else None
    text = exchange.redacted(_words(exchange))
    if exchange.error is not None and not _is_whole(exchange):
        return _broken_off(exchange)
    if not 200 <= exchange.status < 300:
        return _refused(exchange, text)
    raw = exchange.raw
    problem = _error_object(raw)
    if problem is not None:
        return _classified(text, may_pass=bool(_PASSING_ERRORS.search(str(problem))), kind="server")
    if isinstance(raw, str):
        if raw.lstrip().startswith("<"):
            return Failure("no_api", f"HTTP {exchange.status} with a page instead of an answer: {text}", False)
        return Failure("invalid_body", f"an answer that is no JSON: {text!r}", True)
    if isinstance(raw, list) and not _is_whole(exchange):
        broken = [event for event in raw if isinstance(event, str) and event != "[DONE]"]
        if broken:
            return Failure("invalid_body", f"a stream with an event that is no JSON: {_excerpt(broken[0])!r}", True)
        return Failure("incomplete", f"the stream ended without a finish reason after {len(raw)} events", True)
    return None


def _is_whole(exchange: Exchange) -> bool:
    """The answer is complete, whatever happened to the connection afterwards."""
    return isinstance(exchange.raw, list) and exchange.answer_body() is not None


def _unanswered(exchange: Exchange, error: Exception, litellm: ModuleType) -> Failure:
    for cause in _chain(error):
        match cause:
            case httpx.ConnectTimeout() | httpx.PoolTimeout():
                return Failure("timeout", "no connection in time", True)
            case httpx.TimeoutException():
                return Failure("timeout", f"no answer began within {exchange.timeout_s:g} s", True)
            case httpx.UnsupportedProtocol() | httpx.InvalidURL():
                return Failure("not_found", str(cause), False)
            case httpx.TransportError():
                return Failure("connection", f"the connection failed: {cause}", "CERTIFICATE" not in str(cause))
    errors = litellm.exceptions
    text = exchange.redacted(_excerpt(str(error)))
    if isinstance(error, errors.ContextWindowExceededError):
        return Failure("context_length", text, False)
    if isinstance(error, errors.AuthenticationError):
        return Failure("auth", text, False)
    kinds = {
        errors.RateLimitError: "rate_limit",
        errors.Timeout: "timeout",
        errors.APIConnectionError: "connection",
        errors.InternalServerError: "server",
        errors.ServiceUnavailableError: "server",
        errors.BadGatewayError: "server",
    }
    kind = next((kind for error_class, kind in kinds.items() if isinstance(error, error_class)), None)
    headers = getattr(error, "headers", None) or getattr(getattr(error, "response", None), "headers", None)
    return Failure(kind or "refused_by_litellm", text, kind is not None, _retry_after_s(headers))


def _broken_off(exchange: Exchange) -> Failure:
    match exchange.error:
        case AnswerTooLong():
            return Failure("too_long", "the answer has no end", False)
        case OutOfTime():
            return Failure("timeout", f"the answer was not complete after {exchange.timeout_s:g} s", True)
        case httpx.TimeoutException():
            return Failure("timeout", "the answer stopped coming before its end", True)
    kind = "incomplete" if isinstance(exchange.raw, list) else "connection"
    return Failure(kind, f"the connection broke within the answer ({exchange.error})", True)


def _refused(exchange: Exchange, text: str) -> Failure:
    status = exchange.status or 0
    said = f"HTTP {status}: {text}"
    if 300 <= status < 400:
        return Failure("redirect", f"HTTP {status}, a redirect to {exchange.headers.get('location', 'nowhere')}", False)
    may_pass = status in _PASSING_STATUS or status >= 500
    kind = {401: "auth", 403: "auth", 404: "not_found", 413: "context_length", 429: "rate_limit"}.get(status)
    found = _classified(said, may_pass=may_pass, kind=kind or ("server" if may_pass else "refused"))
    return found._replace(retry_after_s=_retry_after_s(exchange.headers) if found.may_pass else None)


def _classified(text: str, *, may_pass: bool, kind: str) -> Failure:
    """The provider's words say more than its status: some of these come as 429 or 500, or with status 200."""
    for pattern, found in ((_CONTEXT, "context_length"), (_QUOTA, "quota"), (_CONTENT_FILTER, "content_filter")):
        if kind != "auth" and pattern.search(text):
            return Failure(found, text, False)
    return Failure(kind, text, may_pass)


def _error_object(raw: Any) -> Any:
    """What a body says instead of an answer, though its status is 200."""
    bodies = raw if isinstance(raw, list) else [raw]
    return next((body["error"] for body in bodies if isinstance(body, dict) and body.get("error")), None)


def _words(exchange: Exchange) -> str:
    """The provider's own words, short."""
    raw = exchange.raw
    problem = _error_object(raw)
    if problem is None and isinstance(raw, dict):
        problem = raw.get("message") or raw.get("detail") or raw
    if isinstance(problem, dict) and isinstance(problem.get("message"), str):
        marks = [str(problem[name]) for name in ("type", "code") if problem.get(name)]
        return _excerpt(problem["message"] + (f" ({', '.join(marks)})" if marks else ""))
    return _excerpt(str(problem if problem is not None else raw))


def _excerpt(text: str) -> str:
    text = text[:20_000]
    if text.lstrip().startswith("<"):
        text = re.sub(r"<style.*?</style>|<[^>]*>", " ", text, flags=re.S | re.I)
    plain = " ".join(text.split())
    return plain[:_TEXT_CHARS] + ("…" if len(plain) > _TEXT_CHARS else "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        seen.append(at)
        yield at
        at = at.__cause__ or at.__context__


def _retry_after_s(headers: Any) -> float | None:
    """Seconds that the provider asks for (RFC 9110, 10.2.3): a number, or a date, taken against its own clock."""
    try:
        named = {str(name).lower(): str(value) for name, value in dict(headers or {}).items()}
    except (TypeError, ValueError):
        return None
    for name, factor in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        if name in named:
            try:
                return max(0.0, float(named[name]) * factor)
            except ValueError:
                continue
    wanted = _timestamp(named.get("retry-after"))
    if wanted is None:
        return None
    now = _timestamp(named.get("date"))
    return max(0.0, wanted - (time.time() if now is None else now))


def _timestamp(text: str | None) -> float | None:
    try:
        at = parsedate_to_datetime(text) if text else None
    except ValueError:
        return None
    return None if at is None else (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
