"""Python values as JSON that remembers their types: what a tool returned or raised is made again as the same type.

Plain JSON values stand for themselves. Everything else is an object with one key that begins with ``$``; a mapping with
such a key of its own is written as a list of pairs, so no text of a container or a model can pass for a type.
What cannot be made again is kept as readable text, and the caller is told so.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import importlib
import sys
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from pydantic import BaseModel

from orchestrator.errors import LogDamaged

_HTTP_PACKAGES = ("httpx", "httpx2")
_KEPT_HEADERS = ("content-type", "retry-after", "x-request-id")
"""Of an HTTP answer inside an exception; requests keep none, since they carry keys."""


class Encoded(NamedTuple):
    """A value as JSON."""

    json: Any
    whole: bool
    """``decode`` gives the same value again."""


class _Unknown(Exception):
    """There is no way to write a value so that it can be made again."""


def encode(value: Any) -> Encoded:
    """``value`` as JSON; never raises for what it is given."""
    try:
        written = _encode(value)
        if not _is_plain(written):
            _check(value, decode(written))
    except Exception as error:  # noqa: BLE001 - foreign classes may do anything when they are written or made again
        why = str(error) if isinstance(error, _Unknown) else f"{type(error).__name__}: {error}"
        return Encoded({"$text": {"type": _name(type(value)), "text": _shown(value), "why": why}}, False)
    return Encoded(written, True)


def decode(written: Any) -> Any:
    """The value that ``encode`` was given.

    Raises: LogDamaged: it names a type that is not there (any more), or it was kept as text only.
    """
    if isinstance(written, list):
        return [decode(item) for item in written]
    if not isinstance(written, dict):
        return written
    if len(written) == 1:
        ((key, inner),) = written.items()
        if key in _DECODERS:
            return _DECODERS[key](inner)
    return {key: decode(item) for key, item in written.items()}


def readable(value: Any) -> Any:
    """``value`` as JSON for a person and for comparison; what is no JSON is named by its type."""
    if isinstance(value, dict):
        return {str(key): readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [readable(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, type):
        schema = getattr(value, "model_json_schema", None)
        return schema() if callable(schema) else {"$class": _name(value)}
    if isinstance(value, BaseModel):
        return readable(value.model_dump(mode="python", exclude_none=True))
    if isinstance(value, PurePath | date | enum.Enum):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {one.name: readable(getattr(value, one.name)) for one in dataclasses.fields(value)}
    return {"$type": _name(type(value))}


def _encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    if kind is list:
        return [_encode(item) for item in value]
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item) for key, item in value.items()}
        return {"$dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if kind in (tuple, set, frozenset):
        items = list(value) if kind is tuple else sorted(value, key=repr)
        return {f"${kind.__name__}": [_encode(item) for item in items]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if kind in (datetime, date):
        return {f"${kind.__name__}": value.isoformat()}
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    if kind.__module__.split(".")[0] in _HTTP_PACKAGES and kind.__name__ in ("Request", "Response"):
        return {"$http": _http(value)}
    return _encode_object(value, kind)


def _encode_object(value: Any, kind: type) -> Any:
    if isinstance(value, BaseException):
        state = {}
        for key, item in vars(value).items():
            inner = encode(item)
            if inner.whole and not key.startswith("__"):
                state[key] = inner.json
        return {"$error": {"type": _name(kind), "args": [_encode(item) for item in value.args], "state": state}}
    if isinstance(value, enum.Enum):
        return {"$enum": {"type": _name(kind), "name": value.name}}
    if isinstance(value, BaseModel):
        return {"$model": {"type": _name(kind), "value": _dump(value)}}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"$named": {"type": _name(kind), "items": [_encode(item) for item in value]}}
    if dataclasses.is_dataclass(value):
        fields = {one.name: _encode(getattr(value, one.name)) for one in dataclasses.fields(value)}
        return {"$dataclass": {"type": _name(kind), "fields": fields}}
    raise _Unknown(f"values of {_name(kind)} cannot be made again from JSON")


def _http(value: Any) -> dict[str, Any]:
    package = type(value).__module__.split(".")[0]
    if type(value).__name__ == "Request":
        return {"package": package, "method": value.method, "url": str(value.url)}
    request = getattr(value, "_request", None)
    return {
        "package": package,
        "status": value.status_code,
        "headers": {name: value.headers[name] for name in _KEPT_HEADERS if name in value.headers},
        "content": base64.b64encode(value.content).decode("ascii"),
        "request": None if request is None else _http(request),
    }


def _decode_http(written: dict[str, Any]) -> Any:
    if written["package"] not in _HTTP_PACKAGES:
        raise LogDamaged(f"{written['package']!r} is no HTTP package that the log may name")
    module = importlib.import_module(written["package"])
    if "status" not in written:
        return module.Request(written["method"], written["url"])
    request = None if written["request"] is None else _decode_http(written["request"])
    content = base64.b64decode(written["content"])
    return module.Response(written["status"], headers=written["headers"], content=content, request=request)


def _decode_error(written: dict[str, Any]) -> BaseException:
    kind = _class(written["type"], BaseException)
    arguments = tuple(decode(written["args"]))
    # Not by its constructor: signatures differ, and what it worked out stands in the state.
    error: BaseException = kind.__new__(kind, *arguments)
    error.args = arguments
    vars(error).update({key: decode(item) for key, item in written["state"].items()})
    return error


def _decode_dataclass(written: dict[str, Any]) -> Any:
    kind: type = _class(written["type"], object)
    if not hasattr(kind, "__dataclass_fields__"):
        raise LogDamaged(f"the log names {written['type']}, which is no dataclass")
    made: Any = object.__new__(kind)
    for name, item in written["fields"].items():
        object.__setattr__(made, name, decode(item))
    return made


def _decode_text(written: dict[str, Any]) -> Any:
    raise LogDamaged(f"a value of {written['type']} was kept as text only ({written['why']})")


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$dict": lambda inner: {decode(key): decode(item) for key, item in inner},
    "$tuple": lambda inner: tuple(decode(inner)),
    "$set": lambda inner: set(decode(inner)),
    "$frozenset": lambda inner: frozenset(decode(inner)),
    "$bytes": base64.b64decode,
    "$datetime": datetime.fromisoformat,
    "$date": date.fromisoformat,
    "$path": Path,
    "$http": _decode_http,
    "$error": _decode_error,
    "$enum": lambda inner: _class(inner["type"], enum.Enum)[inner["name"]],
    "$model": lambda inner: _class(inner["type"], BaseModel).model_validate(inner["value"]),
    "$named": lambda inner: _class(inner["type"], tuple)(*decode(inner["items"])),
    "$dataclass": _decode_dataclass,
    "$text": _decode_text,
}


def _class(name: str, base: type) -> Any:
    """The class of that name, which is a ``base``.

    Raises: LogDamaged: there is none.
    """
    module, _, path = name.partition(":")
    # Only what is imported already: a log, which may come from elsewhere, must not decide what code is run.
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise LogDamaged(f"the log names the type {name}, which is not there: let the harness import {module} first")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise LogDamaged(f"the log names {name}, which is no {base.__name__}")
    return found


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _dump(value: BaseModel) -> Any:
    """With what subclasses add in the place of a declared class."""
    return value.model_dump(mode="json", serialize_as_any=True)


def _check(value: Any, again: Any) -> None:
    if type(again) is not type(value):
        raise _Unknown(f"it comes back as {_name(type(again))}")
    if isinstance(value, BaseModel) and _dump(value) != _dump(again):
        raise _Unknown("it comes back with other values")


def _is_plain(written: Any) -> bool:
    if isinstance(written, dict):
        return not any(key in _DECODERS for key in written) and all(map(_is_plain, written.values()))
    return all(map(_is_plain, written)) if isinstance(written, list) else True


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a foreign __repr__
        return f"(its repr raised {type(error).__name__})"
