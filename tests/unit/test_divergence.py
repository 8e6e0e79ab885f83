"""Where two requests differ, in words, and which differences may be overlooked."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.recording.divergence import differences, tolerable

RECORDED: dict[str, Any] = {
    "model": "m",
    "parameters": {"temperature": 0.5, "instructions": "It is noon."},
    "tools": [{"name": "bash"}],
    "messages": [
        {"role": "system", "content": "It is noon."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "a"}}]},
        {"role": "assistant", "tool_calls": [{"id": "t1", "function": {"name": "bash", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "t1", "content": "done"},
    ],
}


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    def put(inner: Any, rest: tuple[Any, ...]) -> Any:
        if not rest:
            return value
        copy = list(inner) if isinstance(inner, list) else dict(inner)
        copy[rest[0]] = put(inner[rest[0]], rest[1:])
        return copy

    found: dict[str, Any] = put(RECORDED, path)
    return found


CASES = [
    (("model",), "n", "model"),
    (("parameters", "temperature"), 0.7, "parameters.temperature"),
    (("tools", 0, "name"), "sh", "tools[0].name"),
    (("messages", 0, "content"), "It is night.", "messages[0].content"),
    (("messages", 1, "content", 1, "image_url", "url"), "b", "messages[1].content[1].image_url.url"),
    (("messages", 2, "tool_calls", 0, "id"), "t2", "messages[2].tool_calls[0].id"),
    (("messages", 3, "tool_call_id"), "t2", "messages[3].tool_call_id"),
    (("messages", 3, "content"), None, "messages[3].content"),
]


@pytest.mark.parametrize(("place", "value", "path"), CASES, ids=[case[2] for case in CASES])
def test_the_first_difference_is_named_with_old_and_new(place: tuple[Any, ...], value: Any, path: str) -> None:
    (found,) = differences(RECORDED, changed(place, value))
    assert found.path == path and found.new == value and path in str(found)
    # Undeclared, only the system prompt's text may differ.
    assert tolerable([found], RECORDED, []) is (path == "messages[0].content")


@pytest.mark.parametrize(
    ("declared", "place", "allowed"),
    [
        ("messages[3].content", ("messages", 3, "content"), True),
        ("messages[*].content", ("messages", 3, "content"), True),
        ("messages[*].content", ("messages", 1, "content", 0, "text"), True),
        ("messages[1]", ("messages", 1, "content", 0, "text"), True),
        ("messages[*]", ("messages", 3, "tool_call_id"), False),
        ("messages[*]", ("messages", 2, "tool_calls", 0, "id"), False),
        ("messages[*]", ("messages", 3, "role"), False),
        ("messages[3].cont", ("messages", 3, "content"), False),
        ("model", ("model",), False),
        ("tools[*].name", ("tools", 0, "name"), False),
        ("x", ("parameters", "instructions"), True),
    ],
)
def test_a_declared_place_covers_what_lies_under_it_but_never_the_conversations_shape(
    declared: str, place: tuple[Any, ...], allowed: bool
) -> None:
    found = list(differences(RECORDED, changed(place, "other")))
    assert tolerable(found, RECORDED, [declared]) is allowed


def test_more_or_fewer_messages_are_another_conversation() -> None:
    for messages in (RECORDED["messages"][:-1], [*RECORDED["messages"], {"role": "user", "content": "x"}]):
        found = list(differences(RECORDED, {**RECORDED, "messages": messages}))
        assert [one.path for one in found] == ["messages[3]" if len(messages) == 3 else "messages[4]"]
        assert not tolerable(found, RECORDED, ["messages[*]"])


def test_the_order_of_keys_is_no_difference() -> None:
    assert not list(differences({"a": 1, "b": [{"c": 1, "d": 2}]}, {"b": [{"d": 2, "c": 1}], "a": 1}))
