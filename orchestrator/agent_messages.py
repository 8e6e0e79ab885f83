"""The texts that open a conversation and keep it going."""

from __future__ import annotations

from orchestrator.events import Message
from orchestrator.task import TaskSpec

_SYSTEM = """\
You work on a task in a Linux container, through tools. Commands run as {user} in {workdir}; files and programs stay \
as you leave them from one call to the next, a shell's variables and directory do not.

- Run commands with bash. Nobody else answers questions: decide yourself.
- When the work is done, call submit. It is checked then, and you are told the first thing that is missing, if any."""

_REWIND = """
- Before each of your answers, the conversation and the whole container (system files and packages too, not only \
{workdir}) are saved as a breakpoint. If you have done damage that is harder to repair than to avoid, list the \
breakpoints with backtrack_candidates and go back with backtrack_commit, with a memory of what you have learned: you \
will remember nothing else. Where a plain repair is easy, repair."""

NUDGE = "Your answer called no tool. Go on with a tool call, or call submit if the work is done."
CUT_NUDGE = "Your answer was cut off at its token limit and called no tool. Be shorter, and call a tool."
REFUSED_NUDGE = """\
You refused. If there is a way to do the task, or a part of it, that you can agree to, go on that way with a tool \
call; call submit when nothing more can be done."""
FILTERED_NUDGE = """\
Your answer was stopped by the provider's content filter. Go on with a tool call, in other words or another way; call \
submit when nothing more can be done."""
EMPTY_ANSWER = "(empty answer)"
"""Stands for an answer without text and calls: providers refuse an empty message when it is sent back to them."""


def first_messages(spec: TaskSpec) -> list[Message]:
    """The system prompt and the task, as they stand in front of every request of the run."""
    template = _SYSTEM + (_REWIND if spec.strategy == "rewind" else "")
    system = spec.agent.system or template.format(user=spec.user, workdir=spec.workdir)
    return [{"role": "system", "content": system}, {"role": "user", "content": spec.instruction or ""}]


def nudge(finish_reason: str | None, message: Message) -> Message:
    """What follows an assistant's ``message`` that called no tool."""
    if message.get("refusal"):
        return {"role": "user", "content": REFUSED_NUDGE}
    nudges = {"length": CUT_NUDGE, "content_filter": FILTERED_NUDGE}
    return {"role": "user", "content": nudges.get(finish_reason or "", NUDGE)}


def tool_message(call_id: str, content: str) -> Message:
    """The answer to one tool call."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}
