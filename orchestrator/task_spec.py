"""What the user wrote in ``task.yaml``: the image, the instruction, the checklist, the limits.

Unknown keys are refused. How the file's text becomes values with lines is in ``task_file``, what a task may ask of the
host in ``policy``; ``task`` joins them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
)

from orchestrator.agent_spec import AgentSpec, NonEmpty
from orchestrator.policy import (
    HARMLESS_SECURITY_OPTIONS,
    TRUSTED_SECURITY_OPTIONS,
    api_address,
    container_path,
    normalise_capability,
)
from orchestrator.snapshot_spec import SnapshotSpec
from orchestrator.spec_values import PathBelowRoot, Size

REDACTED = "<secret>"
"""Stands where a secret's value was."""

RUN_ID_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"
"""Names of runs, tasks and daemons: they become names of containers, directories and cgroups."""

_MIN_MEMORY_BYTES = 6 * 2**20


def _text_of_int(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _relative(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"{path!r} leaves the task's directory: write a path relative to the task file, without '..'")
    return path


Name = Annotated[str, StringConstraints(pattern=RUN_ID_PATTERN)]
CheckName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
VolumeName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$")]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
UserName = Annotated[
    str,
    BeforeValidator(_text_of_int),
    StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?$"),
]
ContainerPath = Annotated[str, AfterValidator(container_path)]
RelativePath = Annotated[str, StringConstraints(min_length=1), AfterValidator(_relative)]
Seconds = Annotated[float, Field(gt=0, le=10_000_000, allow_inf_nan=False)]
Capability = Annotated[str, AfterValidator(normalise_capability)]


class _Part(BaseModel):
    """A part of the task: no unknown keys, no silent conversion of types, immutable.

    Validators are built at the first use: most commands of the CLI never look at a task.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class EnvValue(_Part):
    """One environment variable. In the file a plain text is short for ``{value: text}``."""

    value: str | None = Field(default=None, repr=False)
    """The value itself."""
    from_env: EnvName | None = None
    """Name of a variable of the orchestrator's own environment that holds it."""
    secret: bool = False
    """The value appears in no log, file or image; tool output that shows it is redacted."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.value is None and self.from_env is None:
            raise ValueError("give value or from_env")
        if self.value is not None and self.from_env is not None and self.secret:
            raise ValueError("give value or from_env, not both")  # a recorded task holds both, unless it is secret
        return self


class BuildSpec(_Part):
    """An image to be built before the run."""

    context: RelativePath = "."
    """Build context, relative to the task file."""
    dockerfile: RelativePath = "Dockerfile"
    """Relative to the context."""
    args: dict[EnvName, str] = Field(default_factory=dict)
    """Build arguments. They end up in the image's history: no secrets."""


class ModelSpec(_Part):
    """The model, as LiteLLM names it; ``scripted/<file>`` replays answers from a file beside the task."""

    name: NonEmpty
    """Such as ``anthropic/claude-sonnet-4-5`` or ``scripted/replies.yaml``."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 0.0
    """``null``: not sent, for models that refuse it."""
    api_base: Annotated[str, AfterValidator(api_address)] | None = None
    """Address of the API instead of the provider's own (OpenAI's form: with ``/v1``). It is sent the operator's key, so
    an address beyond this host needs ``--trust-task``; the provider's variable (``OPENAI_BASE_URL``) does not."""
    stream: bool = False
    """Let the answer come in parts. Plain answers always state their tokens, which a cost limit needs; streams survive
    proxies that cut silent connections. OpenAI's streams count only with ``extra: {stream_options: …}``."""
    timeout_s: Seconds = 600.0
    """For one request, from its sending to the answer's end."""
    stall_timeout_s: Seconds = 120.0
    """For a silence within a stream."""
    retries: Annotated[int, Field(ge=0, le=50)] = 4
    """Further tries after rate limits, time-outs and dropped connections."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further parameters, sent as they are and logged: no keys, no headers."""


class CheckSpec(_Part):
    """One criterion of the checklist: a command that exits 0 when it is satisfied. The agent never sees it."""

    name: CheckName
    """For the operator; unique in the checklist."""
    probe: NonEmpty | None = None
    """Shell command run beside the container, on the image's pristine files; the live tree is at ``/target``."""
    scratch: NonEmpty | None = None
    """Shell command run in a copy of the container that is thrown away: it may write and install."""
    timeout_s: Seconds = 60.0
    feedback: NonEmpty
    """What the agent is told when this is the first criterion that is not satisfied."""
    network: Literal["none", "bridge"] = "none"
    """Of a scratch check's copy."""

    @model_validator(mode="after")
    def _one_command(self) -> Self:
        if (self.probe is None) == (self.scratch is None):
            raise ValueError("give probe or scratch, one of the two")
        if self.probe is not None and self.network != "none":
            raise ValueError("network is for scratch checks: a probe uses the container's network")
        return self


class Limits(_Part):
    """Where a run ends, counted over the whole run (abandoned stretches too)."""

    steps: Annotated[int, Field(gt=0)] | None = 200
    """Model calls. ``null``: no limit."""
    wall_time_s: Seconds | None = None
    cost_usd: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    stuck_submissions: Annotated[int, Field(gt=0)] | None = 5
    """Consecutive submissions that fail at the same first criterion."""
    tool_timeout_s: Seconds = 300.0
    """For one command; what it started and is still in its session is killed then."""
    tool_output_bytes: Annotated[int, Field(ge=256, le=2**24)] = 16_000
    """What the model sees of one command's output; the middle is cut."""


class Resources(_Part):
    """What the container may use of the host."""

    memory: Annotated[Size, Field(ge=_MIN_MEMORY_BYTES)] = 2 * 2**30
    """Bytes; in the file also ``"512m"``, ``"2g"``."""
    cpus: Annotated[float, Field(gt=0, le=4096)] | None = None
    pids: Annotated[int, Field(ge=16)] = 1024


class VolumeSpec(_Part):
    """A volume of the engine."""

    path: PathBelowRoot
    """Destination in the container."""
    name: VolumeName | None = None
    """An existing volume; ``null``: one is made for this run and removed with it."""
    restore: bool = False
    """A named volume is captured and restored only when this is true; a volume of the run always is."""


class BindSpec(_Part):
    """A directory or file of the host that the container sees."""

    source: NonEmpty
    """On the host; relative to the task file, or absolute. Absolute once loaded."""
    path: PathBelowRoot
    """Destination in the container."""
    read_only: bool = True


class TmpfsSpec(_Part):
    """Memory that is mounted as a directory."""

    path: PathBelowRoot
    size: Size = 64 * 2**20
    """Bytes; in the file also ``"64m"``."""
    mode: Annotated[str, StringConstraints(pattern=r"^[0-7]{3,4}$")] = "1777"
    """Octal, in quotes."""


class DaemonSpec(_Part):
    """A program that runs beside the agent in its container, started at the start and after each restore."""

    name: Name
    start: NonEmpty
    """Shell command, run as root; it may stay in the foreground."""
    ready: NonEmpty | None = None
    """Shell command that exits 0 once it answers; repeated until ``timeout_s``."""
    timeout_s: Seconds = 30.0


class CapabilitySpec(_Part):
    """Changes to the container's capabilities (``policy``'s closed lists)."""

    add: Annotated[tuple[Capability, ...], Field(strict=False)] = ()
    drop: Annotated[tuple[Capability | Literal["ALL"], ...], Field(strict=False)] = ()

    @field_validator("drop", mode="before")
    @classmethod
    def _all(cls, value: object) -> object:
        if isinstance(value, list | tuple):
            return [item.upper() if isinstance(item, str) and item.upper() == "ALL" else item for item in value]
        return value


def _image_tag(value: object) -> str:
    return "build" if isinstance(value, BuildSpec | dict) else "reference"


def _unwrap_build(value: object) -> object:
    if isinstance(value, dict):
        if set(value) != {"build"}:
            raise ValueError("give an image reference, or {build: {context: …}}")
        return {} if value["build"] is None else value["build"]
    return value


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | float)


def _unfold_env(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: {"value": item} if _is_scalar(item) else item for name, item in value.items()}
    return value


def _security_option(value: str) -> str:
    known = HARMLESS_SECURITY_OPTIONS | TRUSTED_SECURITY_OPTIONS
    if value not in known:
        raise ValueError(f"{value!r} is not an option that a task may name (known: {', '.join(sorted(known))})")
    return value


class TaskSpec(_Part):
    """One task."""

    name: Name
    """Lower case letters, digits and ``-``; run ids begin with it."""
    image: Annotated[
        Annotated[NonEmpty, Tag("reference")] | Annotated[BuildSpec, Tag("build")],
        Discriminator(_image_tag),
        BeforeValidator(_unwrap_build),
    ]
    """An image reference, or ``{build: {context, dockerfile, args}}``."""
    workdir: ContainerPath = "/"
    """Where commands run."""
    user: UserName = "root"
    """Who runs the agent's commands: name or uid, optionally ``:group``."""
    env: Annotated[dict[EnvName, EnvValue], BeforeValidator(_unfold_env)] = Field(default_factory=dict)
    """Environment of the agent's commands."""
    setup: Annotated[tuple[NonEmpty, ...], Field(strict=False)] = ()
    """Shell commands run as root before breakpoint 0; a failure ends the launch."""
    instruction: NonEmpty | None = None
    """What the agent is asked to do. Required unless the agent is manual."""
    agent: AgentSpec = Field(default_factory=AgentSpec)
    model: ModelSpec | None = None
    """Required unless the agent is manual."""
    snapshots: SnapshotSpec = Field(default_factory=SnapshotSpec)
    checklist: Annotated[tuple[CheckSpec, ...], Field(strict=False)] = ()
    """Criteria in order; progress is the longest satisfied prefix."""
    limits: Limits = Field(default_factory=Limits)
    network: Literal["none", "bridge"] = "none"
    """``none``: loopback only."""
    resources: Resources = Field(default_factory=Resources)
    volumes: Annotated[tuple[VolumeSpec, ...], Field(strict=False)] = ()
    binds: Annotated[tuple[BindSpec, ...], Field(strict=False)] = ()
    tmpfs: Annotated[tuple[TmpfsSpec, ...], Field(strict=False)] = ()
    daemons: Annotated[tuple[DaemonSpec, ...], Field(strict=False)] = ()
    strategy: Literal["rewind", "continue"] = "rewind"
    """``continue``: the agent is offered no backtrack tools."""
    keep: bool = False
    """Containers stay after the end."""
    capabilities: CapabilitySpec = Field(default_factory=CapabilitySpec)
    security_options: Annotated[tuple[Annotated[str, AfterValidator(_security_option)], ...], Field(strict=False)] = ()

    @field_validator("workdir")
    @classmethod
    def _workdir(cls, path: str) -> str:
        if path.split("/")[1] in {"proc", "sys", "dev"}:
            raise ValueError(f"{path} is the kernel's: choose another directory")
        return path

    def env_for_exec(self, secrets: Mapping[str, str]) -> dict[str, str]:
        """The environment of the agent's commands. ``secrets``: values of the secret ones; absent ones are left out."""
        values = {name: secrets.get(name) if item.secret else item.value for name, item in self.env.items()}
        return {name: value for name, value in values.items() if value is not None}

    def driver_options(self) -> dict[str, Any]:
        """What its driver is made with. ``criu`` must take declared daemons, unless the task forgoes that."""
        must = {"require": "tree"} if self.daemons and self.snapshots.driver == "criu" else {}
        return {**must, **self.snapshots.options}

    def redacted(self) -> dict[str, Any]:
        """The task as plain data for the log: secrets' values are ``"<secret>"``. It loads again as a task."""
        data = self.model_dump(mode="json")
        if isinstance(self.image, BuildSpec):
            data["image"] = {"build": data["image"]}
        for item in data["env"].values():
            if item["secret"] and item["value"] is not None:
                item["value"] = REDACTED
        return data


def redact(text: str, secrets: Mapping[str, str]) -> str:
    """``text`` with the values of ``secrets`` replaced by ``<secret>``.

    Values shorter than 4 characters are left: replacing them would tear up ordinary text. Longest first, so that a
    secret that contains another one leaves nothing of itself.
    """
    for value in sorted({value for value in secrets.values() if len(value) >= 4}, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    return text
