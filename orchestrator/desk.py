"""Where an operator's wishes lie until the driver serves them, and where it hears that it is to stop.

The driver's thread alone moves the run; the threads of the control socket hand in and wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from pydantic import BaseModel

from orchestrator.errors import ContainerLost, HostError, UsageError
from orchestrator.session import Session
from orchestrator.wishes import CheckpointWish, RestoreWish, RewindWish, Rewound
from snapshot_drivers.errors import SnapshotError

STOPPED = "stopped"
LIMIT_TIME = "limit_time"

QueuedWish = CheckpointWish | RestoreWish | RewindWish


class Ticket:
    """One wish on its way. Its fields are read and written with the desk's lock held."""

    def __init__(self, wish: QueuedWish) -> None:
        self.wish = wish
        self.begun = False
        self.result: BaseModel | None = None
        self.error: Exception | None = None

    @property
    def settled(self) -> bool:
        """There is a result, or there will be none."""
        return self.result is not None or self.error is not None


class Closed(Exception):
    """The run has ended: nobody serves wishes any more, and its lock will be free in a moment."""


class Desk:
    """The wishes of one driven run. May be used from several threads."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Told whenever something on the desk, or something that the driver waits for, has changed."""
        self.deadline: float | None = None
        """When the run's wall time is used up (monotonic)."""
        self.result: BaseModel | None = None
        """How the run ended."""
        self.closed = False
        self.doing = "starting"
        self.since = time.monotonic()
        self._tickets: deque[Ticket] = deque()
        self._stop = False

    def do(self, what: str) -> None:
        """What the driver does from now on, for those who ask."""
        self.doing, self.since = what, time.monotonic()

    def cut(self) -> str | None:
        """Why what is under way has to end now: ``stopped`` or ``limit_time``; ``None``: it has not."""
        if self._stop:
            return STOPPED
        return LIMIT_TIME if self.deadline is not None and time.monotonic() >= self.deadline else None

    @property
    def stop_wanted(self) -> bool:
        """The operator wants the run to end."""
        return self._stop

    def stop(self) -> None:
        """The run is to end. Repeatable."""
        with self.changed:
            self._stop = True
            self.changed.notify_all()

    def hand_in(self, wish: QueuedWish) -> Ticket:
        """The wish lies on the desk. Raises: Closed."""
        ticket = Ticket(wish)
        with self.changed:
            if self.closed:
                raise Closed
            self._tickets.append(ticket)
            self.changed.notify_all()
        return ticket

    def withdraw(self, ticket: Ticket) -> bool:
        """The wish will not be served; false: it has been begun or is settled."""
        with self.changed:
            if ticket.begun or ticket.settled:
                return False
            self._tickets.remove(ticket)
            return True

    def waiting(self) -> int:
        """How many wishes lie there."""
        with self.changed:
            return len(self._tickets)

    def moves(self) -> bool:
        """A wish lies there after which the run goes on from somewhere else."""
        with self.changed:
            return any(not isinstance(ticket.wish, CheckpointWish) for ticket in self._tickets)

    def wait_for(self, come: Callable[[], bool]) -> None:
        """Something has ``come``, or a wish lies there, or what is under way has to end."""
        with self.changed:
            while not (come() or self._tickets or self.cut()):
                left_s = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
                self.changed.wait(left_s)

    def tell(self) -> None:
        """Those who wait look again."""
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        """Nothing is served any more; wishes that lie there fail with `Closed`. Repeatable."""
        with self.changed:
            self.closed = True
            while self._tickets:
                self._tickets.popleft().error = Closed()
            self.changed.notify_all()

    def serve(self, session: Session) -> bool:
        """All wishes have been served, in their order; whether the run stands somewhere else now.

        Call it where no tool call is open and nobody else writes the log.

        Raises: ContainerLost: the container is in no known state.
        """
        moved = False
        while not self._stop:
            with self.changed:
                if not self._tickets:
                    break
                ticket = self._tickets.popleft()
                ticket.begun = True
                self.changed.notify_all()
            moved = self._perform(session, ticket) or moved
        return moved

    def _perform(self, session: Session, ticket: Ticket) -> bool:
        wish, moved = ticket.wish, False
        result: BaseModel | None = None
        error: Exception | None = None
        try:
            if isinstance(wish, CheckpointWish):
                result = session.checkpoint(wish.note)
            elif isinstance(wish, RestoreWish):
                result, moved = _restored(session, wish), True
            else:
                result, moved = rewind(session, wish.breakpoint_id, wish.memory), True
        except (UsageError, SnapshotError, HostError) as failure:
            error = failure
        except BaseException:
            error = HostError("the run was interrupted meanwhile: see its log")
            raise
        finally:
            with self.changed:
                ticket.result, ticket.error = result, error
                self.changed.notify_all()
        if isinstance(error, ContainerLost):
            raise error
        return moved


def _restored(session: Session, wish: RestoreWish) -> BaseModel:
    return session.restore(wish.breakpoint_id, verify=wish.verify, accept_partial=wish.accept_partial)


def rewind(session: Session, breakpoint_id: int, memory: str) -> Rewound:
    """The run stands at the breakpoint again, with the memory injected as after the agent's own rewind.

    Raises: UsageError, SnapshotError, HostError: as ``Rewinder.rewind``.
    """
    session.observer.status(f"rewinding to breakpoint {breakpoint_id}")
    event = session.rewinder.rewind(breakpoint_id, session.journal.redacted(memory))
    return Rewound(
        run_id=session.run_id,
        breakpoint_id=breakpoint_id,
        memory=event.memory,
        restore_ms=event.restore_ms,
        verified=event.verified,
    )
