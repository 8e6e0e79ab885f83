"""The tools that the agent is offered, and how a call's arguments become a request: nothing is run here.

Whatever a model sends as a call becomes either a request or a refusal in words; no call raises.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from orchestrator.candidates import Candidate
from orchestrator.launcher import ExecResult

Text = Annotated[str, StringConstraints(min_length=1, pattern=r"\S")]
_EXCERPT_CHARS = 200


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class BashCall(_Arguments):
    """Run a shell command in the container. The answer holds its output (stdout and stderr) and its exit code."""

    command: Text
    """The command, for sh -c."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds after which the command is killed, at most the task's limit."""

    @field_validator("command")
    @classmethod
    def _can_be_passed_on(cls, command: str) -> str:
        if "\0" in command:
            raise ValueError("a command cannot hold a NUL character")
        try:
            command.encode()
        except UnicodeEncodeError as error:
            raise ValueError("the command holds a lone surrogate: it is no valid text") from error
        return command


class SubmitCall(_Arguments):
    """Hand in the work for checking. The answer says that the task is done, or what is missing first."""


class CandidatesCall(_Arguments):
    """List the breakpoints to which the conversation and the whole container can be rewound, newest first."""


class CommitCall(_Arguments):
    """Rewind the conversation and the whole container to a breakpoint: everything done since is undone and forgotten.

    Only the memory is carried over. Do this when the container is broken in a way that costs more to repair than to
    avoid. Calls after this one in the same message are not run.
    """

    breakpoint_id: int
    """A breakpoint that backtrack_candidates has listed."""
    memory_summary: Text
    """What was tried, why it failed, and what to do instead, for yourself after the rewind."""


ToolCall = BashCall | SubmitCall | CandidatesCall | CommitCall

_TOOLS: dict[str, type[ToolCall]] = {
    "bash": BashCall,
    "submit": SubmitCall,
    "backtrack_candidates": CandidatesCall,
    "backtrack_commit": CommitCall,
}
_BACKTRACK = ("backtrack_candidates", "backtrack_commit")


@dataclass(frozen=True)
class Refusal:
    """A call that cannot be run, and what the model is told."""

    text: str


@dataclass(frozen=True)
class Outcome:
    """What became of one call: what the model is told, and what the log keeps beside it."""

    result: str
    error: str | None = None
    exit_code: int | None = None
    timed_out: bool = False
    duration_ms: float = 0.0


def offered(strategy: Literal["rewind", "continue"]) -> list[str]:
    """Names of the tools that a run of this strategy offers."""
    return [name for name in _TOOLS if strategy == "rewind" or name not in _BACKTRACK]


def schemas(strategy: Literal["rewind", "continue"]) -> list[dict[str, Any]]:
    """The offered tools in the OpenAI form, in a fixed order (providers' prompt caches begin with them)."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": " ".join((_TOOLS[name].__doc__ or "").split()),
                "parameters": _parameters(_TOOLS[name]),
            },
        }
        for name in offered(strategy)
    ]


def parse(name: str, arguments: str, names: Sequence[str], *, cut: bool = False) -> ToolCall | Refusal:
    """The request that a model's call stands for. ``cut``: the answer ended at the token limit."""
    if name not in names:
        return Refusal(f"error: there is no tool {_excerpt(name)}; the tools are: {', '.join(names)}")
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        reason = "your answer was cut off at its token limit; send a shorter call" if cut else str(error)
        return Refusal(f"error: the arguments of {name} are no JSON ({reason}): {_excerpt(arguments)}")
    if not isinstance(value, dict):
        return Refusal(f"error: the arguments of {name} must be a JSON object, not {_excerpt(arguments)}")
    try:
        return _TOOLS[name].model_validate(value)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors(include_url=False)
        )
        return Refusal(f"error: wrong arguments of {name}: {problems}")


def bash_result(done: ExecResult, timeout_s: float) -> str:
    """What the model is told of a command; bytes that are no UTF-8 become U+FFFD."""
    text = done.output.decode("utf-8", "replace")
    lines = [text if not text or text.endswith("\n") else text + "\n"]
    if done.timed_out:
        lines.append(f"killed: the command ran longer than {timeout_s:g} s\n")
    if done.left_running:
        lines.append("the command left programs running in the background\n")
    if done.note:
        lines.append(f"{done.note}\n")
    if done.exit_code is not None:
        lines.append(f"exit code {done.exit_code}")
    return "".join(lines).rstrip("\n")


def candidates_result(found: Sequence[Candidate]) -> str:
    """What the model is told of its breakpoints: a JSON object a line, so that no foreign text can pass for a line."""
    if not found:
        return "There is no breakpoint to go back to."
    lines = [json.dumps(candidate.model_dump(mode="json")) for candidate in found]
    return "\n".join([f"{len(found)} breakpoints, newest first, one JSON object a line:", *lines])


def _parameters(model: type[ToolCall]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, without pydantic's titles."""
    properties = {}
    for name, schema in model.model_json_schema()["properties"].items() if model.model_fields else ():
        options = schema.get("anyOf", [schema])
        kind = next(option["type"] for option in options if option["type"] != "null")
        properties[name] = {"type": kind, "description": schema["description"]}
    required = [name for name, info in model.model_fields.items() if info.is_required()]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _excerpt(text: str) -> str:
    shown = json.dumps(text[:_EXCERPT_CHARS])
    return shown if len(text) <= _EXCERPT_CHARS else f"{shown} and {len(text) - _EXCERPT_CHARS} more characters"
