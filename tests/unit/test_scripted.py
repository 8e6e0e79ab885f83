"""The scripted model: which reply is taken, and that it comes through LiteLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.errors import ModelError, TaskError
from orchestrator.memory import Lesson, rewind_message
from orchestrator.model import Model
from orchestrator.task import ModelSpec
from snapshot_drivers.base import Coverage

USER = {"role": "user", "content": "begin"}
REWOUND = rewind_message(0, [Lesson(0, "m")], Coverage.of([]))


def scripted(directory: Path, replies: Any, **spec: Any) -> Model:
    (directory / "r.yaml").write_text(yaml.safe_dump(replies), encoding="utf-8")
    return Model(ModelSpec(name="scripted/r.yaml", **spec), directory, sleep=lambda _: None)


def ask(model: Model, *messages: dict[str, Any]) -> str:
    return str(model.complete([USER, *messages], []).message["content"])


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def submitted(feedback: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "submit", "arguments": "{}"}}
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": feedback}]


def test_replies_are_taken_in_order_and_once(tmp_path: Path) -> None:
    model = scripted(tmp_path, [{"say": "one"}, {"say": "two"}])
    assert [ask(model), ask(model)] == ["one", "two"]
    with pytest.raises(ModelError, match=r"no reply of the script fits request 2 \(2 of 2 are used"):
        ask(model)


def test_a_repeated_reply_is_never_used_up(tmp_path: Path) -> None:
    model = scripted(tmp_path, [{"say": "again", "repeat": True}])
    assert [ask(model), ask(model), ask(model)] == ["again"] * 3


CONDITIONS: list[tuple[dict[str, Any], list[dict[str, Any]], bool]] = [
    ({"position": 0}, [], True),
    ({"position": 1}, [], False),
    ({"contains": "x"}, [said("x")], True),
    ({"last_contains": ["x", "y"]}, [said("x")], False),
    ({"last_contains": "x"}, [said("x"), said("y")], False),
    ({"any_contains": "x"}, [said("x"), said("y")], True),
    ({"not_contains": "x"}, [said("x"), said("y")], False),
    ({"after_rewind": True}, [REWOUND], True),
    ({"after_rewind": True}, [said("rewound")], False),
    ({"after_rewind": False}, [REWOUND, said("x")], False),
    ({"failed": "missing"}, submitted("it is missing"), True),
    ({"failed": "missing"}, submitted("it is wrong"), False),
    ({"failed": "missing"}, [said("it is missing")], False),
]


@pytest.mark.parametrize(("when", "messages", "fits"), CONDITIONS)
def test_a_reply_is_taken_where_its_conditions_hold(
    tmp_path: Path, when: dict[str, Any], messages: list[dict[str, Any]], fits: bool
) -> None:
    model = scripted(tmp_path, [{"when": when, "say": "this"}, {"say": "other"}])
    assert ask(model, *messages) == ("this" if fits else "other")


def test_usage_cost_calls_and_reason_come_out_as_they_were_written(tmp_path: Path) -> None:
    reply = {
        "say": "s",
        "calls": [{"name": "bash", "raw_arguments": "{oops"}, {"name": "submit"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2},
        "cost": 0.5,
        "finish_reason": "length",
    }
    answer = scripted(tmp_path, [reply]).complete([USER], [])
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.total_tokens) == (7, 9)
    assert answer.cost_usd == 0.5 and answer.finish_reason == "length"
    assert [call["function"]["arguments"] for call in answer.message["tool_calls"]] == ["{oops", "{}"]


def test_what_the_script_does_not_say_is_unknown_and_not_zero(tmp_path: Path) -> None:
    answer = scripted(tmp_path, [{"say": "s"}]).complete([USER], [])
    assert answer.usage is None and answer.cost_usd is None


def test_two_runs_of_one_script_do_not_share_their_place(tmp_path: Path) -> None:
    one, two = (scripted(tmp_path, [{"say": "first"}, {"say": "second"}]) for _ in range(2))
    assert [ask(one), ask(two), ask(one), ask(two)] == ["first", "first", "second", "second"]


def test_a_candidate_is_found_by_what_its_line_holds(tmp_path: Path) -> None:
    lines = [json.dumps({"breakpoint_id": 9, "about_to": "b"}), json.dumps({"breakpoint_id": 4, "about_to": "a"})]
    calls = [{"name": "backtrack_commit", "arguments": {"breakpoint_id": '{candidate:"a"}', "memory_summary": "m"}}]
    answer = scripted(tmp_path, [{"calls": calls}]).complete([USER, said("\n".join(lines))], [])
    assert json.loads(answer.message["tool_calls"][0]["function"]["arguments"])["breakpoint_id"] == 4


@pytest.mark.parametrize("text", ["- {sya: x}", "{", "- 1", "\xff"])
def test_a_bad_script_is_named_before_anything_is_asked(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(TaskError, match=r"r\.yaml"):
        Model(ModelSpec(name="scripted/r.yaml"), tmp_path)
    with pytest.raises(TaskError, match=r"cannot read .*missing\.yaml"):
        Model(ModelSpec(name="scripted/missing.yaml"), tmp_path)
