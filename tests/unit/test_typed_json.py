"""Values of tools and errors of frameworks as JSON that makes the same values again, or says that it cannot."""

from __future__ import annotations

import enum
import json
import sys
import threading
from collections import namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from orchestrator.errors import LogDamaged, UsageError
from orchestrator.recording.typed_json import decode, encode, readable


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: int


@dataclass(frozen=True)
class Frozen:
    name: str
    inner: Point


class Base(BaseModel):
    x: int


class Derived(Base):
    y: int


class Holder(BaseModel):
    held: Base


class OwnError(Exception):
    def __init__(self, first: str, *, code: int) -> None:
        super().__init__(first)
        self.code = code
        self.lock = threading.Lock()


VALUES = [
    None, True, 1, 1.5, "text", [1, [2]], {"a": {"b": None}}, (1, (2, 3)), {1, 2}, frozenset({"a"}), b"\x00\xff",
    {1: "one"}, {"$tuple": [1]}, {"$x": 1, "y": 2}, {}, [], datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), date(2026, 1, 2),
    Path("/a/b"),
    Colour.RED, Point(1, 2), Frozen("n", Point(3, 4)), Derived(x=1, y=2), {"deep": [(Point(1, 2), {"k": {3}})]},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    written = encode(value)
    assert written.whole
    again = decode(json.loads(json.dumps(written.json)))
    assert again == value and type(again) is type(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.dictionaries(st.just("$error"), inner),
)


@given(json_values)
def test_no_text_of_a_container_passes_for_a_type(value: Any) -> None:
    written = encode(value)
    assert written.whole and decode(json.loads(json.dumps(written.json))) == value


def test_an_error_comes_back_as_its_own_type_with_what_it_knows() -> None:
    error = OwnError("first", code=7)
    request = httpx.Request("POST", "http://there", headers={"authorization": "Bearer sk-secret"})
    error.response = httpx.Response(429, text="slow down", headers={"retry-after": "3"}, request=request)  # type: ignore[attr-defined]
    written = encode(error)
    assert written.whole and "sk-secret" not in json.dumps(written.json)
    again = decode(written.json)
    assert type(again) is OwnError and again.args == ("first",) and again.code == 7 and str(again) == "first"
    assert (again.response.status_code, again.response.text, again.response.headers["retry-after"]) == (
        429,
        "slow down",
        "3",
    )
    assert not hasattr(again, "lock")
    assert isinstance(decode(encode(UsageError("no")).json), UsageError)


def test_what_cannot_be_made_again_is_kept_as_text_and_said_to_be() -> None:
    local = namedtuple("local", "x")
    for value in (threading.Lock(), object(), lambda: None, local(1), [open], Holder(held=Derived(x=1, y=2))):
        written = encode(value)
        assert not written.whole and set(written.json) == {"$text"} and written.json["$text"]["why"]
        with pytest.raises(LogDamaged, match="kept as text only"):
            decode(written.json)


def test_a_log_names_no_class_but_of_the_kind_that_stands_there() -> None:
    for written in (
        {"$error": {"type": "builtins:object", "args": [], "state": {}}},
        {"$model": {"type": "subprocess:Popen", "value": {}}},
        {"$enum": {"type": "os:environ", "name": "x"}},
        {"$dataclass": {"type": "subprocess:Popen", "fields": {}}},
        {"$error": {"type": "no.such.module:X", "args": [], "state": {}}},
        {"$error": {"type": "antigravity:X", "args": [], "state": {}}},
    ):
        with pytest.raises(LogDamaged):
            decode(written)


def test_a_log_imports_nothing() -> None:
    with pytest.raises(LogDamaged, match="let the harness import turtledemo first"):
        decode({"$error": {"type": "turtledemo:X", "args": [], "state": {}}})
    assert "turtledemo" not in sys.modules


def test_a_readable_form_names_what_is_no_json() -> None:
    shown = readable({"a": Path("/x"), "b": [Colour.RED, threading.Lock()], "c": Frozen("n", Point(1, 2)), 1: Base})
    assert shown["a"] == "/x" and shown["b"][1] == {"$type": "_thread:lock"} and shown["c"]["inner"] == [1, 2]
    assert shown["1"]["properties"]["x"]["type"] == "integer"
