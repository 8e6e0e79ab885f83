"""The workspace as a directory that is opened: the mount that holds it, then one component at a time, no link followed.

It is seen as the container sees it, through a clone of its mount, so any storage driver of a local engine will do.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions, Mount, StateKind, Target
from snapshot_drivers.errors import ContainerNotRunning, EngineError, UnsupportedHost
from snapshot_drivers.namespaces import OpenedMounts
from snapshot_drivers.overlay.paths import PathSet, covers
from snapshot_drivers.removal import remove

HELPERS_MOUNT: Final = "/.orchestrator"
OpenMounts = Callable[[Target, list[str]], OpenedMounts]
"""Opens mounts in a running container's mount namespace, by path."""
_NO_DIRECTORY: Final = (errno.ENOENT, errno.ENOTDIR)
ALWAYS_LEFT_ALONE: Final = (".git",)


@dataclass(frozen=True)
class Classes:
    """Which of three classes a path of the workspace is in: tracked, unless one of these says otherwise."""

    left_alone: frozenset[bytes]
    """Names that are neither captured nor touched, wherever they stand."""
    volatile: frozenset[bytes]
    """Names that are not captured and deleted on a restore, wherever they stand."""
    paths: PathSet
    """The same for paths below the workspace; what is mounted there is left alone, too."""


@dataclass(frozen=True)
class Workspace:
    """An opened workspace."""

    path: str
    root_fd: int | None
    """``None``: no directory stands there."""
    mount: Mount | None
    """The mount that holds it; ``None``: the root filesystem."""
    classes: Classes

    @property
    def kind(self) -> StateKind:
        """The kind of state that it is."""
        return self.mount.kind if self.mount is not None else StateKind.ROOTFS


@dataclass(frozen=True)
class Scope:
    """What of a container the driver of a run takes."""

    path: str | None
    """The workspace; ``None``: the directory in which the task's commands start."""
    left_alone: frozenset[bytes]
    volatile: frozenset[bytes]
    most_file_bytes: int
    """Larger files are not held."""

    def path_in(self, target: Target) -> str:
        """Where the workspace is in that container."""
        return posixpath.normpath(self.path or target.workdir)


def names(texts: Iterable[str]) -> frozenset[bytes]:
    """Names of entries as the file system spells them.

    Raises: UnsupportedHost: one is no name.
    """
    found = [os.fsencode(text) for text in texts]
    for name in found:
        try:
            beneath.check_name(name)
        except ValueError as error:
            raise UnsupportedHost(f"snapshots.options: {error}") from error
    return frozenset(found)


@contextmanager
def opened(
    target: Target, scope: Scope, options: CaptureOptions, open_mounts: OpenMounts, *, create: bool = False
) -> Iterator[Workspace]:
    """The workspace in the running container; ``create``: missing directories on its way are made.

    Raises: ContainerNotRunning. UnsupportedHost: it lies on a mount that is not captured. EngineError: it cannot be
        opened. OSError: it cannot be made.
    """
    if target.init_pid is None:
        raise ContainerNotRunning(f"container {target.container_id[:12]} does not run: the git driver needs it running")
    path = scope.path_in(target)
    captured = {mount.path: mount for mount in target.mounts if mount.capture}
    above = ["/", *(mount for mount in captured if covers([mount], path))]
    roots, table = open_mounts(target, above)
    with ExitStack() as stack:
        for descriptor in roots.values():
            stack.callback(os.close, descriptor)
        mounted = {line.mount_point for line in table}
        holding = max((point for point in mounted if covers([point], path)), key=len, default="/")
        if holding not in roots:
            raise UnsupportedHost(
                f"the workspace {path} lies on the mount {holding}, which is not captured: choose another one "
                "(snapshots.options.workspace), or name the mount in the task"
            )
        below = [point for point in mounted if covers([path], point) and point not in (path, holding)]
        classes = Classes(
            scope.left_alone,
            scope.volatile,
            PathSet.of([*options.excluded, HELPERS_MOUNT, *below], path, passing=options.volatile),
        )
        parts = [os.fsencode(part) for part in path[len(holding) :].split("/") if part]
        root_fd = _descend(roots[holding], parts, stack, create=create)
        yield Workspace(path, root_fd, captured.get(holding), classes)


def _descend(mount_fd: int, parts: list[bytes], stack: ExitStack, *, create: bool) -> int | None:
    """The directory below the mount; ``None``: where it should stand is none (``create``: it is made)."""
    descriptor = os.open(f"/proc/self/fd/{mount_fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    for number, part in enumerate(parts, 1):
        if create:
            _make_way(descriptor, part, is_last=number == len(parts))
        try:
            descriptor = beneath.open_directory(descriptor, part)
        except OSError as error:
            is_gone = error.errno in _NO_DIRECTORY or (error.errno == errno.ELOOP and number == len(parts))
            if is_gone and not create:
                return None
            raise EngineError(
                f"cannot open the workspace at {os.fsdecode(part)!r}: {error.strerror}: give its real path "
                "(snapshots.options.workspace)"
            ) from error
        stack.callback(os.close, descriptor)
    return descriptor


def _make_way(directory_fd: int, name: bytes, *, is_last: bool) -> None:
    """A directory can stand at ``name``; what stands there instead of the workspace itself is removed."""
    try:
        os.mkdir(name, 0o755, dir_fd=directory_fd)
    except FileExistsError:
        found = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
        if is_last and not stat.S_ISDIR(found.st_mode):
            remove(directory_fd, name)
            os.mkdir(name, 0o755, dir_fd=directory_fd)
