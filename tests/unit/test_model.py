"""The gateway to the model: retries, what is sent, what is kept of an answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ModelError
from orchestrator.model import RETRY_AFTER_MAX_S, Model
from orchestrator.request import digest, public_parameters, sendable
from orchestrator.task import ModelSpec
from tests.unit.test_scripted import USER


def model(directory: Path, replies: list[dict[str, Any]], pauses: list[float], **spec: Any) -> Model:
    (directory / "r.json").write_text(json.dumps(replies), encoding="utf-8")
    return Model(ModelSpec(name="scripted/r.json", **spec), directory, sleep=pauses.append, jitter=lambda: 1.0)


@pytest.mark.parametrize("error", ["rate_limit", "timeout", "connection", "server"])
def test_what_may_pass_is_tried_again_with_growing_pauses(tmp_path: Path, error: str) -> None:
    pauses: list[float] = []
    answer = model(tmp_path, [{"say": "ok", "fail": {"error": error, "times": 3}}], pauses).complete([USER], [])
    assert answer.message["content"] == "ok" and answer.attempts == 4
    assert pauses == [1.0, 2.0, 4.0]


def test_the_provider_says_how_long_to_wait(tmp_path: Path) -> None:
    pauses: list[float] = []
    fails = {"error": "rate_limit", "times": 1, "retry_after_s": 17}
    patient = model(tmp_path, [{"fail": fails}, {"fail": {**fails, "retry_after_s": 86400}}], pauses)
    patient.complete([USER], [])
    patient.complete([USER], [])
    assert pauses == [17.0, RETRY_AFTER_MAX_S]


def test_it_gives_up_after_the_retries_of_the_task(tmp_path: Path) -> None:
    pauses: list[float] = []
    tired = model(tmp_path, [{"fail": {"error": "server", "times": 9}}], pauses, retries=2)
    with pytest.raises(ModelError, match="gave no answer after 3 tries"):
        tired.complete([USER], [])
    assert len(pauses) == 2


def test_a_refused_request_is_not_repeated(tmp_path: Path) -> None:
    pauses: list[float] = []
    with pytest.raises(ModelError, match="after 1 try"):
        model(tmp_path, [], pauses).complete([USER], [])
    assert pauses == []


def test_messages_are_left_as_they_are_and_the_digest_stands_for_them(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ba sh", "arguments": "{oops"}}
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "\ud800"},
    ]
    before = json.dumps(messages)
    asked = model(tmp_path, [{"say": "x", "repeat": True}], [])
    one, two = asked.complete(messages, []), asked.complete(messages, [])
    assert json.dumps(messages) == before
    assert one.request_digest == two.request_digest and one.request_messages == 3
    assert one.request_digest != asked.complete(messages[:1], []).request_digest


def test_what_strict_providers_refuse_is_sent_in_another_form() -> None:
    call: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "ba sh!", "arguments": "{oops"}}
    sent = sendable({"role": "assistant", "content": "a\ud800b\ud83d\ude00", "tool_calls": [call]})
    assert sent["content"] == "a\ufffdb😀"
    assert sent["tool_calls"][0]["function"] == {"name": "ba_sh_", "arguments": '{"malformed_arguments": "{oops"}'}
    assert call["function"]["arguments"] == "{oops", "the log's own is untouched"


def test_no_key_and_no_header_stands_in_the_log() -> None:
    parameters = {"api_key": "s", "extra_headers": {"x": "s"}, "max_tokens": 5, "aws_secret_access_key": "s", "seed": 1}
    parameters["extra_body"] = {"authorization": "s", "top_k": 3}
    assert public_parameters(parameters) == {"max_tokens": 5, "seed": 1, "extra_body": {"top_k": 3}}


def test_a_temperature_of_null_is_not_sent(tmp_path: Path) -> None:
    parameters = model(tmp_path, [{}], [], temperature=None, extra={"seed": 3}).complete([USER], []).parameters
    assert parameters == {"timeout": 600.0, "seed": 3}


def test_calls_without_an_id_of_their_own_get_one(tmp_path: Path) -> None:
    calls = [{"name": "submit", "call_id": "same"}, {"name": "submit", "call_id": "same"}]
    message = model(tmp_path, [{"calls": calls}], []).complete([USER], []).message
    ids = [call["id"] for call in message["tool_calls"]]
    assert ids[0] == "same" and len(set(ids)) == 2
    assert "content" not in message


def test_equal_values_have_equal_digests_whatever_their_order() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})


def test_litellm_is_imported_only_when_a_model_is_made() -> None:
    code = "import sys, orchestrator.runner; sys.exit('litellm' in sys.modules or 'openai' in sys.modules)"
    root = str(Path(__file__).parents[2])
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": root}).returncode == 0
    )
