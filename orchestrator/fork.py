"""A throw-away copy of a run's container, for checks that write or install."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from orchestrator.checkpointer import Checkpointer
from orchestrator.container import Container
from snapshot_drivers.base import CaptureOptions, CoverageState, Snapshot, SnapshotDriver, StateKind, Target
from snapshot_drivers.commit.driver import CommitDriver
from snapshot_drivers.crash_points import reached

_numbers = itertools.count(1)


@contextmanager
def scratch_copy(checkpointer: Checkpointer, container: Container, network: str) -> Iterator[Container]:
    """A second container of the same image stands where ``container`` stands now; it is gone when the block ends.

    Its files come from a snapshot that no line of the log names, and that is forgotten with it; where a driver holds
    no root filesystem, that comes from the engine's own commit. Processes are not copied.

    Raises: SnapshotError, HostError: it could not be made.
    """
    before = checkpointer.last_snapshot_id
    snapshot = checkpointer.capture(lenient=True)
    checkpointer.last_snapshot_id = before
    with ExitStack() as stack:
        stack.callback(checkpointer.driver.forget, snapshot.snapshot_id)
        root = None if _holds_root(snapshot) else _commit_root(container, stack)
        config = container.config.scratch(f"check{next(_numbers)}", "bridge" if network == "bridge" else "none")
        copy = Container.recreate(container.engine, config)
        stack.callback(copy.remove)
        if root is not None:
            _put(*root, _standing_for(copy, container), CaptureOptions())
        _put(checkpointer.driver, snapshot, _standing_for(copy, container), checkpointer.options)
        reached("copy-made")
        yield copy


def _holds_root(snapshot: Snapshot) -> bool:
    return any(
        (item.kind, item.path, item.state) == (StateKind.ROOTFS, "/", CoverageState.CAPTURED)
        for item in snapshot.coverage.items
    )


def _commit_root(container: Container, stack: ExitStack) -> tuple[SnapshotDriver, Snapshot]:
    """The container's root filesystem as a snapshot that is gone with ``stack``, and the driver that holds it."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orchestrator-copy-")))
    driver = CommitDriver(directory)
    stack.callback(driver.close)
    snapshot = driver.capture(container.target(), None, CaptureOptions())
    stack.callback(driver.forget, snapshot.snapshot_id)
    return driver, snapshot


def _put(driver: SnapshotDriver, snapshot: Snapshot, target: Target, options: CaptureOptions) -> None:
    staged = driver.stage(target, snapshot.snapshot_id, options)
    try:
        staged.apply()
    finally:
        staged.discard()


def _standing_for(copy: Container, container: Container) -> Target:
    """The copy as a driver sees it, its volumes under the names of those that they stand for."""
    target = copy.target()
    names = {volume.path: volume.name for volume in container.config.volumes}
    mounts = (
        replace(mount, name=names.get(mount.path, mount.name)) if mount.name is not None else mount
        for mount in target.mounts
    )
    return replace(target, mounts=tuple(mounts))
