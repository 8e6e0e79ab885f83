"""Control groups that tests leave behind: the engine removes a container's own, and not the one above it."""

from __future__ import annotations

import os

from snapshot_drivers import cgroups


def remove_groups(group: str) -> None:
    """The groups below and at ``group``, as given to the engine, are gone where nothing runs in them."""
    for tree in cgroups.hierarchies():
        for path, _, _ in os.walk(tree.directory(group), topdown=False):
            try:
                os.rmdir(path)
            except OSError:
                continue
