"""The control socket of a driven run: how a second process reaches the one that holds the lock.

Served by the driver between two steps, or while the model is thinking: checkpoint, restore, rewind. At once: status,
stop, exec, and a visitor who starts a shell. A socket file that a dead owner left is harmless: the lock says who lives.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from orchestrator.desk import STOPPED, Closed, Desk
from orchestrator.errors import Busy, HostError, OrchestratorError, UsageError
from orchestrator.launcher import ExecResult
from orchestrator.session import Session
from orchestrator.wishes import (
    SOCKET_FILE,
    Answer,
    Executed,
    ExecWish,
    Failure,
    Lines,
    Request,
    Status,
    StatusWish,
    StopWish,
    VisitWish,
    Wish,
    socket_address,
)
from snapshot_drivers.errors import SnapshotError

_REQUEST_S: Final = 10.0
"""How long a client may take to say what it wants, and a visitor to say that he is in."""
_LOOK_S: Final = 0.2
_GOODBYE_S: Final = 2.0
"""How long the last answers may take when the run has ended."""
_SPARE_S: Final = 2.0
"""How much later than the driver a client gives up."""
_PEER: Final = struct.Struct("3i")


@contextmanager
def listening(session: Session) -> Iterator[Desk]:
    """While the block runs, operators reach the run; what they want lies on the desk.

    Raises: HostError: the socket cannot be made.
    """
    directory = session.log.path.parent
    desk = Desk()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            # We hold the run's lock, so whatever stands there is a dead owner's.
            (directory / SOCKET_FILE).unlink(missing_ok=True)
            with socket_address(directory) as address:
                listener.bind(address)
                Path(address).chmod(0o600)
            listener.listen()
        except OSError as error:
            raise HostError(f"{directory / SOCKET_FILE}: cannot listen there: {error.strerror}") from error
        server = _Server(session, desk)
        accepting = threading.Thread(target=server.accept, args=(listener,), name="control", daemon=True)
        accepting.start()
        try:
            yield desk
        finally:
            desk.close()
            (directory / SOCKET_FILE).unlink(missing_ok=True)
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            accepting.join(_GOODBYE_S)
            server.say_goodbye(_GOODBYE_S)


class _Server:
    """The driver's end: a thread for each connection."""

    def __init__(self, session: Session, desk: Desk) -> None:
        self._session = session
        self._desk = desk
        self._threads: list[threading.Thread] = []

    def accept(self, listener: socket.socket) -> None:
        """Until the listener is shut down."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._converse, args=(connection,), name="operator", daemon=True)
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
            thread.start()

    def say_goodbye(self, timeout_s: float) -> None:
        """Those who wait have got their last answer, as far as they take it."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _converse(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            lines = Lines(connection)
            connection.settimeout(_REQUEST_S)
            _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid not in (0, os.geteuid()):
                return
            try:
                result = self._answer(Request.model_validate(lines.receive()), lines)
            except Closed:
                return  # the client finds the lock free in a moment
            except ValueError as error:
                lines.send(_failed(UsageError(f"the run's driver does not understand this request: {error}")))
            except (OrchestratorError, SnapshotError) as error:
                lines.send(_failed(error))
            else:
                lines.send(Answer(state="done", result=result.model_dump(mode="python")))

    def _answer(self, request: Request, lines: Lines) -> BaseModel:
        wish = request.wish
        if isinstance(wish, StatusWish):
            return self._status()
        if isinstance(wish, StopWish):
            return self._stopped(request.wait_s)
        if self._desk.closed:
            raise Closed
        if isinstance(wish, ExecWish):
            lines.send(Answer(state="begun"))
            return self._executed(wish, lines.connection)
        if isinstance(wish, VisitWish):
            return self._visited(lines)
        ticket = self._desk.hand_in(wish)
        deadline = time.monotonic() + request.wait_s
        with self._desk.changed:
            while not (ticket.begun or ticket.settled):
                left_s = deadline - time.monotonic()
                if left_s <= 0 or _has_hung_up(lines.connection):
                    break
                self._desk.changed.wait(min(left_s, _LOOK_S))
            if self._desk.withdraw(ticket):
                raise Busy(self._busy())
        lines.send(Answer(state="begun"))
        with self._desk.changed:
            self._desk.changed.wait_for(lambda: ticket.settled or self._desk.closed)
        if ticket.result is None:
            raise ticket.error or Closed
        return ticket.result

    def _status(self) -> Status:
        return Status(
            run_id=self._session.run_id,
            pid=os.getpid(),
            step=self._session.journal.totals().steps,
            doing=self._desk.doing,
            since_s=round(time.monotonic() - self._desk.since, 3),
            waiting=self._desk.waiting(),
        )

    def _stopped(self, wait_s: float) -> BaseModel:
        self._desk.stop()
        with self._desk.changed:
            self._desk.changed.wait_for(lambda: self._desk.closed, wait_s)
        if not self._desk.closed:
            raise Busy(f"run {self._session.run_id} is stopping, but has not ended yet ({self._desk.doing})")
        if self._desk.result is None:
            raise Closed
        return self._desk.result

    def _executed(self, wish: ExecWish, connection: socket.socket) -> Executed:
        def cut() -> str | None:
            return self._desk.cut() or (STOPPED if self._desk.closed or _has_hung_up(connection) else None)

        done = self._session.exec_as_guest(wish.command, timeout_s=wish.timeout_s, cut=cut)
        # The container's own end may be quicker than the look that cuts the command.
        killed_with_it = done.exit_code == 128 + signal.SIGKILL and (self._desk.closed or self._desk.cut() is not None)
        if done.cut is not None or killed_with_it:
            raise HostError("the run ended meanwhile, and the command was ended with it")
        return executed(self._session.run_id, done)

    def _visited(self, lines: Lines) -> Status:
        """The visitor has started his shell, or taken too long."""
        with self._session.guests.visit(), self._session.container.exec_lock:
            lines.send(Answer(state="begun"))
            lines.receive()
        return self._status()

    def _busy(self) -> str:
        run_id, desk = self._session.run_id, self._desk
        return (
            f"run {run_id} is driven by process {os.getpid()}, in the middle of a step ({desk.doing}): wait longer "
            f"(--wait SECONDS), or end it: orchestrator stop {run_id}"
        )


def executed(run_id: str, done: ExecResult) -> Executed:
    """The result of an operator's command as it is answered."""
    return Executed(
        run_id=run_id,
        exit_code=done.exit_code,
        output=done.output.decode("utf-8", "surrogateescape"),
        truncated_bytes=done.truncated_bytes,
        timed_out=done.timed_out,
        duration_ms=done.duration_ms,
        left_running=done.left_running,
    )


class Unattended(Exception):
    """Nobody listens for wishes of that run: it is not driven, or not yet, or its driver has just ended."""


def ask(directory: Path, wish: Wish, *, wait_s: float, when_begun: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """What the run's driver answers; ``when_begun`` is called before a visitor says that he is in.

    Raises: Unattended: nothing was done. Busy: not begun within ``wait_s``. HostError: the driver died while it was
        doing it. Otherwise as what is asked for.
    """
    begun = False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        lines = Lines(connection)
        try:
            connection.settimeout(wait_s + _SPARE_S)
            with socket_address(directory) as address:
                connection.connect(address)
            lines.send(Request(wish=wish, wait_s=wait_s))
            while True:
                raw = lines.receive()
                if raw is None:
                    break
                answer = Answer.model_validate(raw)
                if answer.state == "begun":
                    begun = True
                    connection.settimeout(None)
                    if isinstance(wish, VisitWish):
                        when_begun()
                        lines.send(answer)
                elif answer.error is not None:
                    raise answer.error.error()
                else:
                    return answer.result or {}
        except TimeoutError:
            raise Busy(f"the process that drives run {directory.name} does not answer: is it suspended?") from None
        except ValueError as error:
            raise HostError(f"run {directory.name}: its driver's answer cannot be understood: {error}") from error
        except OSError as error:
            if not begun:
                raise Unattended from error
    if begun:
        raise HostError(
            f"the process that drove run {directory.name} ended while it was doing this: see: orchestrator log "
            f"{directory.name}"
        )
    raise Unattended


def _failed(error: Exception) -> Answer:
    return Answer(state="failed", error=Failure(type=type(error).__name__, message=str(error)))


def _has_hung_up(connection: socket.socket) -> bool:
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    return bool(poller.poll(0))
