"""CRIU's requests and answers on the wire: the few fields that are used, of protobuf's version 2 encoding.

Written out here because CRIU's own Python bindings are no package of their own outside of distributions, are tied to
one version of the protobuf runtime, and are not needed for twenty fields whose numbers never change.

Source: CRIU 4.2, ``images/rpc.proto``; protobuf's "Encoding".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

Value = int | str | tuple[str, ...]
"""A tuple: a field that is repeated."""


class Kind(IntEnum):
    """``criu_req_type``."""

    DUMP = 1
    RESTORE = 2
    CHECK = 3
    NOTIFY = 6
    VERSION = 10


OPTIONS: Final = {
    "images_dir_fd": 1,
    "pid": 2,
    "leave_running": 3,
    "tcp_established": 5,
    "shell_job": 7,
    "file_locks": 8,
    "log_level": 9,
    "log_file": 10,
    "notify_scripts": 12,
    "force_irmap": 21,
    "manage_cgroups": 24,
    "manage_cgroups_mode": 34,
    "ghost_limit": 35,
    "irmap_scan_paths": 36,
    "freeze_cgroup": 44,
    "timeout": 45,
    "tcp_skip_in_flight": 46,
    "tcp_close": 52,
    "network_lock": 64,
    "images_dir": 68,
}
"""Fields of ``criu_opts``."""

NETWORK_LOCK_SKIP: Final = 3
_REQUEST_KIND, _REQUEST_OPTIONS, _REQUEST_SUCCESS = 1, 2, 3
_VARINT, _BYTES = 0, 2


@dataclass(frozen=True)
class Answer:
    """``criu_resp``."""

    kind: int = 0
    success: bool = False
    script: str = ""
    """Name of the moment, of a notification."""
    code: int = 0
    text: str = ""
    version: tuple[int, int, int] = (0, 0, 0)


def request(kind: Kind, options: Mapping[str, Value] | None = None) -> bytes:
    """A ``criu_req``. Raises: KeyError: an option that is not in ``OPTIONS``."""
    body = b"".join(_field(OPTIONS[name], value) for name, value in (options or {}).items())
    return _field(_REQUEST_KIND, int(kind)) + (_field(_REQUEST_OPTIONS, body) if options is not None else b"")


def go_on(*, success: bool) -> bytes:
    """The answer to a notification."""
    return request(Kind.NOTIFY) + _field(_REQUEST_SUCCESS, int(success))


def answer(data: bytes) -> Answer:
    """What CRIU said. Raises: ValueError: it is no ``criu_resp``."""
    found = dict(fields(data))
    notify = dict(fields(_bytes(found.get(5, b""))))
    version = dict(fields(_bytes(found.get(10, b""))))
    return Answer(
        kind=_number(found.get(1, 0)),
        success=bool(found.get(2, 0)),
        script=_bytes(notify.get(1, b"")).decode("utf-8", "replace"),
        code=_number(found.get(7, 0)),
        text=_bytes(found.get(9, b"")).decode("utf-8", "replace"),
        version=(_number(version.get(1, 0)), _number(version.get(2, 0)), _number(version.get(4, 0))),
    )


def _field(number: int, value: Value | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    if isinstance(value, tuple):
        return b"".join(_field(number, one) for one in value)
    data = os.fsencode(value) if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    number &= 2**64 - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of every field of a message. Raises: ValueError: it is cut short or of another encoding."""
    place = 0
    while place < len(data):
        key, place = _read_varint(data, place)
        if key & 7 == _VARINT:
            value, place = _read_varint(data, place)
            yield key >> 3, value
        elif key & 7 == _BYTES:
            length, place = _read_varint(data, place)
            if place + length > len(data):
                raise ValueError("cut short")
            yield key >> 3, data[place : place + length]
            place += length
        else:
            raise ValueError(f"wire type {key & 7}")


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise ValueError("cut short")
        byte = data[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place
        shift += 7


def _number(value: int | bytes) -> int:
    if isinstance(value, int):
        return value
    raise ValueError("bytes where a number belongs")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError("a number where bytes belong")
