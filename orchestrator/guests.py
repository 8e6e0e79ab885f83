"""Commands of the operator that run in the container beside the agent's: what changes meanwhile may be theirs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Guests:
    """Who else was in the container since the last snapshot. May be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._present = 0
        self._came = False

    @contextmanager
    def visit(self) -> Iterator[None]:
        """A command of the operator runs while the block does."""
        with self._lock:
            self._present += 1
            self._came = True
        try:
            yield
        finally:
            with self._lock:
                self._present -= 1

    def seen(self) -> bool:
        """Whether somebody was there since this was last asked. Ask it when a snapshot begins."""
        with self._lock:
            came, self._came = self._came, self._present > 0
        return came
