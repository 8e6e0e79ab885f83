"""Which agent a task has: ours, a person, or one with a loop of its own that is recorded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

NonEmpty = Annotated[str, StringConstraints(min_length=1, pattern=r"\S")]


class AgentSpec(BaseModel):
    """The harness that talks to the model."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    kind: Literal["function-calling", "manual", "python", "mini-swe-agent", "langgraph"] = "function-calling"
    """``manual``: the container is launched and left to a person or a script. The last three have a loop of their own,
    which is recorded: a function, mini-swe-agent's default agent, a compiled graph."""
    system: NonEmpty | None = None
    """Stands instead of the built-in system prompt."""
    entry: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")] | None = None
    """``module:name`` of the function (``python``), or of what makes the graph (``langgraph``); it gets the run.
    Modules that lie beside the task file are found."""
    ignore: Annotated[tuple[NonEmpty, ...], Field(strict=False)] = ()
    """Places in the calls of a recorded agent whose text may differ when it runs again, such as
    ``messages[*].content`` or ``arguments.path``."""
    on_divergence: Literal["stop", "live"] = "stop"
    """When a recorded agent that runs again asks something else: stop, or ask the model from the breakpoint there."""

    @property
    def recorded(self) -> bool:
        """It has a loop of its own: its conversation is what it sends."""
        return self.kind in ("python", "mini-swe-agent", "langgraph")
