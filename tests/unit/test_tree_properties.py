"""Whatever happens to a tree between captures, a restore brings back every captured state, and the index never lies.

Random file operations, faster than the file system's clock ticks, mixed with captures (with the last index, with one
that went through a file, with none) and restores to any earlier capture, each compared by the independent walker.
The environment variable ``HYPOTHESIS_PROFILE=long`` makes it some 10,000 operations.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions, StateKind
from snapshot_drivers.errors import RestoreRefused
from snapshot_drivers.overlay.apply import apply_plan, remove_paths
from snapshot_drivers.overlay.capture import Index
from snapshot_drivers.overlay.index_file import load_index, save_index
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.overlay.plan import make_plan
from snapshot_drivers.overlay.scan import ScannedTree, Scanner
from snapshot_drivers.overlay.staging import STAGING_PREFIX, Staging
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.tree import decode_root, digest_of
from tests.tree_walker import inode_flags, walk
from tests.unit.tree_operations import ON_ANY, ON_FILE, ON_PLACE, Living, below, populate

EXAMPLES = 140 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 20
EXCLUDED = ("/keep/in", "/x")
VOLATILE = ("/cache/v",)
LEFT_OUT = [os.fsencode(path) for path in EXCLUDED + VOLATILE]
SKIP = PathSet.of(EXCLUDED + VOLATILE)
PLACES = [None, "/dev/shm"] if os.access("/dev/shm", os.W_OK) else [None]


def lines(root: bytes) -> list[str]:
    """The walker's lines and the root's own; a hardlink whose other names are left out is a plain file."""
    names: dict[int, list[bytes]] = {}
    for path, found in below(root):
        if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode) and not is_left_out(path):
            names.setdefault(found.st_ino, []).append(path)
    sole = {f"{members[0]!r} " for members in names.values() if len(members) == 1}
    listed = [
        line.replace(f" {start}", " b'' ", 1) if (start := line[: line.index("' ") + 2]) in sole else line
        for line in walk(os.fsdecode(root), LEFT_OUT)
    ]
    top = os.stat(root)
    with beneath.closing(os.open(root, os.O_RDONLY)) as root_fd:
        flags = inode_flags(root_fd)
    return [f"{top.st_mode:o} {top.st_uid}:{top.st_gid} {top.st_mtime_ns} {os.listxattr(root)} {flags:x}", *listed]


def is_left_out(path: bytes) -> bool:
    return any(path == out or path.startswith(out + b"/") for out in LEFT_OUT)


def kept(root: bytes) -> list[object]:
    """What is excluded, as it stands; whether it is still a hardlink of something captured does not matter."""
    found: list[object] = []
    for path, attributes in below(root):
        if is_left_out(path) and not path.startswith(b"/cache"):
            body = Path(os.fsdecode(root + path)).read_bytes() if stat.S_ISREG(attributes.st_mode) else b""
            found.append((path, attributes.st_mode, attributes.st_uid, attributes.st_mtime_ns, body))
    return found


class World(Living):
    """A tree, a store beside it, and what was captured."""

    def __init__(self, place: Path) -> None:
        super().__init__(place / "tree", place)
        os.mkdir(self.root)
        self.content = ContentStore(place / "store")
        self.index: ScannedTree | None = None
        self.captured: list[tuple[bytes, list[str]]] = []
        self.blocks: set[bytes] = set()

    def scan(self, index: ScannedTree | None, put: Callable[[bytes], bytes] = digest_of) -> ScannedTree:
        with beneath.closing(os.open(self.root, os.O_RDONLY)) as root_fd:
            return Scanner(put, CaptureOptions(), skip=SKIP, index=index).scan(root_fd)

    def through_a_file(self) -> ScannedTree | None:
        if self.index is None:
            return None
        save_index(self.place, "c", Index({(StateKind.ROOTFS, "/"): self.index}, upper=self.place))
        return load_index(self.place, "c").trees[(StateKind.ROOTFS, "/")]

    def capture(self, how: str) -> None:
        before = lines(self.root)
        earlier = {"index": lambda: self.index, "file": self.through_a_file, "none": lambda: None}[how]()
        with self.content.writer(f"p{len(self.captured)}") as writer:
            taken = self.scan(earlier, writer.put)
        assert lines(self.root) == before, "a capture must not change the tree"
        assert not taken.problems
        assert taken.digest == self.scan(None).digest, "the index was trusted wrongly"
        for digest, listed in self.captured:
            assert (digest == taken.digest) == (listed == before), "digests are equal if and only if trees are"
        self.check_cost(writer.stored_bytes, taken, before)
        self.captured.append((taken.digest, before))
        self.index = taken

    def check_cost(self, stored: int, taken: ScannedTree, listed: list[str]) -> None:
        new = 0
        for path, found in below(self.root):
            if stat.S_ISREG(found.st_mode) and not is_left_out(path):
                data = Path(os.fsdecode(self.root + path)).read_bytes()
                for start in range(0, len(data), 1 << 20):
                    block = data[start : start + (1 << 20)]
                    if block.count(0) < len(block) and digest_of(block) not in self.blocks:
                        self.blocks.add(digest_of(block))
                        new += len(block)
        assert stored <= new + 1000 * (taken.entries + 1)
        if any(listed == known for _, known in self.captured):
            assert stored == 0

    def restore(self, which: int, how: str) -> None:
        digest, wanted = self.captured[which % len(self.captured)]
        left_out, descriptors = kept(self.root), len(os.listdir("/proc/self/fd"))
        with beneath.closing(os.open(self.root, os.O_RDONLY)) as root_fd:
            remove_paths(root_fd, PathSet.of(VOLATILE))
            real = self.scan(self.index if how == "index" else None)
            before = lines(self.root)
            try:
                plan = make_plan(real.root, decode_root(digest, self.content.read), self.content.read, SKIP)
            except RestoreRefused:
                assert os.path.lexists(self.root + b"/keep/in"), "refused only for the sake of what is excluded"
                assert lines(self.root) == before
                return
            with Staging(os.open(self.place, os.O_RDONLY), self.content.read) as staging:
                staging.prepare(plan)
                assert lines(self.root) == before, "staging must not touch the tree"
                apply_plan(plan, root_fd, staging)
        after = self.scan(real)
        left = make_plan(after.root, decode_root(digest, self.content.read), self.content.read, SKIP)
        assert left.is_empty
        found = lines(self.root)
        if found != wanted and os.path.lexists(self.root + b"/keep/in"):  # its parent may have had to stay
            assert not any(line.startswith("b'/keep' ") for line in wanted)
            found = [line for line in found if not line.startswith("b'/keep' ")]
        else:
            assert after.digest == digest
            self.index = after
        assert found == wanted
        assert kept(self.root) == left_out
        assert not os.path.lexists(self.root + b"/cache/v")
        assert not [name for name in os.listdir(os.fsencode(self.place)) if name.startswith(STAGING_PREFIX)]
        assert len(os.listdir("/proc/self/fd")) <= descriptors + len(self.captured)  # one for each pack


KINDS = [*ON_PLACE, *ON_FILE, *ON_ANY, *["capture"] * 5, *["restore"] * 3]
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 9999), st.integers(0, 9999)), min_size=25, max_size=60
)


@pytest.mark.parametrize("place", PLACES, ids=["disk", "memory"][: len(PLACES)])
@pytest.mark.timeout(3000)
def test_every_captured_state_comes_back_whole(place: str | None) -> None:
    operations = 0

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps=STEPS)
    def live(steps: list[tuple[str, int, int]]) -> None:
        nonlocal operations
        operations += len(steps) + 4
        with tempfile.TemporaryDirectory(dir=place, prefix="tree-properties-") as directory:
            world = World(Path(directory))
            try:
                run(world, steps)
            finally:
                world.unlock()

    live()
    print(f"{operations} operations")


def run(world: World, steps: list[tuple[str, int, int]]) -> None:
    populate(world)
    world.capture("none")
    for kind, one, two in steps:
        if kind == "capture":
            if two % 3:
                time.sleep(0.025)  # what rests is taken over unread: only then can the index be wrong
            world.capture(("index", "index", "file", "none")[one % 4])
        elif kind == "restore":
            world.restore(one, ("index", "none")[two % 2])
        else:
            world.change(kind, one, two)
    world.capture("index")
    world.restore(0, "index")
    world.capture("file")
    world.content.close()


def test_a_tree_that_rests_is_not_read_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    for number in range(50):
        world.change("create", number * 7, number)
    time.sleep(0.05)
    world.capture("none")
    again = world.scan(world.index)
    assert again.reread == 0
    assert again.digest == world.captured[0][0]
