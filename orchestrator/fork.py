"""A throw-away copy of a run's container, for checks that write or install."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from orchestrator.checkpointer import Checkpointer
from orchestrator.container import Container
from snapshot_drivers.base import Target
from snapshot_drivers.crash_points import reached

_numbers = itertools.count(1)


@contextmanager
def scratch_copy(checkpointer: Checkpointer, container: Container, network: str) -> Iterator[Container]:
    """A second container of the same image stands where ``container`` stands now; it is gone when the block ends.

    Its files come from a snapshot that no line of the log names, so it is collected with the rest of the garbage.
    Processes are not copied.

    Raises: SnapshotError, HostError: it could not be made.
    """
    snapshot = checkpointer.capture()
    config = container.config.scratch(f"check{next(_numbers)}", "bridge" if network == "bridge" else "none")
    copy = Container.recreate(container.engine, config)
    try:
        staged = checkpointer.driver.stage(_standing_for(copy, container), snapshot.snapshot_id, checkpointer.options)
        try:
            staged.apply()
        finally:
            staged.discard()
        reached("copy-made")
        yield copy
    finally:
        copy.remove()


def _standing_for(copy: Container, container: Container) -> Target:
    """The copy as a driver sees it, its volumes under the names of those that they stand for."""
    target = copy.target()
    names = {volume.path: volume.name for volume in container.config.volumes}
    mounts = (
        replace(mount, name=names.get(mount.path, mount.name)) if mount.name is not None else mount
        for mount in target.mounts
    )
    return replace(target, mounts=tuple(mounts))
