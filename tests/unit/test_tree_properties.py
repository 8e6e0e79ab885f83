"""Whatever happens to a tree between captures, a restore brings back every captured state, and the index never lies.

Random file operations, faster than the file system's clock ticks, mixed with captures (with the last index, with one
that went through a file, with none) and restores to any earlier capture, each compared by the independent walker.
The environment variable ``HYPOTHESIS_PROFILE=long`` makes it some 10,000 operations.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions, StateKind
from snapshot_drivers.errors import RestoreRefused
from snapshot_drivers.overlay.apply import STAGING_PREFIX, Staging, apply_plan, remove_paths
from snapshot_drivers.overlay.capture import Index
from snapshot_drivers.overlay.index_file import load_index, save_index
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.overlay.plan import make_plan
from snapshot_drivers.overlay.scan import ScannedTree, Scanner
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.tree import decode_root, digest_of
from tests.tree_walker import walk

EXAMPLES = 140 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 20
EXCLUDED = ("/keep/in", "/x")
VOLATILE = ("/cache/v",)
LEFT_OUT = [os.fsencode(path) for path in EXCLUDED + VOLATILE]
SKIP = PathSet.of(EXCLUDED + VOLATILE)
NAMES = (b"a", b"b", b"keep", b"in", b"cache", b"v", b"x", b"\xff\xfe", b"n\nl ")
TARGETS = (b"nowhere", b"/etc/passwd", b"..", b"a" * 300)
IS_ROOT = os.geteuid() == 0
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
    return [f"{top.st_mode:o} {top.st_uid}:{top.st_gid} {top.st_mtime_ns} {os.listxattr(root)}", *listed]


def below(root: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Every entry with its path from the root on, in a fixed order."""
    for directory, directories, files in os.walk(root):
        directories.sort()
        for name in sorted(directories + files):
            path = directory + b"/" + name
            yield path[len(root) :], os.lstat(path)


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


class World:
    """A tree, a store beside it, and what was captured."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.root = os.fsencode(place / "tree")
        os.mkdir(self.root)
        self.content = ContentStore(place / "store")
        self.index: ScannedTree | None = None
        self.captured: list[tuple[bytes, list[str]]] = []
        self.blocks: set[bytes] = set()
        self.moment = 0

    # What a container does.

    def paths(self, *, of: Callable[[int], bool] = lambda mode: True) -> list[bytes]:
        return [self.root + path for path, found in below(self.root) if of(found.st_mode)]

    def place_for(self, number: int) -> bytes:
        directories = [self.root, *self.paths(of=stat.S_ISDIR)]
        directory = directories[number % len(directories)]
        if directory.count(b"/") - self.root.count(b"/") > 4:
            directory = self.root
        return directory + b"/" + NAMES[number // 7 % len(NAMES)]

    def change(self, kind: str, one: int, two: int) -> None:
        self.moment += 1
        files = self.paths(of=stat.S_ISREG)
        everything = self.paths()
        with suppress(OSError):  # a name is taken, a directory is moved into itself, nobody reads a fifo
            if kind in ON_PLACE:
                ON_PLACE[kind](self, self.place_for(one), two)
            elif kind in ON_FILE and files:
                ON_FILE[kind](self, files[one % len(files)], two)
            elif kind in ON_ANY and everything:
                ON_ANY[kind](self, everything[one % len(everything)], two)

    def data(self, size: int) -> bytes:
        return (b"%08d" % self.moment * (size // 8 + 1))[:size]

    # What the product does.

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


def write(world: World, path: bytes, size: int, *, flags: int = os.O_CREAT | os.O_TRUNC, at: int = 0) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags)
    try:
        os.pwrite(descriptor, world.data(size), at)
    finally:
        os.close(descriptor)


def is_movable(world: World, source: bytes, target: bytes) -> bool:
    return not (target + b"/").startswith(source + b"/") and not (source + b"/").startswith(target + b"/")


def clear(path: bytes) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def rename_over(world: World, path: bytes, two: int) -> None:
    target = world.place_for(two)
    if is_movable(world, path, target):
        if os.path.lexists(target) and os.path.isdir(path) != os.path.isdir(target):
            clear(target)
        with suppress(OSError):
            os.rename(path, target)


def exchange(world: World, path: bytes, two: int) -> None:
    """Two entries of any types change places."""
    others = world.paths()
    other = others[two % len(others)]
    if is_movable(world, path, other):
        aside = os.fsencode(world.place / "aside")
        os.rename(path, aside)
        os.rename(other, path)
        os.rename(aside, other)


def hardlink(world: World, path: bytes, two: int) -> None:
    os.link(path, world.place_for(two), follow_symlinks=False)


def replace_by_copy(world: World, path: bytes, two: int) -> None:
    copied = os.fsencode(world.place / "copied")
    shutil.copy2(path, copied)
    os.rename(copied, path)


def swap_type(world: World, path: bytes, two: int) -> None:
    clear(path)
    (os.mkdir, lambda name: write(world, name, two % 999), lambda name: os.symlink(TARGETS[two % 4], name))[two % 3](
        path
    )


def set_times(world: World, path: bytes, two: int) -> None:
    os.utime(path, ns=(1, (0, 1_000_000_000_000_000_000, 1_700_000_000_123_456_789)[two % 3]), follow_symlinks=False)


def set_attribute(world: World, path: bytes, two: int) -> None:
    if stat.S_IFMT(os.lstat(path).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
        with suppress(OSError):
            if two % 3:
                os.setxattr(path, (b"user.k", b"user.\xff")[two % 2], world.data(two % 40))
            else:
                os.removexattr(path, b"user.k")


def sparse(world: World, path: bytes, two: int) -> None:
    os.truncate(path, 3 << 20)
    write(world, path, two % 5000, flags=0, at=(two % 3) << 20)


def change_mode(world: World, path: bytes, two: int) -> None:
    if not os.path.islink(path):
        os.chmod(path, (0o755, 0o600, 0o4711, 0o1777)[two % 4] | (0 if IS_ROOT else 0o700))


def change_owner(world: World, path: bytes, two: int) -> None:
    if IS_ROOT:
        os.chown(path, two % 3, two % 5, follow_symlinks=False)


Operation = Callable[[World, bytes, int], object]
ON_PLACE: dict[str, Operation] = {
    "create": lambda world, path, two: write(world, path, two % 3000),
    "directory": lambda world, path, two: os.mkdir(path),
    "link": lambda world, path, two: os.symlink(TARGETS[two % len(TARGETS)], path),
    "fifo": lambda world, path, two: os.mkfifo(path),
}
ON_FILE: dict[str, Operation] = {
    "overwrite": lambda world, path, two: write(world, path, two % 3000, flags=os.O_TRUNC),
    "same size": lambda world, path, two: write(world, path, os.stat(path).st_size % 5000, flags=0),
    "append": lambda world, path, two: write(world, path, two % 300, flags=0, at=os.stat(path).st_size),
    "truncate": lambda world, path, two: os.truncate(path, two % 3000),
    "sparse": sparse,
    "copy": replace_by_copy,
    "hardlink": hardlink,
    "hardlink too": hardlink,
}
ON_ANY: dict[str, Operation] = {
    "rename": rename_over,
    "exchange": exchange,
    "remove": lambda world, path, two: clear(path),
    "mode": change_mode,
    "owner": change_owner,
    "times": set_times,
    "attribute": set_attribute,
    "swap": swap_type,
}
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
            run(World(Path(directory)), steps)

    live()
    print(f"{operations} operations")


def populate(world: World) -> None:
    """Something of every kind, so that each operation finds what it works on."""
    for path in (b"a/b", b"b", b"keep", b"cache"):
        os.makedirs(world.root + b"/" + path)
    for number, path in enumerate((b"in", b"a/a", b"a/b/a", b"b/a", b"b/x", b"keep/a", b"cache/a")):
        write(world, world.root + b"/" + path, 100 + number)
    os.link(world.root + b"/a/a", world.root + b"/a/b/b")
    os.link(world.root + b"/a/a", world.root + b"/keep/b")
    os.link(world.root + b"/b/a", world.root + b"/b/b")
    os.symlink(b"a", world.root + b"/v")


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
