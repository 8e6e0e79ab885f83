"""Kills and starts a container as its lifecycle does, and says how long that took: the engine's part of a restore."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from snapshot_drivers.base import Lifecycle, Target


class TimedLifecycle:
    """See ``base.Lifecycle``."""

    def __init__(self, inner: Lifecycle) -> None:
        self._inner = inner
        self.spent_ms = 0.0

    def kill(self) -> None:
        """See ``Lifecycle``."""
        with self._timed():
            self._inner.kill()

    def start(self) -> int:
        """See ``Lifecycle``."""
        with self._timed():
            return self._inner.start()

    def replace(self, image_id: str) -> Target:
        """See ``Lifecycle``."""
        with self._timed():
            return self._inner.replace(image_id)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent_ms += 1e3 * (time.perf_counter() - began)
