"""Where the kernel keeps the cgroups of a run: version 1, version 2, or both side by side; cgroupfs names or slices.

A *group* is the parent cgroup as it is given to the engine: ``/orchestrator/<run id>`` (cgroupfs driver) or
``orchestrator-<run id>.slice`` (systemd driver). The containers of the run are its children.

Source: cgroups(7), the kernel's ``cgroup-v1/freezer-subsystem.rst`` and ``cgroup-v2.rst``, systemd.slice(5).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snapshot_drivers.mountinfo import MountLine, own_mounts

_V2: Final = "cgroup2"
_V1: Final = "cgroup"
_SLICE: Final = ".slice"
_MOVE_AGAIN_S: Final = 0.004
"""Well within the time for which the kernel remembers a move."""


@dataclass(frozen=True)
class Hierarchy:
    """One mounted cgroup tree."""

    version: int
    mount_point: Path
    controllers: frozenset[str]
    """Of version 1; version 2 has one tree for all."""

    def directory(self, group: str) -> Path:
        """Where ``group`` stands in this tree, whether it exists or not."""
        return self.mount_point / group_path(group)


def hierarchies() -> list[Hierarchy]:
    """Every cgroup tree that this process sees, in mount order."""
    return [_hierarchy(line) for line in own_mounts() if line.fs_type in (_V1, _V2)]


def _hierarchy(line: MountLine) -> Hierarchy:
    if line.fs_type == _V2:
        return Hierarchy(2, Path(line.mount_point), frozenset())
    return Hierarchy(1, Path(line.mount_point), frozenset(line.super_options.split(",")) - {"rw", "ro"})


def group_path(group: str) -> str:
    """Relative path of a group: slices nest at their dashes (``a-b.slice`` lies in ``a.slice``).

    Raises: ValueError: empty, or with a component that leads elsewhere.
    """
    parts = [part for part in group.split("/") if part]
    if not parts or any(part in (".", "..") for part in parts):
        raise ValueError(f"not a cgroup's name: {group!r}")
    if not (len(parts) == 1 and parts[0].endswith(_SLICE)):
        return "/".join(parts)
    words = parts[0].removesuffix(_SLICE).split("-")
    if not all(words):
        raise ValueError(f"not a slice's name: {group!r}")
    return "/".join("-".join(words[: count + 1]) + _SLICE for count in range(len(words)))


@contextmanager
def quick_moves(tree: Hierarchy) -> Iterator[None]:
    """Moving another process to another cgroup waits for no grace period of RCU (some 10 ms) while the block runs.

    The kernel waits once for moves that follow closely. So a thread moves this process to where it is, over and over.
    ``tree``: any in which it may. Source: the kernel's ``rcu/sync.c``; ``cgroup_threadgroup_rwsem``.
    """
    done = threading.Event()
    keeper = threading.Thread(target=_stay, args=(tree, done), name="quick-moves")
    keeper.start()
    try:
        yield
    finally:
        done.set()
        keeper.join()


def _stay(tree: Hierarchy, done: threading.Event) -> None:
    with suppress(OSError):  # then moves are as slow as they are
        procs = os.open(_own_directory(tree) / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            while not done.is_set():
                os.write(procs, b"0")
                done.wait(_MOVE_AGAIN_S)
        finally:
            os.close(procs)


def _own_directory(tree: Hierarchy) -> Path:
    """The cgroup of this process. Raises: FileNotFoundError: it has none there that is seen here."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers if tree.version == 2 else tree.controllers.intersection(controllers.split(",")):
            return tree.mount_point / group.lstrip("/")
    raise FileNotFoundError(tree.mount_point)


def container_directory(hierarchy: Hierarchy, group: str, container_id: str) -> Path | None:
    """Directory of one container's cgroup in ``hierarchy``, named by the engine's id; ``None``: it has none there."""
    parent = hierarchy.directory(group)
    for name in (container_id, f"docker-{container_id}.scope"):
        if (parent / name / "cgroup.procs").exists():
            return parent / name
    return None


def members(directory: Path) -> Iterator[int]:
    """Host pids in a cgroup and in all below it; a cgroup that goes away meanwhile has none."""
    for where, _, _ in os.walk(directory):
        text = ""
        with suppress(FileNotFoundError, OSError):  # ENODEV: removed between open and read
            text = Path(f"{where}/cgroup.procs").read_text(encoding="ascii")
        yield from (int(line) for line in text.split() if line != "0")
