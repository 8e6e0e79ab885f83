"""Loads a ``task.yaml``: values with lines, the model of ``task_spec``, the policy, the environment; all at once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.agent_spec import AgentSpec
from orchestrator.errors import Refused, TaskError
from orchestrator.foreign_wishes import foreign_wishes
from orchestrator.policy import (
    CREDENTIAL_PARAMETERS,
    HOST_OPTIONS,
    OWN_PARAMETERS,
    TRUSTED_CAPABILITIES,
    TRUSTED_SECURITY_OPTIONS,
    Problem,
    api_base_problem,
    bind_problem,
    contradictions,
    destination_problem,
    overlap_problems,
)
from orchestrator.snapshot_spec import SnapshotSpec
from orchestrator.task_file import Loc, TaskFile, parse_task_text, read_task_file
from orchestrator.task_spec import (
    REDACTED,
    RUN_ID_PATTERN,
    BindSpec,
    BuildSpec,
    CapabilitySpec,
    CheckSpec,
    DaemonSpec,
    EnvValue,
    Limits,
    ModelSpec,
    Resources,
    TaskSpec,
    TmpfsSpec,
    VolumeSpec,
    redact,
)

__all__ = [
    "REDACTED",
    "RUN_ID_PATTERN",
    "AgentSpec",
    "BindSpec",
    "BuildSpec",
    "CapabilitySpec",
    "CheckSpec",
    "DaemonSpec",
    "EnvValue",
    "Limits",
    "LoadedTask",
    "ModelSpec",
    "Resources",
    "SnapshotSpec",
    "TaskSpec",
    "TmpfsSpec",
    "VolumeSpec",
    "check_foreign",
    "load_recorded",
    "load_task",
    "load_task_data",
    "parse_task",
    "recorded_text",
    "redact",
]

_MESSAGES = {
    "missing": "missing",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping (key: value)",
    "model_type": "must be a mapping (key: value)",
    "tuple_type": "must be a list",
}
"""Pydantic's type errors in the words of YAML."""


@dataclass(frozen=True)
class LoadedTask:
    """A task that may be run: its model, and what the file alone does not hold."""

    spec: TaskSpec
    source_dir: Path
    """Directory of the task file: relative paths start there."""
    text: str = field(repr=False)
    """The file as read; it may hold secrets."""
    secrets: dict[str, str] = field(repr=False)
    """Value of each secret variable, by its name in the container."""
    missing_secrets: tuple[str, ...] = ()
    """Secrets whose value is not known any more (only a recorded task)."""


def load_task(
    path: Path,
    *,
    environ: Mapping[str, str],
    trust: bool = False,
    model: str | None = None,
    agent: str | None = None,
    protected: Iterable[Path] = (),
) -> LoadedTask:
    """The task in the file at ``path``, checked in every respect that needs no engine.

    ``trust``: rights that reach the host are granted. ``model``: stands instead of the file's ``model.name``;
    ``agent``: a kind where the file has none. ``protected``: directories that may never be bound (the data directory).

    Raises: TaskError: with one line ``file:line: field: message`` for each problem.
        Refused: the task is right but asks for what only ``--trust-task`` grants.
    """
    file = read_task_file(path)
    if model is not None:
        given = file.data.get("model")
        file.data["model"] = {**(given if isinstance(given, dict) else {}), "name": model}
    if agent is not None:
        file.data.setdefault("agent", {"kind": agent})
    return _checked(file, path.resolve().parent, environ, trust, tuple(protected))


def load_task_data(
    data: Mapping[str, Any],
    *,
    source_dir: Path,
    environ: Mapping[str, str],
    trust: bool = False,
    protected: Iterable[Path] = (),
) -> LoadedTask:
    """As ``load_task``, of a task that a program made: lines of messages are those of it as YAML."""
    try:
        text = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise TaskError(f"the task holds what YAML cannot: {error}") from error
    return _checked(parse_task_text(text, "task"), source_dir, environ, trust, tuple(protected))


def _checked(
    file: TaskFile, source_dir: Path, environ: Mapping[str, str], trust: bool, protected: tuple[Path, ...]
) -> LoadedTask:
    spec = _with_absolute_binds(_validated(file, file.data), source_dir)
    _raise_task_error(file, _problems(spec))
    spec, secrets, absent = _resolve_env(spec, environ)
    if absent:
        _raise_task_error(file, absent)
    if not trust:
        _raise_refused(file, _refusals(spec, protected))
    return LoadedTask(spec, source_dir, file.text, secrets)


def recorded_text(spec: TaskSpec) -> str:
    """The text of a run's own ``task.yaml``: the task as validated, secrets redacted."""
    return yaml.safe_dump(spec.redacted(), sort_keys=False, allow_unicode=True, width=120)


def load_recorded(path: Path, *, source_dir: Path, environ: Mapping[str, str]) -> LoadedTask:
    """The task that a run was launched with, from the file that ``recorded_text`` made.

    It passed the policy at its launch. Secrets are read from ``environ`` again (``from_env``, else their own name);
    those that are not there are named in ``missing_secrets``.

    Raises: TaskError: the file is gone or damaged.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise TaskError(f"{path}: is no regular file: put a copy of the run's task there")
    file = read_task_file(path)
    spec = _validated(file, file.data)
    secrets: dict[str, str] = {}
    missing: list[str] = []
    for name, item in spec.env.items():
        if not item.secret:
            continue
        value = environ.get(item.from_env or name)
        if value is None and item.value != REDACTED:
            value = item.value
        if value is None:
            missing.append(name)
        else:
            secrets[name] = value
    return LoadedTask(spec, source_dir, file.text, secrets, tuple(missing))


def parse_task(text: str, name: str = "task.yaml") -> TaskSpec:
    """The model of a task given as text: no policy, no environment, no paths resolved.

    Raises: TaskError.
    """
    file = parse_task_text(text, name)
    return _validated(file, file.data)


def check_foreign(text: str, name: str, *, trust: bool, protected: Iterable[Path] = ()) -> TaskSpec:
    """The recorded task of a run that was made elsewhere, checked like a new one; what it asks for is to be granted.

    Raises: TaskError. Refused: it asks for what only ``trust`` grants; each thing is named.
    """
    file = parse_task_text(text, name)
    spec = _validated(file, file.data)
    # A recorded task holds a variable's value beside the place that it came from.
    _raise_task_error(file, [problem for problem in _problems(spec) if problem.loc[:1] != ("env",)])
    if not trust:
        _raise_refused(file, [*_refusals(spec, tuple(protected)), *foreign_wishes(spec)])
    return spec


def _validated(file: TaskFile, data: object) -> TaskSpec:
    try:
        return TaskSpec.model_validate(data)
    except ValidationError as error:
        problems = [_problem(details, data) for details in error.errors(include_url=False)]
        _raise_task_error(file, problems)
        raise


def _with_absolute_binds(spec: TaskSpec, source_dir: Path) -> TaskSpec:
    """Sources of binds made absolute, relative to the task file."""
    binds = tuple(bind.model_copy(update={"source": os.path.normpath(source_dir / bind.source)}) for bind in spec.binds)
    return spec.model_copy(update={"binds": binds})


def _resolve_env(spec: TaskSpec, environ: Mapping[str, str]) -> tuple[TaskSpec, dict[str, str], list[Problem]]:
    """Values that come from the orchestrator's environment put in place; secrets apart from the model."""
    env, secrets, absent = {}, {}, []
    for name, item in spec.env.items():
        found = item.value if item.from_env is None else environ.get(item.from_env)
        if found is None:
            absent.append(
                Problem(("env", name, "from_env"), f"{item.from_env} is not set: export it before this command")
            )
            continue
        if item.secret:
            secrets[name] = found
            env[name] = item
        else:
            env[name] = item.model_copy(update={"value": found})
    return spec.model_copy(update={"env": env}), secrets, absent


def _problems(spec: TaskSpec) -> list[Problem]:
    """What no single field can know."""
    found = []
    if spec.agent.kind == "function-calling":
        if spec.instruction is None:
            found.append(Problem(("instruction",), "missing: a function-calling agent needs one"))
        if spec.model is None:
            found.append(Problem(("model",), "missing: give model.name here, or --model"))
    if spec.agent.kind == "mini-swe-agent" and (spec.instruction is None or spec.model is None):
        found.append(Problem(("agent", "kind"), "mini-swe-agent needs instruction and model"))
    if spec.agent.kind == "langgraph" and spec.instruction is None:
        found.append(Problem(("instruction",), "missing: a graph is called with it"))
    if spec.agent.entry is not None and spec.agent.kind not in ("python", "langgraph"):
        found.append(Problem(("agent", "entry"), f"a {spec.agent.kind} agent has no entry"))
    if spec.model is not None:
        for key in spec.model.extra:
            if key.lower() in CREDENTIAL_PARAMETERS:
                advice = "parameters are logged: put keys into the environment of this command instead"
                found.append(Problem(("model", "extra", key), advice))
            elif key.lower() in OWN_PARAMETERS:
                found.append(Problem(("model", "extra", key), OWN_PARAMETERS[key.lower()]))
    for name, variable in spec.env.items():
        if variable.value is not None and variable.from_env is not None:
            found.append(Problem(("env", name), "give value or from_env, not both"))
    mounts: list[tuple[Loc, str]] = []
    for group in ("volumes", "binds", "tmpfs"):
        for index, mount in enumerate(getattr(spec, group)):
            loc: Loc = (group, index, "path")
            mounts.append((loc, mount.path))
            if message := destination_problem(mount.path, tmpfs=group == "tmpfs"):
                found.append(Problem(loc, message))
    found += overlap_problems(mounts)
    for index, volume in enumerate(spec.volumes):
        if volume.name is not None and volume.name.startswith("orchestrator-"):
            found.append(Problem(("volumes", index, "name"), "such names belong to volumes that runs made themselves"))
    for index, bind in enumerate(spec.binds):
        if not os.path.lexists(bind.source):
            found.append(Problem(("binds", index, "source"), f"{bind.source} does not exist on this host"))
    writable = {bind.path for bind in spec.binds if not bind.read_only}
    found += contradictions(spec.snapshots.excluded, spec.snapshots.volatile)
    files = {bind.path for bind in spec.binds if Path(bind.source).is_file()}
    for index, path in enumerate(spec.snapshots.include_binds):
        loc = ("snapshots", "include_binds", index)
        if path not in writable:
            found.append(Problem(loc, f"{path} is no destination of a writable bind"))
        elif path in files:
            found.append(Problem(loc, f"{path} is a file: bind its directory, since files are replaced, not rewritten"))
    for group in ("checklist", "daemons"):
        seen: set[str] = set()
        for index, named in enumerate(getattr(spec, group)):
            if named.name in seen:
                found.append(Problem((group, index, "name"), f"{named.name} stands twice: names must differ"))
            seen.add(named.name)
    return found


def _refusals(spec: TaskSpec, protected: tuple[Path, ...]) -> list[Problem]:
    """What only a trusted task gets."""
    found = []
    for index, name in enumerate(spec.capabilities.add):
        if name in TRUSTED_CAPABILITIES:
            found.append(Problem(("capabilities", "add", index), f"{name} reaches beyond the container"))
    for index, option in enumerate(spec.security_options):
        if option in TRUSTED_SECURITY_OPTIONS:
            found.append(Problem(("security_options", index), f"{option} switches a filter of the engine off"))
    for name in sorted(HOST_OPTIONS & spec.snapshots.options.keys()):
        found.append(Problem(("snapshots", "options", name), "it names programs that run as root on this host"))
    if spec.agent.entry is not None:
        found.append(Problem(("agent", "entry"), f"{spec.agent.entry} is code that runs on this host"))
    if spec.model is not None and spec.model.api_base and (message := api_base_problem(spec.model.api_base)):
        found.append(Problem(("model", "api_base"), message))
    for index, bind in enumerate(spec.binds):
        if message := bind_problem(Path(bind.source), protected):
            found.append(Problem(("binds", index, "source"), message))
    return found


def _raise_task_error(file: TaskFile, problems: list[Problem]) -> None:
    if problems:
        raise TaskError("\n".join(_lines(file, problems)))


def _raise_refused(file: TaskFile, problems: list[Problem]) -> None:
    if problems:
        lines = _lines(file, problems)
        raise Refused("\n".join([*lines, "refused: pass --trust-task if you vouch for this task"]))


def _lines(file: TaskFile, problems: list[Problem]) -> list[str]:
    placed = sorted((file.line(loc, key=True), index) for index, (loc, _) in enumerate(problems))
    return [f"{file.name}:{line}: {_dotted(problems[index].loc)}{problems[index].message}" for line, index in placed]


def _dotted(loc: Loc) -> str:
    return ".".join(str(part) for part in loc) + ": " if loc else ""


def _problem(details: ErrorDetails, data: object) -> Problem:
    """One of pydantic's errors, with its place in the file and in this product's words."""
    kind = details["type"]
    loc = _loc_in_data(details["loc"], data, keep_last=kind in ("missing", "extra_forbidden"))
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(str(loc[-1]), _known_keys(loc[:-1]), n=1, cutoff=0.6)
        return Problem(loc, "unknown key" + (f" (did you mean {close[0]}?)" if close else ""))
    message = _MESSAGES.get(kind, details["msg"])
    message = message.removeprefix("Value error, ").replace("Input should", "must")
    if kind == "string_type" and isinstance(details["input"], int | float):
        message += f", not the {'truth value' if isinstance(details['input'], bool) else 'number'}: put it in quotes"
    elif kind == "string_pattern_mismatch":
        pattern = details.get("ctx", {}).get("pattern", "")
        message = "is empty" if pattern == r"\S" else f"{details['input']!r} must match {pattern}"
    elif kind == "literal_error" and isinstance(details["input"], str):
        message = f"{details['input']!r} is not one of {details.get('ctx', {}).get('expected', '')}"
    return Problem(loc, message)


def _loc_in_data(loc: tuple[int | str, ...], data: object, *, keep_last: bool) -> Loc:
    """``loc`` without the parts that pydantic adds for unions and keys: only what leads through the file's values."""
    kept: list[str | int] = []
    at: Any = data
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if _has(at, part):
            at = at[part]
        elif not (last and keep_last):
            continue
        kept.append(part)
    return tuple(kept)


def _has(value: object, part: int | str) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _known_keys(loc: Loc) -> list[str]:
    """The keys that may stand in the mapping at ``loc``."""
    model: type[BaseModel] = TaskSpec
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            inner = _model_in(model.model_fields[part].annotation)
            model = inner or model
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first pydantic model in a type such as ``tuple[Annotated[Model, …], ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _model_in(inner))), None)
