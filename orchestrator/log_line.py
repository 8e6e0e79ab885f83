"""One line of the context log: an event as ASCII JSON with its checksum as the last field.

::

    {"v":1,"seq":7,…,"kind":"note","text":"…","crc":"1f3a90c2"}

``crc`` is the CRC-32 of the line as it would stand without it, so a changed character inside a message is damage, and
not another conversation. A line without one (of a version that wrote none) is taken as it stands.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any, Final, get_args

from pydantic import ValidationError

from orchestrator.events import EVENT, FORMAT_VERSION, Event, NoteEvent

_CRC: Final = re.compile(rb',"crc":"([0-9a-f]{8})"\}\Z')
_KINDS: Final = frozenset(member.model_fields["kind"].default for member in get_args(get_args(Event)[0]))


class BadLine(Exception):
    """Why a line is no event of this run."""


def encode(event: Event) -> bytes:
    """The event's line. From Python values, since pydantic's own JSON refuses lone surrogates."""
    whole = json.dumps(event.model_dump(mode="python"), ensure_ascii=True, separators=(",", ":")).encode("ascii")
    return b'%b,"crc":"%08x"}\n' % (whole[:-1], zlib.crc32(whole))


def decode(line: bytes, run_id: str) -> Event:
    """The event in ``line`` (without its line feed); one of an unknown kind as a note in its place.

    Raises: BadLine: it holds none of that run.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise BadLine("empty" if not line.strip() else f"not JSON ({len(line)} bytes)") from None
    if not isinstance(data, dict):
        raise BadLine("not a JSON object")
    if data.pop("crc", None) is not None:
        found = _CRC.search(line)
        if found is None or zlib.crc32(line[: found.start()] + b"}") != int(found[1], 16):
            raise BadLine("its checksum does not fit: the line was changed after it had been written")
    try:
        event = EVENT.validate_python(data if data.get("kind") in _KINDS else _as_note(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadLine(f"not an event: {where}: {first['msg']}") from None
    if event.v > FORMAT_VERSION:
        raise BadLine(f"format version {event.v}: written by a newer orchestrator, which reads it")
    if event.run_id != run_id:
        raise BadLine(f"belongs to run {event.run_id!r}, not to {run_id!r}")
    return event


def is_checked(line: bytes) -> bool:
    """The line carries a checksum."""
    return _CRC.search(line) is not None


def _as_note(data: dict[str, Any]) -> dict[str, Any]:
    """An event of an unknown kind as a note in its place, so that chains of parents through it stay whole."""
    base = {key: data.get(key) for key in ("v", "seq", "run_id", "at", "step", "parent_seq", "before", "after")}
    text = f"(an event of kind {data.get('kind')!r}, which this version does not know)"
    return {**base, "messages": data.get("messages", []), "kind": NoteEvent.model_fields["kind"].default, "text": text}
