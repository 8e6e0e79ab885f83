"""What a scripted model does in the tests of recorded agents: it breaks the system, goes back, and does it right."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e import provider_replies as wire
from tests.e2e.provider_server import ProviderServer, Reply

BREAK = "rm -rf /usr/lib/python3 /etc/os-release; echo broken"
REPAIRED = (
    "cat /etc/os-release > /dev/null && ls -d /usr/lib/python3 && echo two >> /srv/work/notes && cat /srv/work/notes"
)
MEMORY = "Removing files under /usr and /etc breaks the system."
TASK: dict[str, Any] = {
    "name": "recorded",
    "workdir": "/srv/work",
    "instruction": "Write two lines into notes.",
    "checklist": [
        {"name": "system", "probe": "test -d /target/usr/lib/python3", "feedback": "Python is gone."},
        {"name": "notes", "probe": "grep -q two /target/srv/work/notes", "feedback": "notes has no second line."},
    ],
}


def calls(stream: bool, *wanted: tuple[str, dict[str, Any]], at: int) -> Reply:
    """An answer that calls tools, plain or streamed."""
    made = [wire.call(f"call_{at}_{n}", json.dumps(given), name) for n, (name, given) in enumerate(wanted)]
    if not stream:
        return wire.openai({"tool_calls": made}, "tool_calls")
    deltas = [{"role": "assistant", "content": None}]
    deltas += [{"tool_calls": [{**one, "index": n}]} for n, one in enumerate(made)]
    return wire.openai_stream(deltas, "tool_calls", wire.OPENAI_USAGE)


def text(stream: bool, said: str) -> Reply:
    """An answer in words."""
    if not stream:
        return wire.openai({"content": said})
    halves = [{"role": "assistant", "content": ""}, *({"content": half} for half in wire.halves(said))]
    return wire.openai_stream(halves, usage=wire.OPENAI_USAGE)


def damaging_model(*, stream: bool = False, back: tuple[str, dict[str, Any]] | None = None) -> ProviderServer:
    """Five answers: a line, the damage, the way back to breakpoint 1, the other line, the end.

    ``back``: how this agent's rewind tool is called.
    """
    rewind = back or ("backtrack_commit", {"breakpoint_id": 1, "memory_summary": MEMORY})
    return ProviderServer(
        calls(stream, ("bash", {"command": "echo one > /srv/work/notes"}), at=1),
        calls(stream, ("bash", {"command": BREAK}), at=2),
        calls(stream, rewind, at=3),
        calls(stream, ("bash", {"command": REPAIRED}), at=4),
        text(stream, "Done."),
    )
