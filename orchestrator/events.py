"""The events of a run: one JSON line each in ``events.jsonl``, the only truth of a run.

Every event has a sequence number and a parent. The parent chain from the head back to ``run`` is the *live path*; the
conversation is the concatenation of ``messages`` along it, so context and container cannot come apart. A rewind is an
event whose parent is the checkpoint it goes back to: what was abandoned simply lies on no path from the head.

The fields ``before`` and ``after`` are snapshot ids (``None``: the driver took none, see the checkpoint's coverage).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from orchestrator.recorded_call import RecordedCall
from snapshot_drivers.base import Change, Coverage

FORMAT_VERSION = 1

Message = dict[str, Any]
"""A chat message in the OpenAI form, exactly as it is sent."""


class Usage(BaseModel):
    """Tokens of one model call; ``None`` where the provider did not say. Never 0 for unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    cached_tokens: int | None = None


class Progress(BaseModel):
    """The longest satisfied prefix of the checklist, out of how many criteria."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    satisfied: int
    total: int


class EventBase(BaseModel):
    """What every event carries."""

    model_config = ConfigDict(extra="forbid")

    v: int = FORMAT_VERSION
    seq: int = -1
    """Line counter of the run, from 0, never used again. It, ``run_id`` and ``at`` are assigned by the context log."""
    run_id: str = ""
    at: str = ""
    """ISO 8601, UTC."""
    step: int
    """Model calls asked for so far in the whole run (the step this event belongs to); 0 before the first."""
    parent_seq: int | None
    """The event that this one continues; ``None`` only for ``run``."""
    before: str | None = None
    after: str | None = None
    messages: list[Message] = Field(default_factory=list)
    """What this event appends to the conversation, if it lies on the live path."""


class RunEvent(EventBase):
    """The run begins: the task, the tools, the first messages."""

    kind: Literal["run"] = "run"
    task: dict[str, Any]
    """The task as validated, secrets redacted."""
    tools: list[dict[str, Any]]
    """Tool schemas offered to the model."""
    driver: str
    container: str
    container_id: str | None = None
    """The engine's; ``None`` in logs of versions that did not write it."""


class ModelStartEvent(EventBase):
    """A request is about to be sent. Not synced by itself; it is not part of the conversation and moves no head.

    One that no answer follows until a ``resume`` was lost with the process that sent it: it is sent again and counted.
    """

    kind: Literal["model_start"] = "model_start"
    call: RecordedCall | None = None
    """Of an agent of another framework."""


class FailedTry(BaseModel):
    """One request that gave no answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    """``incomplete``, ``timeout``, ``connection``, ``rate_limit``, ``server``, ``auth``, ``context_length``, …"""
    text: str
    status: int | None = None
    """Of HTTP; ``None``: no answer began."""
    incomplete: bool = False
    """A stream that broke off, or ended without a finish reason; ``raw`` holds what came of it."""
    raw: Any = None
    """What came: a stream's events, a JSON value or text, with the key replaced; or where it was put (``aside``)."""


class ModelCallEvent(EventBase):
    """The model answered. Written only after the checkpoint of its breakpoint is committed."""

    kind: Literal["model_call"] = "model_call"
    breakpoint_id: int
    model: str
    parameters: dict[str, Any]
    """Everything sent beside messages and tools; no key, no header."""
    request_digest: str
    """SHA-256 over the canonical JSON of model, parameters, tools and messages as sent."""
    request_messages: int
    """How many messages were sent."""
    response: dict[str, Any]
    """The provider's answer, unrepaired: the body; ``{"events": […]}``, a stream's events; or ``{"aside": …}``."""
    finish_reason: str | None
    usage: Usage | None
    cost_usd: float | None
    latency_ms: float
    attempts: int
    """Requests sent until this answer came, those that were lost with a process included."""
    failed_tries: list[FailedTry] = Field(default_factory=list)
    """Those before the answer, in order."""
    call: RecordedCall | None = None
    """Of an agent of another framework, whose ``response`` is an ``outcome`` and may be an error that was raised."""


class ModelFailureEvent(EventBase):
    """The model gave no answer after all tries. It moves no head: the run can go on at the same breakpoint."""

    kind: Literal["model_failure"] = "model_failure"
    breakpoint_id: int | None
    model: str
    parameters: dict[str, Any]
    request_digest: str
    text: str
    attempts: int
    failed_tries: list[FailedTry]


class ToolStartEvent(EventBase):
    """A tool call is about to run: how a resume knows what a crash cut off. Not synced by itself; moves no head."""

    kind: Literal["tool_start"] = "tool_start"
    answer_seq: int
    """The ``model_call`` that asked for it."""
    position: int
    """Its place among the calls of that answer, from 0."""
    name: str
    call: RecordedCall | None = None
    """Of an agent of another framework: no answer asked for it that is known, so ``answer_seq`` is the head's."""


class ToolCallEvent(EventBase):
    """A tool ran. Written only after the snapshot ``after`` it is committed."""

    kind: Literal["tool_call"] = "tool_call"
    call_id: str
    name: str
    arguments: str
    """Raw bytes of the model's arguments, unrepaired."""
    result: str
    """What the model is told."""
    error: str | None = None
    """Why it was not run (malformed arguments, unknown tool), or what the engine said."""
    exit_code: int | None = None
    timed_out: bool = False
    duration_ms: float = 0.0
    attempt: int = 1
    """Which try gave this result; the effects of those before it were undone."""
    files_changed: list[Change] = Field(default_factory=list)
    """At most 200 of them."""
    files_changed_count: int = 0
    shared: bool = False
    """Something else ran in the container meanwhile, so not every change need be this tool's."""
    call: RecordedCall | None = None
    """Of an agent of another framework, which puts the result into its conversation itself."""


class SubmissionEvent(EventBase):
    """The checklist was run on a submission; precedes the ``tool_call`` of ``submit``."""

    kind: Literal["submission"] = "submission"
    progress: Progress
    failed: str | None
    """Name of the first unsatisfied criterion; ``None`` when all hold."""
    feedback: str | None
    """What the agent is told of it."""
    duration_ms: float


class CheckpointEvent(EventBase):
    """A committed pair: the context up to ``parent_seq`` and the snapshot ``after`` (equal to ``before``)."""

    kind: Literal["checkpoint"] = "checkpoint"
    breakpoint_id: int
    checkpoint_kind: Literal["model", "manual", "before_rewind"]
    driver: str
    coverage: Coverage
    progress: Progress | None
    note: str | None = None
    error: str | None = None
    """Why there is no snapshot (``on_failure: degrade``); such a breakpoint is never offered."""
    files_changed_count: int = 0
    capture_ms: float = 0.0
    frozen_ms: float = 0.0
    waited_ms: float = 0.0
    """How long the step had to wait for the capture after the model had answered."""
    stored_bytes: int = 0


class RewindIntentEvent(EventBase):
    """Staged and about to touch the container. Without ``rewind`` or ``restore`` after it, the next start finishes it.

    ``before``: the snapshot of rule 7. ``after``: the snapshot to restore. Its parent is the head it leaves.
    """

    kind: Literal["rewind_intent"] = "rewind_intent"
    breakpoint_id: int
    memory: str | None
    """``None``: a restore from outside."""


class RewindEvent(EventBase):
    """Both sides are at ``breakpoint_id`` again. ``parent_seq`` is that checkpoint; ``messages`` holds the memories."""

    kind: Literal["rewind"] = "rewind"
    breakpoint_id: int
    from_seq: int
    """The head that was abandoned."""
    memory: str
    restore_ms: float
    verified: str
    container_id: str | None = None


class RestoreEvent(EventBase):
    """The head was moved from outside. ``parent_seq`` is the checkpoint's event."""

    kind: Literal["restore"] = "restore"
    breakpoint_id: int
    from_seq: int
    container: str
    previous_container: str | None
    restore_ms: float
    verified: str
    container_id: str | None = None


class ResumeEvent(EventBase):
    """Another process drives the run on from here. The time since the event before it is not the run's.

    Moves no head. What was cut off is finished, and the container is put at ``after``, behind this line.
    """

    kind: Literal["resume"] = "resume"
    container: str
    container_id: str
    previous_container_id: str | None
    """``None``: not known. Different: that one is gone, and this one was made from the recorded configuration."""
    limits: dict[str, int | float] = Field(default_factory=dict)
    """Limits that were raised with it, for the rest of the run."""


class NoteEvent(EventBase):
    """Something a reader should know: the operator's note, the end of the run, a nudge to the model."""

    kind: Literal["note"] = "note"
    text: str


class CollectEvent(EventBase):
    """``gc`` removes these snapshots, by the run's retention: their breakpoints cannot be restored any more.

    Written before they are removed, while nobody drives the run; it moves no head, and no time of the run passes.
    """

    kind: Literal["collect"] = "collect"
    snapshots: list[str]


class EngineErrorEvent(EventBase):
    """The engine failed; never a tool's result. ``cost_usd``: of an answer that had to be dropped."""

    kind: Literal["engine_error"] = "engine_error"
    text: str
    cost_usd: float | None = None


class EndEvent(EventBase):
    """The run ended (or stopped being driven): status and reason of DESIGN."""

    kind: Literal["end"] = "end"
    status: Literal["succeeded", "failed", "stopped", "interrupted"]
    reason: str | None
    text: str | None = None


Event = Annotated[
    RunEvent
    | ModelStartEvent
    | ModelCallEvent
    | ModelFailureEvent
    | ToolStartEvent
    | ToolCallEvent
    | SubmissionEvent
    | CheckpointEvent
    | RewindIntentEvent
    | RewindEvent
    | RestoreEvent
    | ResumeEvent
    | NoteEvent
    | CollectEvent
    | EngineErrorEvent
    | EndEvent,
    Field(discriminator="kind"),
]

EVENT: TypeAdapter[Event] = TypeAdapter(Event)
