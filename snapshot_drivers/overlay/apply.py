"""Carry out a plan on a tree: writes go through descriptors, no link is followed, no file is changed in place."""

from __future__ import annotations

import os
from contextlib import suppress

from snapshot_drivers import beneath
from snapshot_drivers.overlay.attributes import set_attributes, set_directory_attributes, set_flags
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.overlay.plan import DirectoryPlan
from snapshot_drivers.overlay.staging import Staging
from snapshot_drivers.removal import release, release_open, remove


def apply_plan(plan: DirectoryPlan, root_fd: int, staging: Staging) -> int:
    """The tree at ``root_fd`` is as the plan wants it; answers how many entries were touched.

    Raises: OSError, StoreDamaged: the tree is in between.
    """
    if plan.is_empty:
        return 0
    staging.start_over()
    touched = 0
    place = beneath.Descent(root_fd)
    trail: list[tuple[DirectoryPlan, list[DirectoryPlan]]] = []
    following: DirectoryPlan | None = plan
    try:
        while following is not None or trail:
            if following is not None:
                if trail:
                    place.down(following.node.name)
                release_open(place.fd)
                touched += _apply_here(following, place.fd, staging)
                trail.append((following, list(reversed(following.below))))
            else:
                done, _ = trail.pop()
                set_directory_attributes(place.fd, done.node, root=not trail)
                touched += 1
                if trail:
                    place.up()
            following = trail[-1][1].pop() if trail and trail[-1][1] else None
    finally:
        place.close()
    staging.finish()
    return touched


def remove_paths(root_fd: int, paths: PathSet) -> int:
    """The paths of the tree are gone; answers how many entries were removed."""
    removed = 0
    for parts in paths.members():
        place = beneath.Descent(root_fd)
        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                for part in parts[:-1]:
                    place.down(part)
                for name in parts[-1:] or [name for name, _ in beneath.list_directory(root_fd)]:
                    removed += remove(place.fd, name)
            finally:
                place.close()
    return removed


def _apply_here(plan: DirectoryPlan, directory_fd: int, staging: Staging) -> int:
    touched = 0
    for name in plan.remove:
        touched += remove(directory_fd, name)
    for node in plan.put:
        if node.name in plan.release:
            release(directory_fd, node.name)
        staging.put(directory_fd, node)
    for node in plan.adjust:
        if node.name in plan.release:
            release(directory_fd, node.name)
        set_attributes(directory_fd, node.name, node)
        set_flags(directory_fd, node, is_new=False)
    for below in plan.below:
        if below.create:
            os.mkdir(below.node.name, 0o700, dir_fd=directory_fd)
    return touched + len(plan.put) + len(plan.adjust)
