"""The mounts of one container, opened once for as long as its table of mounts stays as it was.

Starting the helper costs more than all else of a small capture. What it opened stays right while PID 1 is the same
process, in the same mount namespace, and that namespace's table reads the same, down to the kernel's mount ids.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from snapshot_drivers.errors import ContainerNotRunning
from snapshot_drivers.namespaces import ContainerProcess, OpenedMounts, opened_mounts


@dataclass(frozen=True)
class _Sight:
    """What has to be the same."""

    namespace: str
    root: str
    table: bytes


class KnownMounts:
    """Of one container. ``close`` it before the container is killed: it holds what lies in its memory file systems."""

    def __init__(self, container_id: str, helper: Path) -> None:
        self._container_id = container_id
        self._helper = helper
        self._stack = ExitStack()
        self._process: ContainerProcess | None = None
        self._sight: _Sight | None = None
        self._paths: tuple[str, ...] = ()
        self._opened = OpenedMounts({}, [])

    def open(self, init_pid: int, paths: Sequence[str]) -> OpenedMounts:
        """See ``namespaces.opened_mounts``; the descriptors are the caller's to close.

        Raises: ContainerNotRunning, UnsupportedHost, EngineError.
        """
        if not self._are_known(init_pid, paths):
            self._look(init_pid, paths)
        with ExitStack() as failed:
            roots = {}
            for path, descriptor in self._opened.roots.items():
                roots[path] = os.dup(descriptor)
                failed.callback(os.close, roots[path])
            failed.pop_all()
        return OpenedMounts(roots, self._opened.table)

    def close(self) -> None:
        """Nothing is held. Repeatable."""
        self._process = self._sight = None
        self._opened = OpenedMounts({}, [])
        self._stack.close()

    def _are_known(self, init_pid: int, paths: Sequence[str]) -> bool:
        if self._process is None or self._process.pid != init_pid or self._paths != tuple(paths):
            return False
        try:
            return self._sight is not None and self._sight == _sight(self._process)
        except ContainerNotRunning:
            return False

    def _look(self, init_pid: int, paths: Sequence[str]) -> None:
        self.close()
        with ExitStack() as stack:
            process = ContainerProcess(init_pid, self._container_id, stack)
            sight = _sight(process)
            opened = opened_mounts(init_pid, paths, helper=self._helper, container_id=self._container_id)
            for descriptor in opened.roots.values():
                stack.callback(os.close, descriptor)
            self._opened, self._process, self._paths = opened, process, tuple(paths)
            self._sight = sight if sight == _sight(process) else None  # else it was for this time only
            self._stack = stack.pop_all()


def _sight(process: ContainerProcess) -> _Sight | None:
    """``None``: it cannot tell. Raises: ContainerNotRunning."""
    sight = _Sight(process.link("ns/mnt"), process.link("root"), process.read("mountinfo"))
    process.check()
    return sight if sight.root == "/" else None  # below another root it does not see all mounts
