"""Carry out a plan in a workspace in which nothing runs: every step goes one component down, no link is followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from snapshot_drivers import beneath
from snapshot_drivers.git.plan import Plan
from snapshot_drivers.git.trees import EXECUTABLE, LINK, Tracked
from snapshot_drivers.git.workspace import Classes
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.removal import release, remove

_DIRECTORY_MODE: Final = 0o755
_FILE_MODE: Final = 0o644
_EXECUTE: Final = 0o111
Content = Callable[[Tracked], bytes]
"""Reads an entry's blob, checked."""


def apply_plan(root_fd: int, plan: Plan, untracked: frozenset[bytes], content: Content) -> None:
    """The workspace at ``root_fd`` is as planned.

    Raises: OSError. StoreDamaged: from ``content``; part of the plan is done then.
    """
    place = _Place(root_fd)
    try:
        for path in plan.remove:
            _remove(place, path, untracked)
        for path in sorted(plan.write):
            above, _, name = path.rpartition(b"/")
            place.go(above, create=True)
            _write(place.fd, name, plan.write[path], content(plan.write[path]))
        for path, entry in sorted(plan.adjust.items()):
            above, _, name = path.rpartition(b"/")
            place.go(above)
            _set_execute(place.fd, name, is_set=entry.mode == EXECUTABLE)
    finally:
        place.close()


def remove_volatile(root_fd: int, classes: Classes) -> int:
    """What is deleted on each restore is gone; answers how many entries that were.

    Raises: OSError.
    """
    removed = 0
    place = beneath.Descent(root_fd)
    trail: list[tuple[PathSet, list[bytes]]] = []
    paths: PathSet | None = classes.paths
    try:
        while paths is not None or trail:
            if paths is not None:
                gone, deeper = _remove_volatile(place.fd, classes, paths)
                removed += gone
                trail.append((paths, deeper))
                paths = None
            elif trail[-1][1]:
                name = trail[-1][1].pop()
                place.down(name)
                paths = trail[-1][0].below(name)
            else:
                trail.pop()
                if trail:
                    place.up()
    finally:
        place.close()
    return removed


def _remove_volatile(directory_fd: int, classes: Classes, paths: PathSet) -> tuple[int, list[bytes]]:
    """How many entries went from one directory, and its directories that are to be looked into."""
    removed, deeper = 0, []
    for name, found in beneath.list_directory(directory_fd):
        by_path = paths.holds(name)
        if paths.keeps(name) or (not by_path and name in classes.left_alone):
            continue
        if by_path or name in classes.volatile:
            removed += remove(directory_fd, name)
        elif stat.S_ISDIR(found.st_mode):
            deeper.append(name)
    return removed, deeper


class _Place:
    """A directory of the workspace, reached from the last one."""

    def __init__(self, root_fd: int) -> None:
        self._descent = beneath.Descent(root_fd)
        self._parts: list[bytes] = []

    @property
    def fd(self) -> int:
        """Valid until the next move."""
        return self._descent.fd

    def go(self, path: bytes, *, create: bool = False) -> None:
        """Stands in that directory; ``create``: missing ones are made, with the owner of the one above."""
        parts = path.split(b"/") if path else []
        shared = next((i for i, (one, two) in enumerate(zip(self._parts, parts, strict=False)) if one != two), None)
        common = min(len(self._parts), len(parts)) if shared is None else shared
        for _ in range(len(self._parts) - common):
            self._descent.up()
            self._parts.pop()
        for part in parts[common:]:
            if create:
                _make_directory(self.fd, part)
            self._descent.down(part)
            self._parts.append(part)

    def close(self) -> None:
        self._descent.close()


def _make_directory(directory_fd: int, name: bytes) -> None:
    with suppress(FileExistsError):
        os.mkdir(name, _DIRECTORY_MODE, dir_fd=directory_fd)
        above = os.fstat(directory_fd)
        with beneath.closing(beneath.open_directory(directory_fd, name)) as made:
            os.fchown(made, above.st_uid, above.st_gid)


def _remove(place: _Place, path: bytes, untracked: frozenset[bytes]) -> None:
    """``path`` is gone, and with it each directory above it that is empty then and was not empty in the snapshot."""
    above, _, name = path.rpartition(b"/")
    try:
        place.go(above)
    except (FileNotFoundError, NotADirectoryError):
        return  # gone with a directory that was removed as a whole
    with suppress(FileNotFoundError):
        remove(place.fd, name)
    while above and above not in untracked:
        above, _, name = above.rpartition(b"/")
        place.go(above)
        try:
            os.rmdir(name, dir_fd=place.fd)
        except OSError:
            return  # something is left in it


def _write(directory_fd: int, name: bytes, entry: Tracked, data: bytes) -> None:
    """A new inode, so that other names of the file that stood there keep theirs."""
    owner, mode = os.fstat(directory_fd), _FILE_MODE
    with suppress(FileNotFoundError):
        before = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
        if not stat.S_ISDIR(before.st_mode):
            owner = before
        if stat.S_ISREG(before.st_mode):
            mode = stat.S_IMODE(before.st_mode) & 0o777
        remove(directory_fd, name)
    if entry.mode == LINK:
        os.symlink(data, name, dir_fd=directory_fd)
        os.chown(name, owner.st_uid, owner.st_gid, dir_fd=directory_fd, follow_symlinks=False)
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with beneath.closing(os.open(name, flags, 0o600, dir_fd=directory_fd)) as file:
        beneath.write(file, data, 0)
        os.fchown(file, owner.st_uid, owner.st_gid)
        os.fchmod(file, _with_execute(mode, is_set=entry.mode == EXECUTABLE))


def _set_execute(directory_fd: int, name: bytes, *, is_set: bool) -> None:
    release(directory_fd, name)
    with beneath.closing(beneath.look(directory_fd, name)) as looked:
        mode = stat.S_IMODE(os.fstat(looked).st_mode)
        Path(f"/proc/self/fd/{looked}").chmod(_with_execute(mode, is_set=is_set))


def _with_execute(mode: int, *, is_set: bool) -> int:
    """Whoever may read may execute, or nobody may."""
    return mode & ~_EXECUTE | ((mode & 0o444) >> 2 if is_set else 0)
