"""Server-sent events, taken out of a byte stream that may be cut anywhere.

https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream: lines end at CRLF, LF or CR and
nowhere else (JSON leaves U+2028 and U+0085 unescaped), an event at an empty line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

DONE = "[DONE]"
"""The data of OpenAI's last event; no JSON."""

_LINE_END = re.compile(rb"\r\n|\r(?!\Z)|\n")
_BOM = b"\xef\xbb\xbf"


class EventReader:
    """Keeps what is incomplete; everything else comes out as it is complete."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._searched = 0
        self._data: list[bytes] = []
        self._begun = False

    def feed(self, piece: bytes) -> Iterator[str]:
        """The data of the events that ``piece`` completes; bytes that are no UTF-8 become U+FFFD."""
        self._pending += piece
        at = 0
        # A CR at the very end may be half a CRLF: it waits for the next byte.
        for end in _LINE_END.finditer(self._pending, self._searched):
            line, at = bytes(self._pending[at : end.start()]), end.end()
            yield from self._line(line)
        del self._pending[:at]
        self._searched = max(0, len(self._pending) - 1)

    def end(self) -> Iterator[str]:
        """The data of a last event that no empty line ended: some servers leave it out."""
        rest = bytes(self._pending).removesuffix(b"\r")
        self._pending.clear()
        if rest:
            yield from self._line(rest)
        yield from self._line(b"")

    def _line(self, line: bytes) -> Iterator[str]:
        if not self._begun:
            self._begun = True
            line = line.removeprefix(_BOM)
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            yield b"\n".join(self._data).decode("utf-8", "replace")
            self._data.clear()


def parsed(data: str) -> Any:
    """The JSON value of an event's data.

    Raises: ValueError: it is none.
    """
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
