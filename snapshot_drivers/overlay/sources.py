"""The trees that make up a container's files, each as a descriptor of its root, and the word for those left out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from snapshot_drivers import beneath
from snapshot_drivers.base import CoverageItem, CoverageState, Mount, StateKind, Target
from snapshot_drivers.errors import EngineError
from snapshot_drivers.mountinfo import MountLine
from snapshot_drivers.namespaces import OpenedMounts
from snapshot_drivers.overlay.layers import Layers
from snapshot_drivers.overlay.paths import covers

_KERNELS: Final = ("/proc", "/sys", "/dev/pts", "/dev/console")
"""What stands there is made by the runtime and holds no state."""
OpenMounts = Callable[[Target, list[str]], OpenedMounts]
"""Opens mounts in a running container's mount namespace, by path."""


@dataclass(frozen=True)
class Source:
    """One tree: where it stands in the container, and its root on the host."""

    kind: StateKind
    path: str
    name: str | None
    root_fd: int
    host_path: Path | None
    """``None``: a tmpfs, reachable only through the container's mount namespace."""
    is_shared: bool = False
    """Others than the run's own processes may write to it."""

    @property
    def is_ours(self) -> bool:
        """True where nobody but the run's own processes writes, which are all known."""
        return self.kind is StateKind.ROOTFS or (self.kind is StateKind.VOLUME and not self.is_shared)

    @property
    def staged_inside(self) -> bool:
        """True where the directory beside the root is not ours to write in."""
        return self.kind in (StateKind.TMPFS, StateKind.BIND)

    def staging_place(self, engine_root: Path) -> int:
        """Descriptor of the directory in which the staging directory is made; the caller's to close."""
        if self.staged_inside or self.host_path is None:
            return os.dup(self.root_fd)
        return beneath.open_below(engine_root, self.host_path.parent)


@dataclass
class Sources:
    """All trees that can be captured now, and the coverage of those that cannot."""

    trees: list[Source] = field(default_factory=list)
    left_out: list[CoverageItem] = field(default_factory=list)

    @property
    def are_shared(self) -> bool:
        """Others than the run's own processes may hold their files."""
        return any(tree.is_shared or tree.kind is StateKind.BIND for tree in self.trees)


def without(target: Target, excluded: Iterable[str]) -> Target:
    """The same container, with the mounts on and below excluded paths left as they are."""
    paths = tuple(excluded)
    mounts = tuple(
        replace(mount, capture=False, reason="excluded by the task: left as it is")
        if mount.capture and covers(paths, mount.path)
        else mount
        for mount in target.mounts
    )
    return replace(target, mounts=mounts)


@contextmanager
def open_sources(
    target: Target, layers: Layers, open_mounts: OpenMounts, *, disk: bool = True, memory: bool = True
) -> Iterator[Sources]:
    """The container's trees: those on the disk (root filesystem, volumes, binds) and those in memory (tmpfs).

    Raises: EngineError: the root filesystem cannot be opened.
    """
    found = Sources()
    try:
        if disk:
            _open_disk(found, target, layers)
        if memory:
            _open_memory(found, target, open_mounts)
        for mount in target.mounts:
            if not mount.capture:
                reason = mount.reason or "not captured"
                found.left_out.append(_item(mount, CoverageState.EXCLUDED, reason))
            elif names := ", ".join(sharer.name for sharer in mount.shared_with if sharer.running):
                reason = f"{names} may write to it meanwhile, so its files may be of different moments"
                found.left_out.append(_item(mount, CoverageState.UNKNOWN, reason))
        yield found
    finally:
        for tree in found.trees:
            os.close(tree.root_fd)


def _open_disk(found: Sources, target: Target, layers: Layers) -> None:
    try:
        root_fd = beneath.open_below(target.engine_root, layers.upper)
    except OSError as error:
        raise EngineError(f"cannot open the upper directory {layers.upper}: {error.strerror}") from error
    found.trees.append(Source(StateKind.ROOTFS, "/", None, root_fd, layers.upper))
    for mount in target.mounts:
        if mount.source is None or not mount.capture:
            continue
        top = target.engine_root if mount.kind is StateKind.VOLUME else Path("/")
        try:
            root_fd = beneath.open_below(top, mount.source)
        except OSError as error:
            reason = f"{mount.source} cannot be opened: {error.strerror}"
            found.left_out.append(_item(mount, CoverageState.MISSING, reason))
            continue
        is_shared = bool(mount.shared_with)
        found.trees.append(Source(mount.kind, mount.path, mount.name, root_fd, mount.source, is_shared))


def _open_memory(found: Sources, target: Target, open_mounts: OpenMounts) -> None:
    wanted = [mount for mount in target.mounts if mount.kind is StateKind.TMPFS and mount.capture]
    if not wanted:
        return
    if target.init_pid is None:
        for mount in wanted:
            found.left_out.append(_item(mount, CoverageState.MISSING, "the container does not run"))
        return
    opened, table = open_mounts(target, [mount.path for mount in wanted])
    found.left_out += _own_mounts(target, table)
    try:
        for mount in wanted:
            if mount.path in opened:
                looked = opened[mount.path]
                root_fd = os.open(f"/proc/self/fd/{looked}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                found.trees.append(Source(StateKind.TMPFS, mount.path, None, root_fd, None))
            else:
                reason = "no mount of the engine's stands there any more"
                found.left_out.append(_item(mount, CoverageState.MISSING, reason))
    finally:
        for looked in opened.values():
            os.close(looked)


def _own_mounts(target: Target, table: Iterable[MountLine]) -> Iterator[CoverageItem]:
    """What is mounted in the container and not by the engine, which takes the right to mount."""
    known = Counter([*(mount.path for mount in target.mounts), *(path for path, _ in target.etc_files), "/"])
    for line in table:
        known[line.mount_point] -= 1
        is_writable = "ro" not in line.options.split(",")
        if known[line.mount_point] < 0 and is_writable and not covers(_KERNELS, line.mount_point):
            kind = StateKind.TMPFS if line.fs_type == "tmpfs" else StateKind.BIND
            reason = f"the engine did not mount this {line.fs_type}: it is gone after a restore"
            path = line.mount_point.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            yield CoverageItem(kind=kind, path=path, state=CoverageState.EXCLUDED, reason=reason)


def _item(mount: Mount, state: CoverageState, reason: str) -> CoverageItem:
    return CoverageItem(kind=mount.kind, path=mount.path, state=state, reason=reason)
