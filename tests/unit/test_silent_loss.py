"""What a walk or a plan could lose or leave without a word, one way a test: a capture that is called complete is."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions
from snapshot_drivers.errors import LimitExceeded, RestoreRefused
from snapshot_drivers.overlay.apply import remove_paths
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.overlay.staging import Staging
from tests.unit.plain_tree import Tree

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and trusted attributes need root")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def memory_tree() -> Iterator[Tree]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        yield Tree(Path(place))


def make_unlistable(path: Path) -> None:
    """More attribute names than the kernel lists: the entry can be seen, but not read whole."""
    for number in range(300):
        os.setxattr(path, f"trusted.{number:0240}", b"", follow_symlinks=False)
    with pytest.raises(OSError, match=os.strerror(errno.E2BIG)):
        os.listxattr(path, follow_symlinks=False)


def test_an_attribute_whose_name_is_no_text_is_captured(tree: Tree) -> None:
    (tree.root / "f").write_text("x")
    os.setxattr(tree.root / "f", b"user.\xff\xfe", b"v")
    taken, before = tree.capture(), tree.lines()
    os.removexattr(tree.root / "f", b"user.\xff\xfe")
    tree.restore(taken)
    assert tree.lines() == before


@needs_root
def test_an_entry_that_cannot_be_looked_at_does_not_lead_the_walk_astray(tree: Tree) -> None:
    for path in ("d/e/here", "d/z/there", "e/not-here", "z/f"):
        (tree.root / path).parent.mkdir(parents=True, exist_ok=True)
        (tree.root / path).write_text(path)
    (tree.root / "d/mounted").write_text("below")
    subprocess.run(["mount", "--bind", "/etc/hostname", tree.root / "d/mounted"], check=True)
    try:
        taken = tree.scan()
    finally:
        subprocess.run(["umount", tree.root / "d/mounted"], check=True)
    assert [problem.path for problem in taken.problems] == ["/d/mounted"]
    directory = (taken.root.children or {})[b"d"]
    assert list(directory.children or {}) == [b"e", b"mounted", b"z"]
    assert list(((directory.children or {})[b"e"]).children or {}) == [b"here"]


@needs_root
def test_a_directory_that_cannot_be_read_is_neither_forgotten_nor_left_behind(memory_tree: Tree) -> None:
    tree = memory_tree
    (tree.root / "f").write_text("x")
    without, before = tree.capture(), tree.lines()
    (tree.root / "d").mkdir()
    (tree.root / "d/note").write_text("to myself")
    make_unlistable(tree.root / "d")
    taken = tree.capture()
    assert [problem.path for problem in taken.problems] == ["/d"]
    assert taken.digest != without.digest
    (tree.root / "f").write_text("y")
    tree.restore(taken)
    assert (tree.root / "f").read_text() == "x"
    assert (tree.root / "d/note").exists(), "what was not captured is left as it is"
    tree.restore(without)
    assert tree.lines() == before


@needs_root
def test_a_link_that_cannot_be_read_is_not_restored_as_something_else(memory_tree: Tree) -> None:
    tree = memory_tree
    os.symlink("target", tree.root / "l")
    make_unlistable(tree.root / "l")
    taken = tree.capture()
    assert [problem.path for problem in taken.problems] == ["/l"]
    tree.restore(taken)
    assert os.readlink(tree.root / "l") == "target"


@pytest.mark.parametrize("size", [1000, (2 << 20) + 77])
def test_reads_that_come_in_pieces_are_put_together(tree: Tree, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree.root / "f").write_bytes(os.urandom(size))
    whole = tree.scan().digest
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: read(file, min(size, size // 2 + 1), offset))
    assert tree.scan().digest == whole


@pytest.mark.parametrize("size", [1000, (2 << 20) + 77])
def test_a_file_that_ends_early_is_a_problem_not_a_hole(tree: Tree, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree.root / "f").write_bytes(b"x" * size)
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: read(file, size, offset)[: 500 - offset])
    taken = tree.scan()
    assert [problem.path for problem in taken.problems] == ["/f"]


def test_a_file_that_becomes_a_directory_meanwhile_is_a_problem(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree.root / "f").write_text("x")
    with beneath.closing(os.open(tree.root, os.O_RDONLY)) as root_fd:
        listed = beneath.list_directory(root_fd)
    (tree.root / "f").unlink()
    (tree.root / "f").mkdir()
    (tree.root / "f/lost").write_text("x")
    monkeypatch.setattr(beneath, "list_directory", lambda *_: listed)
    assert [problem.path for problem in tree.scan().problems] == ["/f"]


def test_a_directory_stays_for_what_is_excluded_only_where_that_exists(tree: Tree) -> None:
    skip = PathSet.of(["/keep/deep/in"])
    os.symlink("a-link-beside", tree.root / "l")
    taken, before = tree.capture(skip=skip), tree.lines()
    (tree.root / "keep/deep").mkdir(parents=True)
    (tree.root / "keep/deep/note").write_text("x")
    tree.restore(taken, skip)
    assert tree.lines() == before
    (tree.root / "keep/deep/in").mkdir(parents=True)
    (tree.root / "keep/other").write_text("x")
    tree.restore(taken, skip)
    assert sorted(os.listdir(tree.root)) == ["keep", "l"]
    assert os.listdir(tree.root / "keep") == ["deep"]
    assert os.listdir(tree.root / "keep/deep") == ["in"]


def test_what_is_excluded_is_not_removed_to_make_room_for_a_file(tree: Tree) -> None:
    skip = PathSet.of(["/keep/in"])
    (tree.root / "keep").write_text("a file once")
    taken = tree.capture(skip=skip)
    (tree.root / "keep").unlink()
    (tree.root / "keep/in").mkdir(parents=True)
    with pytest.raises(RestoreRefused, match="keep"):
        tree.plan(taken, skip)


def test_what_was_captured_before_it_was_excluded_stays_as_it_is(tree: Tree) -> None:
    (tree.root / "x").write_text("1")
    (tree.root / "f").write_text("1")
    (tree.root / "d").mkdir()
    taken = tree.capture()
    (tree.root / "x").write_text("2")
    (tree.root / "f").write_text("2")
    tree.restore(taken, PathSet.of(["/x", "/d"]))
    assert (tree.root / "x").read_text() == "2"
    assert (tree.root / "f").read_text() == "1"


def test_an_excluded_file_is_not_changed_through_another_of_its_names(tree: Tree) -> None:
    skip = PathSet.of(["/x"])
    (tree.root / "f").write_text("1")
    (tree.root / "x").write_text("1")
    taken = tree.capture(skip=skip)
    (tree.root / "f").unlink()
    os.link(tree.root / "x", tree.root / "f")
    (tree.root / "x").chmod(0o600)
    before = os.stat(tree.root / "x")
    tree.restore(taken, skip)
    after = os.stat(tree.root / "x")
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert os.stat(tree.root / "f").st_mode & 0o777 != 0o600


def test_a_volatile_path_that_leads_through_a_link_is_not_followed(tree: Tree) -> None:
    (tree.place / "host/cache").mkdir(parents=True)
    (tree.root / "w").symlink_to(tree.place / "host")
    with beneath.closing(os.open(tree.root, os.O_RDONLY)) as root_fd:
        assert remove_paths(root_fd, PathSet.of(["/w/cache", "/none/at/all"])) == 0
    assert (tree.place / "host/cache").exists()


def test_many_names_of_one_file_are_read_once(tree: Tree) -> None:
    (tree.root / "f").write_bytes(b"x" * 10_000)
    for number in range(50):
        os.link(tree.root / "f", tree.root / f"l{number}")
    taken = tree.scan(options=CaptureOptions(max_content_bytes=10_000))
    assert len({node.link for node in (taken.root.children or {}).values()}) == 1


def test_zeros_that_have_to_be_read_count_as_content(tree: Tree) -> None:
    with (tree.root / "zeros").open("wb") as file:
        file.write(bytes(8 << 20))
        os.fsync(file.fileno())
    with pytest.raises(LimitExceeded, match="max_content_bytes"):
        tree.scan(options=CaptureOptions(max_content_bytes=4 << 20))


@needs_root
@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="needs mkfs.ext4")
def test_a_file_system_that_keeps_whole_seconds_is_not_trusted_sooner(tmp_path: Path) -> None:
    image, place = tmp_path / "image", tmp_path / "mnt"
    place.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-I", "128", image], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", image, place], capture_output=True).returncode:
        pytest.skip("no loop device can be mounted here")
    try:
        tree = Tree(place)
        time.sleep(1.1 - time.time() % 1)  # not at the end of a second
        (tree.root / "f").write_text("aaa")
        time.sleep(0.1)
        first = tree.scan()
        (tree.root / "f").write_text("bbb")
        assert tree.scan(first).digest == tree.scan().digest
        time.sleep(4)
        assert tree.scan(tree.scan()).reread == 0
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_staging_directory_that_cannot_be_made_costs_no_descriptor(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    place = os.open(gone, os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    gone.rmdir()
    with pytest.raises(FileNotFoundError):
        Staging(place, lambda digest: b"")
    assert len(os.listdir("/proc/self/fd")) == before - 1
