"""Runs commands through the launcher in a container, and tells what a command did from what the engine did.

The launcher (``images/launcher/launch.c``) answers in frames on the stdout of an exec. The container's root can forge
them, so nothing in them is trusted beyond the container itself: numbers and lengths are bounded, output is kept only up
to a limit. An answer that holds no frame comes from the engine, and never becomes a command's result.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from orchestrator.answer import BoundedOutput, FrameReader, NoFrame
from orchestrator.container_request import LAUNCH
from orchestrator.engine import Engine, Unreachable
from orchestrator.engine_stream import STDERR
from orchestrator.processes import Processes
from snapshot_drivers.errors import EngineError

KILLED: Final = 137
CANNOT_RUN: Final = 126

_TRIES: Final = 5
_START_S: Final = 30.0
_CUT_S: Final = 0.1
"""How often a running command is asked whether it has to end before its time."""
_END_S: Final = 10.0
"""How long the launcher may take to say that a killed command has ended."""

_TEXT_BYTES: Final = 4096

_ARGUMENT_BYTES: Final = 128 * 1024 - 1
"""MAX_ARG_STRLEN of the kernel, without the final NUL."""
_ARGUMENTS_BYTES: Final = 1024 * 1024

_ENGINE_CODES: Final = frozenset({126, 127, 128})
_ENGINE_TEXT: Final = re.compile(
    r"OCI runtime|is not running|cannot exec in a|unable to find user|no matching entries|container not running"
)
_NO_SERVER: Final = "launch: no server:"
Cut = Callable[[], str | None]
"""Why what is under way has to end now; ``None``: it has not."""


def never() -> None:
    """Nothing is cut short."""


class CutShort(Exception):
    """What was under way had to end before its time (``reason``, in a word): it does not count."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_LOST: Final = "the launcher was ended from inside the container, and the command with it"


@dataclass(frozen=True)
class ExecResult:
    """What one command did."""

    exit_code: int | None
    """As shells give it (128 + signal); ``None`` when the time limit came first."""
    output: bytes
    """stdout and stderr as they were written, cut in the middle where it was too long."""
    truncated_bytes: int
    """How much was cut."""
    timed_out: bool
    duration_ms: float
    left_running: bool
    """Something of its session, or something that holds its output open, goes on."""
    note: str | None = None
    """What a reader should know about an unusual end."""
    cut: str | None = None
    """Why it was ended before its time, in a word."""


class Call:
    """One command on its way."""

    def __init__(self, engine: Engine, exec_id: str, limit_bytes: int) -> None:
        """The exec is started.

        Raises: EngineError: it is not.
        """
        self.session: int | None = None
        """Session id inside the container, as the launcher says."""
        self.foreign = b""
        """Beginning of what is not the launcher's answer: its complaint, or the engine's."""
        self._exit: tuple[int, bool] | None = None
        self._ended = False
        self._engine = engine
        self._exec_id = exec_id
        self._reader = FrameReader()
        self._output = BoundedOutput(limit_bytes)
        self._started_at = time.monotonic()
        self._stream = engine.exec_start(exec_id)

    @property
    def answered(self) -> bool:
        """The launcher has answered: from here on this is a command's result."""
        return self.session is not None or self._exit is not None

    def wait_for_answer(self, timeout_s: float) -> bool:
        """The launcher has answered, or it never will; false if neither came in time."""
        deadline = time.monotonic() + timeout_s
        while not self._ended and not self.answered and time.monotonic() < deadline:
            self._read(deadline)
        return self._ended or self.answered

    def engine_exit_code(self) -> int | None:
        """What the engine says of the exec itself. Raises: EngineError."""
        return self._engine.exec_exit_code(self._exec_id)

    def finish(self, timeout_s: float, kill_session: Callable[[int], object], cut: Cut = never) -> ExecResult:
        """The command's result; after ``timeout_s``, or when ``cut`` says so, its session is killed.

        Raises: EngineError: the engine or the container went away before the command had ended.
        """
        try:
            deadline = self._started_at + timeout_s
            reason: str | None = None
            while not self._ended and reason is None and time.monotonic() < deadline:
                self._read(min(deadline, time.monotonic() + _CUT_S))
                reason = cut()
            timed_out = not self._ended
            if self._exit is None and self.session is not None:
                if not timed_out:
                    self.engine_exit_code()  # the stream of an engine that is gone ends, too
                kill_session(self.session)
                deadline = time.monotonic() + _END_S
                while not self._ended and time.monotonic() < deadline:
                    self._read(deadline)
            return self._result(timed_out, reason if timed_out else None)
        finally:
            self.close()

    def close(self) -> None:
        """Nothing more is read; the command goes on. Repeatable."""
        self._stream.close()

    def _result(self, timed_out: bool, cut: str | None) -> ExecResult:
        output, dropped_bytes = self._output.value()
        code, left_running = self._exit or (KILLED, False)
        return ExecResult(
            exit_code=None if timed_out else code,
            output=output,
            truncated_bytes=dropped_bytes,
            timed_out=timed_out and cut is None,
            duration_ms=(time.monotonic() - self._started_at) * 1000,
            left_running=left_running,
            note=None if timed_out or self._exit else _LOST,
            cut=cut,
        )

    def _read(self, deadline: float) -> None:
        pieces = self._stream.read(deadline - time.monotonic())
        if pieces is None:
            self._ended = True
        for stream, data in pieces or ():
            if stream == STDERR:
                self.foreign = (self.foreign + data)[:_TEXT_BYTES]
            elif not self._ended:
                self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            for kind, content in self._reader.feed(data):
                if kind == "o":
                    self._output.add(content)
                elif kind == "s":
                    self.session = _session_id(content)
                else:
                    self._exit = _exit_status(content)
                    self._ended = True
                    return
        except NoFrame as error:
            self.foreign = (self.foreign + error.args[0])[:_TEXT_BYTES]
            self._ended = True


class NotStarted(EngineError):
    """The engine did not start the command; it can be tried again."""


class Launcher:
    """Starts commands in one container."""

    def __init__(self, engine: Engine, container_id: str, processes: Callable[[], Processes]) -> None:
        self._engine = engine
        self._container_id = container_id
        self._processes = processes

    def start(
        self,
        argv: Sequence[str],
        *,
        user: str,
        env: Mapping[str, str],
        cwd: str,
        limit_bytes: int,
        detach: bool = False,
    ) -> Call:
        """The command has been started (or the launcher said why it cannot be). Tried again while it surely was not.

        Raises: ContainerNotRunning: stopped, paused or gone. EngineError.
        """
        options = ["-d"] if detach else []
        command = [LAUNCH, "run", *options, "-C", cwd, "--", *argv]
        tries = Retrying(
            retry=retry_if_exception_type((NotStarted, Unreachable)),
            stop=stop_after_attempt(_TRIES),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        return tries(self._try_to_start, command, user, dict(env), limit_bytes)

    def serve(self) -> None:
        """The launcher listens in the container. Repeatable.

        Raises: ContainerNotRunning. NotStarted: it could not be started.
        """
        call = Call(self._engine, self._engine.exec_create(self._container_id, [LAUNCH, "serve"], user="0", env={}), 0)
        try:
            if not call.wait_for_answer(_START_S):
                raise NotStarted(f"the launcher in {self._container_id[:12]} did not listen after {_START_S:.0f} s")
            if call.engine_exit_code() != 0:
                raise NotStarted(f"the launcher in {self._container_id[:12]} does not start: {_text(call.foreign)}")
        finally:
            call.close()

    def _try_to_start(self, command: list[str], user: str, env: dict[str, str], limit_bytes: int) -> Call:
        exec_id = self._engine.exec_create(self._container_id, command, user=user, env=env)
        try:
            call = Call(self._engine, exec_id, limit_bytes)
        except Unreachable as error:  # whether it runs is not known, so it is not tried again
            raise EngineError(f"{error} (the command may have been started)") from error
        try:
            if not call.wait_for_answer(_START_S):
                self._processes().kill_launcher()  # stopped, or not ours: the next call starts another
                call.wait_for_answer(_END_S)
                return call
            if not call.answered:
                self._raise_if_not_started(call)
        except BaseException:
            call.close()
            raise
        return call

    def _raise_if_not_started(self, call: Call) -> None:
        """Returns only if the launcher's own process was killed before it could answer."""
        text = _text(call.foreign)
        code = call.engine_exit_code()
        if text.startswith(_NO_SERVER):
            self.serve()
            raise NotStarted(f"no launcher answers in {self._container_id[:12]}: {text}")
        if _ENGINE_TEXT.search(text) or code in _ENGINE_CODES:
            raise NotStarted(f"the engine could not run a command in {self._container_id[:12]}: {text or code}")


def why_not_startable(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> str | None:
    """Why the kernel would refuse these strings: that is answered as a shell would, it is no engine error."""
    texts = [*argv, cwd, *(f"{name}={value}" for name, value in env.items())]
    try:
        encoded = [text.encode("utf-8") for text in texts]
    except UnicodeEncodeError:
        return "the command is not valid Unicode"
    if any(b"\0" in text for text in encoded):
        return "the command holds a NUL"
    if any(len(text) > _ARGUMENT_BYTES for text in encoded) or sum(map(len, encoded)) > _ARGUMENTS_BYTES:
        return "Argument list too long"
    return None


def refusal(reason: str) -> ExecResult:
    """The result of a command that cannot be started."""
    return ExecResult(CANNOT_RUN, f"launch: {reason}\n".encode(), 0, False, 0.0, False)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").strip()


def _session_id(content: bytes) -> int | None:
    """1 is PID 1's session; no command has it."""
    number = int(content) if re.fullmatch(rb"\d{1,9}", content) else 0
    return number if number > 1 else None


def _exit_status(content: bytes) -> tuple[int, bool] | None:
    match = re.fullmatch(rb"(\d{1,3})([+-])", content)
    return (int(match[1]), match[2] == b"+") if match and int(match[1]) <= 255 else None
