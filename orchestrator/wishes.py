"""What an operator may ask of a run that is being driven, and what is answered: the lines on its control socket.

A request is one line of ASCII JSON; the answers are lines, too: ``begun`` once it can no longer be withdrawn, then
``done`` or ``failed``. The socket lies in the run's directory and is reached through a descriptor of that directory:
the path of a unix socket may have 107 bytes (unix(7)), that of a data directory more.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from orchestrator import errors
from snapshot_drivers import errors as driver_errors

SOCKET_FILE: Final = "control.sock"
LINE_BYTES: Final = 8 * 1024 * 1024
"""A longer line is no request and no answer."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class StatusWish(_Part):
    """What is being done; answered at once."""

    kind: Literal["status"] = "status"


class StopWish(_Part):
    """End the run: what is under way is cut short. Answered when it has ended."""

    kind: Literal["stop"] = "stop"


class CheckpointWish(_Part):
    """A breakpoint, between two steps."""

    kind: Literal["checkpoint"] = "checkpoint"
    note: str | None = None


class RestoreWish(_Part):
    """Container and conversation at a breakpoint, after the tool call that is under way; the run goes on from there."""

    kind: Literal["restore"] = "restore"
    breakpoint_id: int
    verify: str = "difference"
    accept_partial: bool = False


class RewindWish(_Part):
    """Like a restore, and with a memory, as if the agent had done it."""

    kind: Literal["rewind"] = "rewind"
    breakpoint_id: int
    memory: str


class ExecWish(_Part):
    """A command in the container, beside the agent's; run at once."""

    kind: Literal["exec"] = "exec"
    command: list[str]
    timeout_s: float | None = None


class VisitWish(_Part):
    """The operator starts a shell of his own; no capture and no restore begins until he says that he has."""

    kind: Literal["visit"] = "visit"


Wish = Annotated[
    StatusWish | StopWish | CheckpointWish | RestoreWish | RewindWish | ExecWish | VisitWish,
    Field(discriminator="kind"),
]


class Request(_Part):
    """The line with which a conversation on the socket begins."""

    wish: Wish
    wait_s: float
    """How long the wish may lie before it is begun; then the answer is ``Busy``."""


class Failure(_Part):
    """An error of the trees, as the socket carries it."""

    type: str
    message: str

    def error(self) -> Exception:
        """The error itself; of a kind that is not known here, as a host's error."""
        for tree in (errors, driver_errors):
            kind = getattr(tree, self.type, None)
            if isinstance(kind, type) and issubclass(kind, errors.OrchestratorError | driver_errors.SnapshotError):
                return kind(self.message)
        return errors.HostError(f"{self.type}: {self.message}")


class Answer(_Part):
    """One line of the answer."""

    state: Literal["begun", "done", "failed"]
    result: dict[str, Any] | None = None
    error: Failure | None = None


class Status(_Part):
    """What a driven run is doing."""

    run_id: str
    pid: int
    step: int
    doing: str
    since_s: float
    """For how long."""
    waiting: int
    """Wishes that wait for the end of the step."""


class Executed(_Part):
    """What a command of the operator did (``launcher.ExecResult``); bytes that are no UTF-8 as surrogate escapes."""

    run_id: str
    exit_code: int | None
    output: str
    truncated_bytes: int
    timed_out: bool
    duration_ms: float
    left_running: bool


class Rewound(_Part):
    """What ``rewind`` answers."""

    run_id: str
    breakpoint_id: int
    memory: str
    restore_ms: float
    verified: str


class Lines:
    """A connection that carries one JSON object a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = b""

    def send(self, part: BaseModel) -> None:
        """The line is on its way. Raises: OSError."""
        # From Python values, since pydantic's own JSON refuses lone surrogates.
        text = json.dumps(part.model_dump(mode="python"), ensure_ascii=True, separators=(",", ":"))
        self.connection.sendall(text.encode("ascii") + b"\n")

    def receive(self) -> Any:
        """The next line's value; ``None`` at the end.

        Raises: ValueError: it is no JSON, or too long. TimeoutError. OSError.
        """
        while b"\n" not in self._buffer:
            data = self.connection.recv(64 * 1024)
            if not data:
                return None
            self._buffer += data
            if len(self._buffer) > LINE_BYTES:
                raise ValueError(f"a line of more than {LINE_BYTES} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


@contextmanager
def socket_address(directory: Path) -> Iterator[str]:
    """While the block runs: an address of the control socket in ``directory``, short however long its path is.

    Raises: OSError: there is no such directory.
    """
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_FILE}"
    finally:
        os.close(descriptor)
