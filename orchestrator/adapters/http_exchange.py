"""What an SDK's HTTP client sends and gets inside one recorded call; in a replay, the answer comes from here.

So the SDK itself makes its objects of the answer, streamed, parsed or raw, live and replayed alike. Its own retries
happen inside one call and are counted. Both of the HTTP libraries that SDKs build on are hooked.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from orchestrator.adapters.patch import hook_method
from orchestrator.recording.execution import Execution
from orchestrator.recording.harness_call import Call
from orchestrator.recording.typed_json import decode, encode

_PACKAGES = ("httpx", "httpx2")
_KEPT_HEADERS = ("content-type", "x-request-id", "openai-model", "openai-processing-ms", "request-id")
_CURRENT: ContextVar[HttpExchange | None] = ContextVar("http_exchange", default=None)


class HttpExchange:
    """The exchange of one call. ``ended`` is told once: with the answer's record, when its body has been read."""

    def __init__(
        self,
        execution: Execution,
        call: Call,
        *,
        served: dict[str, Any] | None = None,
        ended: Callable[[dict[str, Any]], None],
    ) -> None:
        self.execution = execution
        self.call = call
        self.served = served
        call.requests = 0
        self._ended: Callable[[dict[str, Any]], None] | None = ended

    @contextmanager
    def current(self) -> Iterator[None]:
        """Requests that the block sends are this call's."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def end(self, response: Any, body: bytes, error: Exception | None = None) -> None:
        """The body has been read as far as it will be. ``error``: why no further."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        ended(
            {
                "status": response.status_code,
                "headers": {name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers},
                "body": _decoded(response, body),
                "error": None if error is None else encode(error).json,
            }
        )


def install() -> None:
    """The HTTP libraries that are installed report to the exchange of their caller, if there is one. Repeatable."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is not None:
            module = importlib.import_module(package)
            hook_method(module.Client, "send", functools.partial(_sync_send, module))
            hook_method(module.AsyncClient, "send", functools.partial(_async_send, module))


def _sync_send(module: Any, original: Any) -> Any:
    def send(client: Any, request: Any, *, stream: bool = False, **options: Any) -> Any:
        exchange = _CURRENT.get()
        if exchange is None:
            return original(client, request, stream=stream, **options)
        if exchange.served is not None:
            return _served(module, request, exchange, stream)
        exchange.call.requests += 1
        return _watched(module, original(client, request, stream=stream, **options), exchange, stream)

    return send


def _async_send(module: Any, original: Any) -> Any:
    async def send(client: Any, request: Any, *, stream: bool = False, **options: Any) -> Any:
        exchange = _CURRENT.get()
        if exchange is None:
            return await original(client, request, stream=stream, **options)
        if exchange.served is not None:
            return _served(module, request, exchange, stream)
        exchange.call.requests += 1
        return _watched(module, await original(client, request, stream=stream, **options), exchange, stream)

    return send


def _watched(module: Any, response: Any, exchange: HttpExchange, stream: bool) -> Any:
    """The answer, whose body reports when it has been read; the SDK retries errors, or raises them."""
    if not response.is_success:
        return response
    if not stream:
        exchange.end(response, response.content)
    else:
        response.stream = _body_class(module)(response, response.stream, exchange)
    return response


def _served(module: Any, request: Any, exchange: HttpExchange, stream: bool) -> Any:
    served = exchange.served or {}
    body = served["body"].encode("utf-8", "surrogateescape")
    if not stream:
        return module.Response(served["status"], headers=served["headers"], content=body, request=request)
    error = None if served["error"] is None else decode(served["error"])
    stream_again = _body_class(module)(None, _Recorded(body, error), None)
    return module.Response(served["status"], headers=served["headers"], stream=stream_again, request=request)


class _Recorded:
    """A body from the log, with the error that ended it."""

    def __init__(self, body: bytes, error: Exception | None) -> None:
        self._body = body
        self._error = error

    def __iter__(self) -> Iterator[bytes]:
        yield self._body
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece

    def close(self) -> None:
        """Nothing to close."""

    async def aclose(self) -> None:
        """Nothing to close."""


@functools.cache
def _body_class(module: Any) -> Any:
    """A body for that HTTP library which passes its pieces on and reports what went through."""

    class Body(module.SyncByteStream, module.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, response: Any, inner: Any, exchange: HttpExchange | None) -> None:
            self._response = response
            self._inner = inner
            self._exchange = exchange
            self._read = bytearray()
            if exchange is not None:
                exchange.call.left = self._end

        # No generators: the event loop would close them in another order than it closes those of the library.
        def __iter__(self) -> Iterator[bytes]:
            self._pieces = iter(self._inner)
            return self

        def __next__(self) -> bytes:
            try:
                piece: bytes = next(self._pieces)
            except StopIteration:
                self._end()
                raise
            except Exception as error:
                self._end(error)
                raise
            return self._passed_on(piece)

        def __aiter__(self) -> AsyncIterator[bytes]:
            self._async_pieces = aiter(self._inner)
            return self

        async def __anext__(self) -> bytes:
            try:
                piece: bytes = await anext(self._async_pieces)
            except StopAsyncIteration:
                self._end()
                raise
            except Exception as error:
                self._end(error)
                raise
            return self._passed_on(piece)

        def close(self) -> None:
            self._inner.close()
            self._end()

        async def aclose(self) -> None:
            await self._inner.aclose()
            self._end()

        def _passed_on(self, piece: bytes) -> bytes:
            self._read += piece
            if self._exchange is not None:
                self._exchange.execution.passed_on(self._exchange.call)
            return piece

        def _end(self, error: Exception | None = None) -> None:
            if self._exchange is not None:
                self._exchange.end(self._response, bytes(self._read), error)

    return Body


def _decoded(response: Any, body: bytes) -> str:
    """The body without its compression; what is no UTF-8 survives as lone surrogates."""
    encoding = response.headers.get("content-encoding")
    if encoding and response.stream is not None and not hasattr(response, "_content"):
        again = type(response)(200, headers={"content-encoding": encoding}, content=body)
        body = again.content
    return body.decode("utf-8", "surrogateescape")
