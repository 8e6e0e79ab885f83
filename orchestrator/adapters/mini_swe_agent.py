"""mini-swe-agent: the run's container as its ``Environment``; the rewind tools as shell commands.

Its parser knows one tool, ``bash``, so the run's own tools are commands that ``execute`` catches. Its models go through
LiteLLM, whose hook records them.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from orchestrator.adapters import litellm
from orchestrator.recorded_call import shared_length
from orchestrator.recording.current_execution import current_execution
from orchestrator.recording.tool_hook import tool

if TYPE_CHECKING:
    from orchestrator.recording.run import RecordedRun

PACKAGE = "minisweagent"
SUBMITTED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""First line of the output of a command with which the agent ends, as in all of its environments."""

HINT = """
Before each of your answers, this conversation and the whole container (system files and packages too) are saved as a
breakpoint. If you have done damage that is harder to repair than to avoid, go back with these commands, each alone:

    backtrack_candidates
    backtrack_commit BREAKPOINT_ID 'what was tried, why it failed, and what to do instead'

You will remember nothing but that memory.
"""
"""For the end of a task's text: how the agent is told of its breakpoints."""


def install() -> None:
    """Its models are recorded where a run is. Repeatable."""
    litellm.install()


class RunEnvironment:
    """The container of a recorded run, as mini-swe-agent wants an environment."""

    def __init__(
        self, run: RecordedRun, *, timeout_s: float | None = None, interpreter: Sequence[str] = ("/bin/bash", "-lc")
    ) -> None:
        """``timeout_s``: for one command; the task's limit unless given. ``interpreter``: gets it as last argument."""
        from pydantic import create_model

        spec = run.session.spec
        self._run = run
        self._timeout_s = timeout_s or spec.limits.tool_timeout_s
        self._interpreter = list(interpreter)
        self._bash = tool(self._execute, "bash")
        self.config = create_model("RunEnvironmentConfig", cwd=(str, spec.workdir), timeout=(float, self._timeout_s))()

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """The command has run in the container, or was one of the run's own.

        Raises: minisweagent.exceptions.Submitted: the agent has ended its work. LeaveHarness.
        """
        result: dict[str, Any] = self._bash(action.get("command", ""), cwd, timeout)
        return result

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """What its prompts may name. The kernel is the host's, the name the container's."""
        system = {**platform.uname()._asdict(), "node": self._run.session.container.name}
        return {**self.config.model_dump(), **system, **kwargs}

    def serialize(self) -> dict[str, Any]:
        """For its trajectory files."""
        kind = f"{type(self).__module__}.{type(self).__qualname__}"
        return {"info": {"config": {"environment": self.config.model_dump(mode="json"), "environment_type": kind}}}

    def _execute(self, command: str, cwd: str = "", timeout: float | None = None) -> dict[str, Any]:
        own = self._own(command)
        if own is not None:
            return {"output": own, "returncode": int(own.startswith("error: ")), "exception_info": ""}
        limit_s = timeout or self._timeout_s
        there = f"cd -- {shlex.quote(cwd)} || exit\n" if cwd else ""
        done = self._run.exec([*self._interpreter, f"{there}{command}"], timeout_s=limit_s)
        output = done.output.decode("utf-8", "replace")
        if done.exit_code is None:
            why = f"the command ran longer than {limit_s:g} s and was killed" if done.timed_out else str(done.cut)
            return {"output": output, "returncode": -1, "exception_info": why}
        first, _, rest = output.lstrip().partition("\n")
        if first.strip() == SUBMITTED and done.exit_code == 0:
            _submitted(rest)
        return {"output": output, "returncode": done.exit_code, "exception_info": ""}

    def _own(self, command: str) -> str | None:
        """What one of the run's own commands answers; ``None``: it is none."""
        try:
            words = shlex.split(command)
        except ValueError:
            return None
        if words == ["backtrack_candidates"]:
            return self._run.backtrack_candidates()
        if words == ["submit"]:
            return self._run.submit()
        if words[:1] != ["backtrack_commit"]:
            return None
        parser = _Parser(add_help=False)
        parser.add_argument("breakpoint_id", type=int)
        parser.add_argument("memory", nargs="+")
        try:
            given = parser.parse_args(words[1:])
        except ValueError as error:
            return f"error: {error}; write: backtrack_commit BREAKPOINT_ID 'memory'"
        return self._run.backtrack_commit(given.breakpoint_id, " ".join(given.memory))


def restorable(agent: Any) -> Any:
    """``agent``, which goes on after a rewind from what it knew at the breakpoint, without repeating its steps.

    For the first ``run`` of the first agent of a pass. What it knows are its attributes, its ``messages`` among them;
    where these are no plain values it repeats itself. Its model, environment and configuration are made anew: those of
    mini-swe-agent remember nothing.
    """
    steps = _Steps(agent)
    agent.run, agent.step = steps.run, steps.step
    return agent


_NOT_KNOWLEDGE = frozenset({"model", "env", "config", "logger", "run", "step", "_start_time"})


@dataclass(frozen=True)
class _Known:
    """The attributes of an agent at the beginning of a step."""

    attributes: dict[str, Any]


class _Steps:
    """The steps of one agent, as a ``Stateful``: what it knows at the beginning of each puts it back there."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._run, self._step = agent.run, agent.step
        self._runs = 0
        self._made = 0
        self._watched = False
        self._messages: list[Any] = []
        self._known: _Known | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._runs += 1
        return self._run(*args, **kwargs)

    def step(self) -> Any:
        if not self._made:
            self._begin()
        self._made += 1
        self._known = self._copied() if self._watched and self._runs == 1 else None
        return self._step()

    def mark(self) -> int | None:
        return self._made if self._runs == 1 else None

    def state(self) -> _Known | None:
        return self._known

    def _begin(self) -> None:
        """The loop goes on from the state that was kept, its first messages being made already."""
        execution = current_execution()
        if execution is None:
            return
        kept = execution.kept_state()
        known = kept if isinstance(kept, _Known) else None
        self._watched = execution.keep_states(self, put_back=known is not None)
        if self._watched and known is not None:
            vars(self._agent).update(copy.deepcopy(known.attributes))

    def _copied(self) -> _Known | None:
        """Messages that the last step had too are shared with its copy. ``None``: it knows more than plain values."""
        known = {name: value for name, value in vars(self._agent).items() if name not in _NOT_KNOWLEDGE}
        messages = known.pop("messages")
        same = shared_length(self._messages, messages)
        if not _is_plain(known) or not _is_plain(messages[same:]):
            return None
        self._messages = [*self._messages[:same], *copy.deepcopy(messages[same:])]
        return _Known({**copy.deepcopy(known), "messages": self._messages})


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def drive(run: RecordedRun) -> Any:
    """Its default agent has done the task's instruction, with the task's model and its own templates."""
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")  # it greets on standard output when it is imported
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import builtin_config_dir
    from minisweagent.models.litellm_model import LitellmModel

    install()
    import litellm as library

    library.suppress_debug_info = True  # it prints what it does not know about a model
    spec = run.session.spec
    asked = spec.model
    assert asked is not None  # the task was checked
    config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text(encoding="utf-8"))
    options = {**asked.extra, "temperature": asked.temperature, "api_base": asked.api_base}
    options = {name: value for name, value in options.items() if value is not None}
    templates = ("system_template", "instance_template")

    def harness() -> dict[str, Any]:
        model = LitellmModel(
            model_name=asked.name,
            model_kwargs={"timeout": asked.timeout_s, "drop_params": True, **options},
            cost_tracking="ignore_errors",
            **{name: value for name, value in config["model"].items() if name.endswith("_template")},
        )
        agent = restorable(
            DefaultAgent(
                model,
                RunEnvironment(run),
                **{name: config["agent"][name] for name in templates},
                step_limit=0,
                cost_limit=0.0,
            )
        )
        result: dict[str, Any] = agent.run(run.instruction + (HINT if spec.strategy == "rewind" else ""))
        return result

    return run.drive(harness)


def _submitted(submission: str) -> NoReturn:
    from minisweagent.exceptions import Submitted

    extra = {"exit_status": "Submitted", "submission": submission}
    raise Submitted({"role": "exit", "content": submission, "extra": extra})
