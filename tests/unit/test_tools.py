"""Tools as they are offered, and what becomes of arguments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.launcher import ExecResult
from orchestrator.tools import BashCall, CommitCall, Refusal, bash_result, offered, parse, schemas

NAMES = offered("rewind")


def test_a_run_that_only_continues_is_offered_no_way_back() -> None:
    assert offered("continue") == ["bash", "submit"]
    assert offered("rewind") == ["bash", "submit", "backtrack_candidates", "backtrack_commit"]


def test_schemas_are_plain_and_say_what_each_argument_is() -> None:
    for schema in schemas("rewind"):
        parameters = schema["function"]["parameters"]
        assert parameters["additionalProperties"] is False and "$defs" not in parameters
        assert all(set(value) == {"type", "description"} for value in parameters["properties"].values())
    commit = schemas("rewind")[3]["function"]["parameters"]
    assert commit["required"] == ["breakpoint_id", "memory_summary"]
    assert commit["properties"]["breakpoint_id"]["type"] == "integer"


def test_a_number_in_quotes_is_a_number() -> None:
    assert parse("backtrack_commit", '{"breakpoint_id": "7", "memory_summary": "m"}', NAMES) == CommitCall(
        breakpoint_id=7, memory_summary="m"
    )


def test_no_arguments_at_all_are_none() -> None:
    assert not isinstance(parse("submit", "", NAMES), Refusal)
    assert isinstance(parse("bash", "", NAMES), Refusal)


@given(name=st.sampled_from([*NAMES, "", "other"]), arguments=st.text(st.characters(), max_size=60))
def test_no_arguments_crash_it(name: str, arguments: str) -> None:
    parse(name, arguments, NAMES)


def test_deeply_nested_arguments_are_refused() -> None:
    assert isinstance(parse("bash", "[" * 100_000, NAMES), Refusal)


def test_a_refusal_quotes_no_more_than_a_little() -> None:
    refused = parse("bash", "x" * 10_000, NAMES)
    assert isinstance(refused, Refusal) and len(refused.text) < 500


@pytest.mark.parametrize("timeout", ["0", "-1", "NaN", "Infinity", '"soon"'])
def test_a_time_limit_is_a_positive_number(timeout: str) -> None:
    assert isinstance(parse("bash", f'{{"command": "ls", "timeout_s": {timeout}}}', NAMES), Refusal)
    assert parse("bash", '{"command": "ls", "timeout_s": 5}', NAMES) == BashCall(command="ls", timeout_s=5)


def test_the_answer_to_a_command_says_what_happened() -> None:
    done = ExecResult(
        exit_code=7, output=b"out\xff", truncated_bytes=0, timed_out=False, duration_ms=1.0, left_running=True
    )
    assert bash_result(done, 5) == "out\ufffd\nthe command left programs running in the background\nexit code 7"
