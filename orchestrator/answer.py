"""The launcher's answer: its frames (``images/launcher/launch.c``), and what is kept of a command's output.

The container's root can forge frames: lengths are bounded, and memory does not grow with what comes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

_HEADER: Final = struct.Struct("<BI")
_SHORT_BYTES: Final = 64
_FRAME_BYTES: Final = 64 * 1024
_TEXT_BYTES: Final = 4096


class BoundedOutput:
    """Keeps the beginning and the end of a stream of any length in bounded memory."""

    def __init__(self, limit_bytes: int) -> None:
        self._head_bytes = limit_bytes // 2
        self._tail_bytes = limit_bytes - self._head_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        """``data`` comes next in the stream."""
        self._total += len(data)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_bytes + _FRAME_BYTES:
            del self._tail[: len(self._tail) - self._tail_bytes]

    def value(self) -> tuple[bytes, int]:
        """What is kept, with a line in place of what was cut, and how many bytes that was."""
        head = bytes(self._head)
        tail = bytes(self._tail[max(len(self._tail) - self._tail_bytes, 0) :])
        if len(head) + len(tail) == self._total:
            return head + tail, 0
        # Not in the middle of a UTF-8 character: the reader would see damage that is not there.
        head = head[: len(head) - _incomplete_end(head)]
        tail = tail[_incomplete_start(tail) :]
        cut = self._total - len(head) - len(tail)
        return b"%b\n[... %d bytes cut here ...]\n%b" % (head, cut, tail), cut


class Frame(NamedTuple):
    """A part of the launcher's answer; long output comes in several."""

    kind: str
    data: bytes


class NoFrame(Exception):
    """The bytes are not the launcher's; ``args[0]`` holds their beginning."""


class FrameReader:
    """Takes a stream apart into frames, keeping only what is incomplete."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._output_left = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that ``data`` completes.

        Raises: NoFrame.
        """
        if self._output_left:
            taken = data[: self._output_left]
            self._output_left -= len(taken)
            data = data[len(taken) :]
            yield Frame("o", taken)
        self._pending += data
        while len(self._pending) >= _HEADER.size:
            code, length = _HEADER.unpack_from(self._pending)
            kind = chr(code)
            if kind not in "sox" or length > (_FRAME_BYTES if kind == "o" else _SHORT_BYTES):
                raise NoFrame(bytes(self._pending[:_TEXT_BYTES]))
            have = self._pending[_HEADER.size : _HEADER.size + length]
            if kind != "o" and len(have) < length:
                return
            del self._pending[: _HEADER.size + length]
            self._output_left = length - len(have)
            yield Frame(kind, bytes(have))


def _incomplete_end(data: bytes) -> int:
    """Bytes of an unfinished UTF-8 character at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return back if needed > back else 0
    return 0


def _incomplete_start(data: bytes) -> int:
    """Bytes at the beginning that continue a UTF-8 character."""
    count = 0
    while count < min(3, len(data)) and data[count] & 0xC0 == 0x80:
        count += 1
    return count
