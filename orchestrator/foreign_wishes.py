"""What a task that came in an archive asks of this host, beyond what any stranger's task may have.

The file of a new task was chosen by the operator; that of an unpacked run by whoever made the archive. So even what a
new task gets without a word (a network, a directory, a variable of the environment) is shown and has to be granted.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.policy import Problem
from orchestrator.task_spec import TaskSpec

_DRIVERS = frozenset({"overlay", "criu"})
_HARMLESS_OPTIONS = frozenset({"require", "clock", "tcp", "timeout_s"})
_OWN_LOOP = frozenset({"function-calling", "manual"})


def foreign_wishes(spec: TaskSpec) -> Iterator[Problem]:
    """Each thing that has to be granted, with its place in the task."""
    for index, bind in enumerate(spec.binds):
        how = "read-only" if bind.read_only else "writable"
        yield Problem(("binds", index, "source"), f"{bind.source} of this host, {how}, at {bind.path}")
    for index, volume in enumerate(spec.volumes):
        if volume.name is not None:
            yield Problem(("volumes", index, "name"), f"the volume {volume.name} of this engine, at {volume.path}")
    for index, capability in enumerate(spec.capabilities.add):
        yield Problem(("capabilities", "add", index), capability)
    for index, option in enumerate(spec.security_options):
        yield Problem(("security_options", index), option)
    if spec.network != "none":
        yield Problem(("network",), f"the network {spec.network}")
    for index, check in enumerate(spec.checklist):
        if check.network != "none":
            yield Problem(("checklist", index, "network"), f"the network {check.network} for a check")
    for name, item in spec.env.items():
        if item.from_env is not None or item.secret:
            yield Problem(("env", name), f"the variable {item.from_env or name} of your environment")
    yield from _of_agent_and_model(spec)
    if spec.snapshots.driver not in _DRIVERS:
        yield Problem(("snapshots", "driver"), f"the driver {spec.snapshots.driver}, which is none of ours")
    for key in sorted(set(spec.snapshots.options) - _HARMLESS_OPTIONS):
        yield Problem(("snapshots", "options", key), f"{spec.snapshots.options[key]!r} for the driver")


def _of_agent_and_model(spec: TaskSpec) -> Iterator[Problem]:
    if spec.agent.kind not in _OWN_LOOP:
        program = spec.agent.entry or spec.agent.kind
        yield Problem(("agent", "kind"), f"to run {program} on this host when the run goes on")
    if spec.model is None:
        return
    if spec.model.api_base is not None:
        yield Problem(("model", "api_base"), f"the key in your environment sent to {spec.model.api_base}")
    if spec.model.name.startswith("scripted/") and ("/../" in f"{spec.model.name}/" or "//" in spec.model.name):
        yield Problem(("model", "name"), f"to read {spec.model.name.removeprefix('scripted/')} on this host")
