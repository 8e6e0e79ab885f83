"""What a run keeps of one call of an agent that it did not write: its place, its input, and what it was answered.

An agent with a loop of its own (a *harness*) is taken back by running it again from its beginning, with every call up
to the breakpoint answered from the log. These are the parts of the call's event that this needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Input = dict[str, Any]
"""A call's input as JSON. Of a model: ``model``, ``parameters``, ``tools``, ``messages``; of a tool: ``name``,
``arguments``."""

MESSAGES = "messages"


class RecordedInput(BaseModel):
    """A call's input, without what an earlier call of the same path had too: conversations only grow."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str
    """SHA-256 over the canonical JSON of the whole input."""
    base: int | None = None
    """Number of the call from which the shared parts are taken."""
    same: list[str] = Field(default_factory=list)
    """Keys whose values are those of ``base``."""
    kept: int = 0
    """How many of the first messages are those of ``base``."""
    rest: Any
    """The other keys; ``messages`` without those kept. Or where they were put (``aside``)."""


class RecordedCall(BaseModel):
    """A call's place among the others, and what it takes to answer it again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int
    """Counts the calls of the run in the order of their beginning; a call that is repeated gets a new one."""
    scope: int | None
    """Number of the tool call inside which it was made; ``None``: the harness itself made it."""
    lane: int
    """Which thread or task made it, in the order of their first calls."""
    beside: list[int] = Field(default_factory=list)
    """Calls that were in flight when it began, those around it left out."""
    api: str
    """What was called, such as ``litellm.completion``; ``tool`` for a tool."""
    input: RecordedInput
    outcome: Any = None
    """Of a tool: what it returned or raised (``typed_json``), or where it was put. Of a model: see ``response``."""
    incomplete: bool = False
    """A stream of which the caller did not want the rest, or that broke off."""
    readable_only: bool = False
    """The outcome is kept as text: its type cannot be made again from JSON, so a replay cannot get past this call."""


def shortened(whole: Input, digest: str, base: int | None, earlier: Mapping[str, Any]) -> RecordedInput:
    """``whole`` without what ``earlier``, the input of the call ``base``, holds too."""
    if base is None:
        return RecordedInput(digest=digest, rest=whole)
    rest = {key: value for key, value in whole.items() if key not in earlier or earlier[key] != value}
    kept = 0
    if MESSAGES in rest and MESSAGES in earlier:
        kept = shared_length(earlier[MESSAGES], rest[MESSAGES])
        rest[MESSAGES] = rest[MESSAGES][kept:]
    same = [key for key in whole if key not in rest]
    return RecordedInput(digest=digest, base=base, same=same, kept=kept, rest=rest)


def restored(recorded: RecordedInput, rest: Mapping[str, Any], earlier: Mapping[str, Any]) -> Input:
    """The whole input again; ``rest``: taken back from aside. ``earlier``: the whole input of the call ``base``."""
    whole = {**{key: earlier[key] for key in recorded.same}, **rest}
    if recorded.kept:
        whole[MESSAGES] = [*earlier[MESSAGES][: recorded.kept], *rest[MESSAGES]]
    return whole


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items at the beginning are equal."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
