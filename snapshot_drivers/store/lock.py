"""Who may do what to a store at the same time: captures beside one another, the removal of content alone.

A capture that finds content in the store does not store it again, and names it in its manifest a moment later. In
between, nothing may be removed: so a capture holds the lock *shared* from its first look until its manifest is in
place, and ``collect`` and ``fsck`` hold it *exclusively* for the moment in which they remove. Whoever has it
exclusively knows that no file is being written: temporary ones belong to the dead.

The lock is an ``flock``: the kernel gives it back when its holder dies. The file holds the *epoch*, a random word that
changes before anything is removed; what somebody knows of the store's content is true in one epoch.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOCK: Final = "lock"
GATE: Final = "gate"
"""Passed on the way to the lock. Who waits for the lock alone holds it, so that new captures queue behind."""
PATIENCE_S: Final = 5.0
"""For how long at most; then they may pass, and it waits again."""
_PAUSE_S: Final = 1.0
_LOOK_AGAIN_S: Final = 0.005
TURN: Final = "turn"
"""Held by whoever goes through the whole store."""
_EPOCH_BYTES: Final = 16


class StoreLock:
    """The lock of one store. May be taken again by the thread that has it."""

    def __init__(self, root: Path) -> None:
        """``root`` is the store directory."""
        self._root = root.resolve()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Nothing is removed while the block runs; waits for a removal that has begun.

        Raises: OSError: the lock's file cannot be opened.
        """
        with self._held(fcntl.LOCK_SH):
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Nobody stores, and nobody but us removes, while the block runs; waits for those who do.

        Raises: OSError.
        """
        with self._held(fcntl.LOCK_EX):
            yield

    @contextmanager
    def turn(self) -> Iterator[None]:
        """No other collection or check of the store runs while the block does; waits for one. Captures run on.

        Raises: OSError.
        """
        descriptor = self._open(TURN)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def epoch(self) -> str:
        """The store's present epoch."""
        try:
            return (self._root / LOCK).read_text("ascii", errors="replace")
        except FileNotFoundError:
            return ""

    def begin_epoch(self) -> str:
        """A new epoch, on the disk. Call it with the lock held exclusively, before anything is removed.

        Raises: OSError.
        """
        word = secrets.token_hex(_EPOCH_BYTES)
        descriptor = os.open(self._root / LOCK, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # In place: who waits for the lock holds this very file open. A torn word is a new one, too.
            os.pwrite(descriptor, word.encode("ascii"), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return word

    @contextmanager
    def _held(self, mode: int) -> Iterator[None]:
        mine: dict[Path, int] = _held.__dict__.setdefault("modes", {})
        if self._root in mine:
            # At the gate it would wait for one who waits for us.
            if mode == fcntl.LOCK_EX and mine[self._root] != mode:
                raise RuntimeError("a thread that stores cannot remove at the same time")
            yield
            return
        lock = self._locked(mode)
        mine[self._root] = mode
        try:
            yield
        finally:
            del mine[self._root]
            os.close(lock)

    def _locked(self, mode: int) -> int:
        """The descriptor of the lock. Who wants it alone closes the gate for a while only: others may be long."""
        lock = self._open(LOCK)
        try:
            while True:
                gate = self._open(GATE)
                try:
                    fcntl.flock(gate, mode)
                    if mode == fcntl.LOCK_SH:
                        fcntl.flock(lock, mode)
                        return lock
                    until = time.monotonic() + PATIENCE_S
                    while time.monotonic() < until:
                        try:
                            fcntl.flock(lock, mode | fcntl.LOCK_NB)
                            return lock
                        except BlockingIOError:
                            time.sleep(_LOOK_AGAIN_S)
                finally:
                    os.close(gate)
                time.sleep(_PAUSE_S)
        except BaseException:
            os.close(lock)
            raise

    def _open(self, name: str) -> int:
        return os.open(self._root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


_held = threading.local()
"""For each thread, the stores that it has locked."""
