"""A model provider on 127.0.0.1 that speaks the OpenAI and the Anthropic protocol, scripted per request.

Every request is recorded as it came, and checked as the strictest providers check it (`wire_rules`): a request that
breaks a rule is answered with 400, and makes the test fail when the server is closed.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self

from tests.e2e.wire_rules import anthropic_problems, openai_problems, responses_problems

OPENAI_PATH = "/v1/chat/completions"
ANTHROPIC_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
_RULES = {
    OPENAI_PATH: openai_problems,
    ANTHROPIC_PATH: anthropic_problems,
    RESPONSES_PATH: responses_problems,
}


@dataclass(frozen=True)
class Reply:
    """What one request is answered with, byte by byte."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pieces: tuple[bytes, ...] = ()
    """The body, written piece by piece."""
    wait_s: float = 0.0
    """Before the status line."""
    gap_s: float = 0.0
    """Before each piece but the first."""
    framing: Literal["length", "chunked", "close"] = "length"
    """How the body's end is told: by its length, by chunks, or by closing the connection."""
    drop: Literal["before", "in", "after"] | None = None
    """The connection is reset before the status line, or after the pieces: ``in``, the body being announced as longer;
    ``after``, at its very end (for ``chunked``, without the last chunk)."""


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    at: float
    """Monotonic."""

    @property
    def json(self) -> dict[str, Any]:
        """The body, parsed."""
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def messages_text(self) -> str:
        """The text of the ``messages`` array as it stands in the body, without its last bracket."""
        text = self.body.decode("utf-8")
        start = text.index('"messages"')
        start = text.index("[", start)
        _, end = json.JSONDecoder().raw_decode(text, start)
        return text[start : end - 1]


Script = Reply | Callable[[Request], Reply]


class ProviderServer:
    """Answers the requests of one test with its replies, in order; the last one again and again."""

    def __init__(self, *replies: Script) -> None:
        self.replies = list(replies)
        self.requests: list[Request] = []
        self.problems: list[str] = []
        """What strict providers would have refused."""
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._server.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        if kind is None:
            assert self.problems == [], "strict providers refuse this"

    def take(self, request: Request) -> Reply:
        """The reply to ``request``, which is recorded and checked."""
        with self._lock:
            position = len(self.requests)
            self.requests.append(request)
            problems = self._check(request)
            self.problems += [f"request {position}: {problem}" for problem in problems]
            script = self.replies[min(position, len(self.replies) - 1)]
        if problems:
            return Reply(
                400, {"content-type": "application/json"}, (json.dumps({"error": {"message": str(problems)}}).encode(),)
            )
        return script(request) if callable(script) else script

    @staticmethod
    def _check(request: Request) -> list[str]:
        check = _RULES.get(request.path)
        if check is None:
            return [f"there is no {request.path}"]
        try:
            body = json.loads(request.body.decode("utf-8"))
        except ValueError as error:
            return [f"the body is no JSON: {error}"]
        return check(body, request.headers)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, provider: ProviderServer) -> None:
        self.provider = provider
        self.stopping = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, *_: Any) -> None:
        """A client that has gone is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        """A redirect that was followed, or a call home: recorded, and refused."""
        self.server.provider.take(Request(f"GET {self.path}", {}, b"", time.monotonic()))
        self.send_error(405)

    def do_POST(self) -> None:
        """Answers from the script."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        reply = self.server.provider.take(Request(self.path.partition("?")[0], headers, body, time.monotonic()))
        self.server.stopping.wait(reply.wait_s)
        if reply.drop == "before":
            self._reset()
            return
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        length = sum(map(len, reply.pieces)) + (1000 if reply.drop == "in" else 0)
        framing = {
            "length": ("content-length", str(length)),
            "chunked": ("transfer-encoding", "chunked"),
            "close": ("connection", "close"),
        }[reply.framing]
        self.send_header(*framing)
        self.end_headers()
        for position, piece in enumerate(reply.pieces):
            if position and self.server.stopping.wait(reply.gap_s):
                return
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if reply.framing == "chunked" else piece)
            self.wfile.flush()
        if reply.drop is not None:
            time.sleep(0.02)  # so that the reset does not overtake what has been written
            self._reset()
        elif reply.framing == "chunked":
            self.wfile.write(b"0\r\n\r\n")
        elif reply.framing == "close":
            self.close_connection = True

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def finish(self) -> None:
        """The connection may be gone."""
        try:
            super().finish()
        except (OSError, ValueError):
            return
