"""The output of one exec as the engine sends it: stdout and stderr in one stream, told apart by a header a piece.

Source: Docker Engine API, "Attach to a container", stream format; docker/docker-py's ``exec_start(socket=True)``.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any, Final, NamedTuple

_HEADER: Final = struct.Struct(">BxxxL")
_RECEIVE_BYTES: Final = 256 * 1024

STDOUT: Final = 1
STDERR: Final = 2


class Piece(NamedTuple):
    """Some output, in the order in which it came."""

    stream: int
    """``STDOUT`` or ``STDERR``."""
    data: bytes


class ExecStream:
    """Reads what a command writes, with a time limit for each read and no more memory than one receive."""

    def __init__(self, answer: Any) -> None:
        """``answer``: the file-like socket of the SDK; its response object keeps what was read ahead."""
        self._answer = answer
        self._socket: socket.socket = getattr(answer, "_sock", answer)
        self._socket.setblocking(False)
        self._ahead = _read_ahead(answer)
        self._header = bytearray()
        self._stream = STDOUT
        self._left = 0

    def read(self, timeout_s: float) -> list[Piece] | None:
        """What came within ``timeout_s``, possibly nothing; ``None`` at the end of the stream or of the engine."""
        data, self._ahead = self._ahead, b""
        if not data:
            received = self._receive(timeout_s)
            if received is None:
                return []
            data = received
        return list(self._pieces(data)) if data else None

    def close(self) -> None:
        """The connection is closed; the command goes on. Repeatable."""
        getattr(self._answer, "_response", self._answer).close()  # closing the response closes its socket

    def fileno(self) -> int:
        """For a poll: readable when more has come."""
        return self._socket.fileno()

    def _receive(self, timeout_s: float) -> bytes | None:
        """``None``: nothing yet. Empty: the end."""
        deadline = time.monotonic() + max(timeout_s, 0)
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while True:
            try:
                return self._socket.recv(_RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                left_s = deadline - time.monotonic()
            except OSError:
                return b""
            if left_s <= 0:
                return None
            poller.poll(left_s * 1000)

    def _pieces(self, data: bytes) -> list[Piece]:
        found, view = [], memoryview(data)
        while view:
            if self._left == 0:
                missing = _HEADER.size - len(self._header)
                self._header += view[:missing]
                view = view[missing:]
                if len(self._header) < _HEADER.size:
                    break
                self._stream, self._left = _HEADER.unpack(self._header)
                self._header.clear()
                continue
            found.append(Piece(self._stream, bytes(view[: self._left])))
            taken = len(found[-1].data)
            view = view[taken:]
            self._left -= taken
        return found


class AttachedStream(ExecStream):
    """An `ExecStream` with the other direction: what is typed goes to the command."""

    def __init__(self, answer: Any, *, framed: bool) -> None:
        """``framed``: as without a terminal; with one the output is one stream of bytes."""
        super().__init__(answer)
        self._framed = framed

    def write(self, data: bytes) -> None:
        """The command gets ``data``. Raises: OSError: it has ended."""
        self._socket.setblocking(True)
        try:
            self._socket.sendall(data)
        finally:
            self._socket.setblocking(False)

    def end_input(self) -> None:
        """The command finds the end of its input. Raises: OSError."""
        self._socket.shutdown(socket.SHUT_WR)

    def _pieces(self, data: bytes) -> list[Piece]:
        return super()._pieces(data) if self._framed else [Piece(STDOUT, data)]


def _read_ahead(answer: Any) -> bytes:
    """What the HTTP parser read beyond the headers: the SDK hands out the socket below its buffer and would lose it."""
    response = getattr(answer, "_response", None)
    buffered = getattr(getattr(getattr(response, "raw", None), "_fp", None), "fp", None)
    return bytes(buffered.peek()) if buffered is not None else b""
