"""A plain directory with a store beside it, and the overlay driver's walk and restore of it, without anything else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions
from snapshot_drivers.overlay.apply import apply_plan
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.overlay.plan import DirectoryPlan, make_plan
from snapshot_drivers.overlay.scan import ScannedTree, Scanner
from snapshot_drivers.overlay.staging import Staging
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.tree import decode_root, digest_of
from tests.tree_walker import walk

NOTHING = PathSet()


class Tree:
    """A directory, a store, and the product's walk and restore of it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.root = place / "tree"
        self.root.mkdir()
        self.content = ContentStore(place / "store")
        self.options = CaptureOptions()

    def scan(
        self,
        index: ScannedTree | None = None,
        *,
        skip: PathSet = NOTHING,
        put: Callable[[bytes], bytes] = digest_of,
        options: CaptureOptions | None = None,
    ) -> ScannedTree:
        with beneath.closing(os.open(self.root, os.O_RDONLY)) as root_fd:
            return Scanner(put, options or self.options, skip=skip, index=index).scan(root_fd)

    def capture(self, index: ScannedTree | None = None, *, skip: PathSet = NOTHING) -> ScannedTree:
        with self.content.writer(f"p{time.time_ns()}") as writer:
            return self.scan(index, skip=skip, put=writer.put)

    def plan(self, wanted: ScannedTree, skip: PathSet = NOTHING) -> DirectoryPlan:
        get = self.content.read
        return make_plan(self.scan(skip=skip).root, decode_root(wanted.digest, get), get, skip)

    def restore(self, wanted: ScannedTree, skip: PathSet = NOTHING) -> None:
        """Raises AssertionError where the product's own proof fails."""
        plan = self.plan(wanted, skip)
        with (
            beneath.closing(os.open(self.root, os.O_RDONLY)) as root_fd,
            Staging(os.open(self.place, os.O_RDONLY), self.content.read) as staging,
        ):
            staging.prepare(plan)
            apply_plan(plan, root_fd, staging)
        assert self.plan(wanted, skip).is_empty

    def lines(self) -> list[str]:
        return walk(str(self.root))
