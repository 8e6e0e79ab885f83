"""Whatever a container does through a real overlay, every captured state comes back as the container saw it.

Random file operations on the mounted overlay of an image, mixed with captures and restores, each compared by the
independent walker through the mount; what the product says has changed is compared with what the walker finds.
The environment variable ``HYPOTHESIS_PROFILE=long`` makes it some 10,000 operations.
"""

from __future__ import annotations

import ast
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshot_drivers.overlay.capture import Index
from snapshot_drivers.overlay.changes import changes_between, file_content
from tests.tree_walker import walk
from tests.unit.mounted_upper import MountedUpper
from tests.unit.tree_operations import ON_ANY, ON_FILE, ON_PLACE, Living, populate

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
EXAMPLES = 80 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 4
KINDS = [*ON_PLACE, *ON_FILE, *ON_ANY, *["capture"] * 4, *["restore"] * 3]
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 9999), st.integers(0, 9999)), min_size=25, max_size=60
)


class Seen(NamedTuple):
    """What matters of one line of the walker."""

    kind: int
    content: str


class Box:
    """A container without processes, and what was captured of it."""

    def __init__(self, place: Path, options: str) -> None:
        self.upper = MountedUpper(place / "engine", options)
        populate(Living(self.upper.lower, place))
        self.upper.start()
        self.living = Living(self.upper.merged, place)
        self.captured: list[tuple[str, list[str]]] = []
        self.index = Index()

    def lines(self) -> list[str]:
        return walk(str(self.upper.merged), leave_out=())

    def capture(self, *, with_index: bool) -> None:
        before = self.lines()
        snapshot, self.index = self.upper.capture(self.index if with_index else None)
        assert self.lines() == before, "a capture must not change the tree"
        assert snapshot.coverage.complete or not snapshot.coverage.items
        assert self.upper.capture()[0].root_digest == snapshot.root_digest, "the index was trusted wrongly"
        if self.captured:
            self.check_difference(self.captured[-1][0], snapshot.snapshot_id, self.captured[-1][1], before)
        self.captured.append((snapshot.snapshot_id, before))

    def restore(self, which: int, *, with_index: bool) -> None:
        snapshot_id, wanted = self.captured[which % len(self.captured)]
        with self.upper.staged(snapshot_id, self.index if with_index else None) as staged:
            staged.apply(verify="full" if which % 2 else "difference")
            self.index = staged.index
        assert self.lines() == wanted

    def check_difference(self, older_id: str, newer_id: str, older: list[str], newer: list[str]) -> None:
        """What the product calls added, deleted and changed is what the walker sees; a copy may count as a change."""
        manifests = [self.upper.manifests.read(one) for one in (older_id, newer_id)]
        changes = changes_between(manifests[0], manifests[1], self.upper.content.read)
        said = {os.fsencode(change.path): change.status for change in changes}
        was, now = seen(older), seen(newer)
        for status, gone, come in (("A", was, now), ("D", now, was)):
            new = come.keys() - gone.keys()
            assert {path for path, one in said.items() if one == status} <= new
            for path in new:
                hidden = {said.get(one) for one in above(path)} & {status, "T"}
                assert said.get(path) == status or hidden, (status, path)
        for path in was.keys() & now.keys():
            if was[path].kind != now[path].kind:
                assert said[path] == "T"
            elif stat.S_ISREG(now[path].kind) and was[path].content != now[path].content:
                assert said[path] == "M", path
        for path in list(now)[:: max(1, len(now) // 5)]:
            if stat.S_ISREG(now[path].kind):
                pieces = file_content(manifests[1], os.fsdecode(path), self.upper.content.read)
                assert pieces is not None
                assert b"".join(pieces) == Path(os.fsdecode(os.fsencode(self.upper.merged) + path)).read_bytes()


def seen(lines: list[str]) -> dict[bytes, Seen]:
    """By path. Paths stand there as Python writes bytes, with spaces in them."""
    found = {}
    for line in lines:
        path, rest = line.split("' ", 1)
        mode, *_, group_and_more = rest.split(" ", 5)
        content = group_and_more.split("' ", 1)[1].split(" ", 1)[0]
        found[bytes(ast.literal_eval(f"{path}'"))] = Seen(stat.S_IFMT(int(mode, 8)), content)
    return found


def above(path: bytes) -> list[bytes]:
    parts = path.split(b"/")
    return [b"/".join(parts[:length]) for length in range(2, len(parts))]


def run(box: Box, steps: list[tuple[str, int, int]]) -> None:
    box.capture(with_index=False)
    for name, one, two in steps:
        if name == "capture":
            if two % 3:
                time.sleep(0.025)  # what rests is taken over unread: only then can the index be wrong
            box.capture(with_index=bool(one % 3))
        elif name == "restore":
            box.restore(one, with_index=bool(two % 2))
        else:
            box.living.change(name, one, two)
    box.capture(with_index=True)
    box.restore(0, with_index=True)
    box.upper.content.close()


@pytest.mark.parametrize("options", ["", "redirect_dir=on", "redirect_dir=on,metacopy=on"])
@pytest.mark.timeout(3000)
def test_every_captured_state_comes_back_as_the_container_saw_it(options: str) -> None:
    operations = 0

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps=STEPS)
    def live(steps: list[tuple[str, int, int]]) -> None:
        nonlocal operations
        operations += len(steps) + 3
        with tempfile.TemporaryDirectory(prefix="overlay-properties-") as directory:
            box = Box(Path(directory), options)
            try:
                run(box, steps)
            finally:
                box.living.unlock()
                box.upper.kill()

    live()
    print(f"{operations} operations")
