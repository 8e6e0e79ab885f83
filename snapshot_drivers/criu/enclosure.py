"""Frozen children of a container's cgroup, in which processes stand still while CRIU works on them or beside them.

CRIU works in the container's pid namespace, where the container's root may signal it. So nothing of the container runs
from before it starts: the tree that it dumps is handed to it frozen (it seizes every process and thaws them then), what
runs beside the tree stays frozen, and a tree that it restored goes on when it is gone. The container's own cgroup is
never frozen: an engine's exec would fail.

A child is frozen first and filled then, so a process is frozen as it arrives.

Source: the kernel's ``cgroup-v1/freezer-subsystem.rst``; ``cgroup-v2.rst`` ("cgroup.freeze"); CRIU's ``seize.c``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from snapshot_drivers import cgroups
from snapshot_drivers.base import Target
from snapshot_drivers.criu.gateway import CriuError
from snapshot_drivers.criu.trees import Process
from snapshot_drivers.freezer import Freezer, freezer_hierarchy

_ROUNDS: Final = 50
_WAIT_S: Final = 1.0


class StillMoving(CriuError):
    """On a busy machine they may stand still at the next try."""


Who = Callable[[], Iterable[Process]]
"""Looks again who belongs in."""


class Enclosure:
    """One child of one container's cgroup. ``close`` it: a watchdog process belongs to it."""

    def __init__(self, target: Target, name: str) -> None:
        """Nothing is made yet. Raises: CriuError: the container has no cgroup in the freezer's tree."""
        hierarchy = freezer_hierarchy()
        container = cgroups.container_directory(hierarchy, target.freeze_group, target.container_id)
        if container is None:
            raise CriuError("the container has no cgroup in which processes could be frozen")
        self._container = container
        self.directory = container / name
        self._freezer = Freezer(str(self.directory.relative_to(hierarchy.mount_point)), hierarchy=hierarchy)

    @contextmanager
    def closed(self, who: Who, *, wait: bool = True, stay: bool = False) -> Iterator[None]:
        """Those that ``who`` names are in it, frozen; after the block they run where they were, and it is gone.

        ``wait`` until all stand still; without, one that is traced stands still when its tracer lets go of it.
        ``stay``: they stay in it as they run on, and what they start begins there (a move waits for the kernel's RCU).

        Raises: StillMoving: they cannot be frozen.
        """
        self.directory.mkdir(exist_ok=True)
        try:
            with self._freezer.frozen():
                self._fill(who)
                if wait:
                    self._wait()
                yield
        finally:
            if not stay:
                self._empty()

    def holds(self, pid: int) -> bool:
        """Whether that one is in it and stands still."""
        return pid in set(cgroups.members(self.directory)) and self._freezer.is_frozen()

    def close(self) -> None:
        """Nothing is frozen by it and its watchdog is gone. Repeatable."""
        self._freezer.close()

    def _fill(self, who: Who) -> None:
        for _ in range(_ROUNDS):  # what was forking has left a child outside
            left = {one.pid for one in who()} - set(cgroups.members(self.directory))
            if not left:
                return
            _move(left, self.directory)
        raise StillMoving("its processes multiply faster than they can be frozen")

    def _wait(self) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not self._freezer.is_frozen():
            if time.monotonic() > deadline:
                raise StillMoving(f"its processes could not be frozen within {_WAIT_S:g} s")
            time.sleep(0.0005)

    def _empty(self) -> None:
        for _ in range(_ROUNDS):
            if not (inside := set(cgroups.members(self.directory))):
                break
            _move(inside, self._container)
        with suppress(OSError):
            self.directory.rmdir()


def _move(pids: set[int], directory: Path) -> None:
    for pid in pids:
        with suppress(OSError):  # it has ended
            (directory / "cgroup.procs").write_text(str(pid), encoding="ascii")


class Enclosures:
    """The enclosures of a driver's containers, kept for the next capture."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Enclosure] = {}

    def of(self, target: Target, name: str) -> Enclosure:
        """Raises: CriuError, UnsupportedHost."""
        key = (target.container_id, name)
        if key not in self._known:
            self._known[key] = Enclosure(target, name)
        return self._known[key]

    def close(self) -> None:
        """Repeatable."""
        while self._known:
            self._known.popitem()[1].close()
