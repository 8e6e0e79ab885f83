"""Streams put together: the same deltas make the same body, however they are cut, glued or spread over the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.provider_answer import conversation_message, read_answer
from orchestrator.sse import EventReader
from orchestrator.stream import assembled, is_complete
from tests.e2e.provider_replies import anthropic_events, openai_events

TEXT = st.text(max_size=20)
CALL = st.fixed_dictionaries({"id": st.from_regex(r"[a-z]{1,8}", fullmatch=True), "arguments": TEXT})


def cut(text: str, data: st.DataObject) -> list[str]:
    """``text`` in pieces of any size, empty ones too."""
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def fed(body: bytes, data: st.DataObject) -> list[str]:
    reader, found = EventReader(), []
    places = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    for start, end in zip([0, *places], [*places, len(body)], strict=True):
        found += list(reader.feed(body[start:end]))
    return [*found, *reader.end()]


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXT.filter(bool), max_size=5), st.sampled_from(["\n", "\r\n", "\r"]), st.booleans(), st.data())
def test_events_come_out_the_same_wherever_the_bytes_are_cut(
    texts: list[str], end: str, last_is_ended: bool, data: st.DataObject
) -> None:
    values = [json.dumps({"t": text}, ensure_ascii=False) for text in texts]
    body = "".join(f": note{end}event: x{end}data: {value}{end}{end}" for value in values)
    body = body if last_is_ended else body.removesuffix(end + end)
    assert fed(body.encode("utf-8", "replace"), data) == [value.encode("utf-8", "replace").decode() for value in values]


def test_an_event_of_several_lines_is_one_and_a_byte_order_mark_is_none() -> None:
    reader = EventReader()
    assert list(reader.feed("\ufeffdata: {\ndata:\ndata: }\n\nretry: 3\n\n".encode())) == ["{\n\n}"]


@settings(max_examples=200, deadline=None)
@given(TEXT, TEXT, st.lists(CALL, max_size=3, unique_by=lambda call: call["id"]), st.data())
def test_openai_deltas_make_the_same_message_however_they_are_cut(
    content: str, reasoning: str, calls: list[dict[str, str]], data: st.DataObject
) -> None:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in cut(reasoning, data)]
    deltas += [{"content": piece} for piece in cut(content, data)]
    begun = [
        {"index": index, "id": call["id"], "type": "function", "function": {"name": "bash", "arguments": ""}}
        for index, call in enumerate(calls)
    ]
    pieces = [
        [{"index": index, "function": {"arguments": piece}} for piece in cut(call["arguments"], data)]
        for index, call in enumerate(calls)
    ]
    if data.draw(st.booleans(), label="calls side by side"):
        deltas += [{"tool_calls": begun}] if begun else []
        longest = max(map(len, pieces), default=0)
        deltas += [{"tool_calls": [piece[at] for piece in pieces if at < len(piece)]} for at in range(longest)]
    else:
        for first, rest in zip(begun, pieces, strict=True):
            deltas += [{"tool_calls": [part]} for part in [first, *rest]]
    body = assembled(openai_events(deltas, "stop"))
    answer = read_answer(body)
    assert answer is not None and answer.finish_reason == "stop" and answer.usage is None
    assert answer.message["content"] == content and answer.message.get("reasoning_content", "") == reasoning
    got = [(call["id"], call["function"]["arguments"]) for call in answer.message.get("tool_calls", [])]
    assert got == [(call["id"], call["arguments"]) for call in calls]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3)), max_size=6))
def test_calls_without_numbers_of_their_own_are_told_apart_by_their_ids(sizes: list[tuple[int, int]]) -> None:
    deltas: list[dict[str, Any]] = []
    for number, (numbered, parts) in enumerate(sizes):
        index = {"index": 0} if numbered else {}
        first = {"id": f"c{number}", "function": {"name": "bash", "arguments": "a"}}
        deltas += [{"tool_calls": [{**index, **first}]}]
        deltas += [{"tool_calls": [{**index, "function": {"arguments": "b"}}]}] * (parts if numbered == 0 else 1)
    body = assembled(openai_events(deltas)) or {}
    ids = [call["id"] for call in body["choices"][0]["message"].get("tool_calls", [])]
    assert ids == [f"c{number}" for number in range(len(sizes))]


@settings(max_examples=100, deadline=None)
@given(TEXT.filter(bool), TEXT.filter(bool), st.dictionaries(TEXT, TEXT, max_size=3))
def test_anthropic_events_make_the_blocks_they_come_from(thought: str, text: str, value: dict[str, str]) -> None:
    blocks = [
        {"type": "thinking", "thinking": thought, "signature": "S"},
        {"type": "redacted_thinking", "data": "R"},
        {"type": "text", "text": text},
        {"type": "tool_use", "id": "t", "name": "bash", "input": value},
    ]
    answer = read_answer(assembled(anthropic_events(blocks, "tool_use")))
    assert answer is not None and answer.finish_reason == "tool_calls"
    assert answer.message["thinking_blocks"] == blocks[:2] and answer.message["content"] == text
    assert json.loads(answer.message["tool_calls"][0]["function"]["arguments"]) == value
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.total_tokens) == (11, 18)


@pytest.mark.parametrize(
    "events", [openai_events([{"content": "x"}]), anthropic_events([{"type": "text", "text": "x"}])]
)
def test_a_stream_is_complete_only_with_its_finish_reason(events: list[Any]) -> None:
    assert is_complete(events)
    last = next(at for at in range(len(events)) if is_complete(events[: at + 1]))
    assert not is_complete(events[:last]) and not is_complete([*events[:last], "[DONE]"])


@pytest.mark.parametrize(
    "event",
    [
        *([], "x", None, 3, {"choices": None}, {"choices": [None, {"delta": None}]}),
        {"choices": [{"delta": {"tool_calls": [None, {"function": 3}]}}]},
        {"choices": [{"delta": {"content": 3, "tool_calls": {}}}]},
    ],
)
def test_strange_events_break_nothing(event: Any) -> None:
    assert not is_complete([event])
    assembled([event, {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}])


def test_ids_differ_in_the_whole_conversation() -> None:
    call = {"id": "call_0", "function": {"name": "bash", "arguments": "{}"}}
    first = conversation_message({"tool_calls": [call, call, {**call, "id": None}]}, "s")
    second = conversation_message({"tool_calls": [call]}, "t", [first])
    ids = [item["id"] for message in (first, second) for item in message["tool_calls"]]
    assert ids[0] == "call_0" and len(set(ids)) == 4


def test_a_refusal_is_the_content_of_a_message_without_one() -> None:
    assert conversation_message({"content": None, "refusal": "no"}, "s")["content"] == "no"
