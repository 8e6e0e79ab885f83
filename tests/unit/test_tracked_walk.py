"""A walk of what a tracker reports gives the same tree as a whole walk, whatever happens in between.

The random histories of ``test_tree_properties``, each capture compared with a whole walk. Flags that chattr(1) sets are
left out: on the files below an overlay the kernel reports only the two that it keeps as an attribute.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions, StateKind
from snapshot_drivers.overlay.held import Held
from snapshot_drivers.overlay.scan import ScannedTree
from snapshot_drivers.overlay.sources import Source
from snapshot_drivers.overlay.tracking import Tracking
from snapshot_drivers.tree import digest_of
from tests.built_helpers import built_helpers
from tests.unit.test_tree_properties import EXAMPLES, KINDS, SKIP, World, run

EXAMPLES_HERE = EXAMPLES // 2
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a mark on a file system needs root")

KEY = (StateKind.ROOTFS, "/")
OPTIONS = CaptureOptions()
STEPS = st.lists(
    st.tuples(st.sampled_from([kind for kind in KINDS if kind != "flags"]), st.integers(0, 9999), st.integers(0, 9999)),
    min_size=25,
    max_size=60,
)


class TrackedWorld(World):
    """One whose captures with the last index go by what a tracker reports."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.tracking = Tracking(built_helpers() / "tracker", from_entries=0)
        self.tracking.prepare(place / "tree", place, 0)
        self.tracked = 0

    def scan(self, index: ScannedTree | None, put: Callable[[bytes], bytes] = digest_of) -> ScannedTree:
        if index is None:
            return super().scan(None, put)
        self.tracking.look()
        with beneath.closing(os.open(self.root, os.O_RDONLY)) as root_fd:
            source = Source(StateKind.ROOTFS, "/", None, root_fd, None)
            parts = {"put": put, "options": OPTIONS, "skip": SKIP, "index": index, "leases": {}}
            found = self.tracking.walk(source, held=Held([]), **parts)
        self.tracked += found.places is not None
        return found

    def capture(self, how: str) -> None:
        super().capture(how)
        assert self.index is not None
        self.tracking.rebase({KEY: self.index}, OPTIONS)


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tracked-walk-", dir="/var/tmp") as directory:
        yield Path(directory)


@pytest.mark.timeout(3000)
def test_what_is_reported_is_all_that_changed() -> None:
    tracked = 0

    @settings(max_examples=EXAMPLES_HERE, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps=STEPS)
    def live(steps: list[tuple[str, int, int]]) -> None:
        nonlocal tracked
        with tempfile.TemporaryDirectory(prefix="tracked-walk-", dir="/var/tmp") as directory:
            world = TrackedWorld(Path(directory))
            try:
                run(world, steps)
            finally:
                world.unlock()
                world.tracking.close()
            tracked += world.tracked

    live()
    assert tracked > EXAMPLES_HERE, "most captures must go by what was reported"
