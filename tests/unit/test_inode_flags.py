"""What ``chattr`` sets is state like any other, and no flag keeps a restore or a removal from its work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_drivers import beneath
from snapshot_drivers.base import StateKind
from snapshot_drivers.inode_flags import read_flags, write_flags
from snapshot_drivers.overlay.apply import remove_paths
from snapshot_drivers.overlay.capture import Index
from snapshot_drivers.overlay.index_file import load_index, save_index
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.removal import remove
from tests.tree_walker import walk
from tests.unit.plain_tree import Tree
from tests.unit.plain_upper import PlainUpper

IMMUTABLE, APPEND, QUIET = 0x10, 0x20, 0xC0
ROOTFS = (StateKind.ROOTFS, "/")


def chattr(path: Path, flags: int) -> None:
    with beneath.closing(os.open(path, os.O_RDONLY)) as descriptor:
        write_flags(descriptor, flags)


def lsattr(path: Path) -> int:
    with beneath.closing(os.open(path, os.O_RDONLY)) as descriptor:
        return read_flags(descriptor)


def has_flags(place: Path) -> bool:
    try:
        chattr(place, IMMUTABLE)
        chattr(place, 0)
    except OSError:
        return False
    return True


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory that can be removed afterwards, whatever was set in it."""
    if os.geteuid() != 0 or not has_flags(tmp_path):
        pytest.skip("needs root, and a file system with inode flags below the temporary directory")
    yield tmp_path
    for directory, directories, files in os.walk(tmp_path):
        for path in [directory, *(os.path.join(directory, name) for name in directories + files)]:
            if os.path.isdir(path) or os.path.isfile(path):
                chattr(Path(path), 0)


@pytest.fixture
def tree(place: Path) -> Tree:
    tree = Tree(place)
    (tree.root / "d/in").mkdir(parents=True)
    for name in ("f", "log", "d/in/f", "d/g"):
        (tree.root / name).write_text(name)
    return tree


def test_files_and_directories_that_nobody_may_change_come_back_as_such(tree: Tree) -> None:
    flags = {"d/in/f": IMMUTABLE, "d/in": IMMUTABLE, "log": APPEND, "f": QUIET, "d": APPEND, ".": IMMUTABLE}
    for name, value in flags.items():
        chattr(tree.root / name, value)
    taken, before = tree.capture(), tree.lines()
    for name in reversed(flags):
        chattr(tree.root / name, 0)
    (tree.root / "f").unlink()
    (tree.root / "d/in/f").write_text("changed")
    (tree.root / "d/in/new").write_text("x")
    for _ in range(2):
        tree.restore(taken)
        assert tree.lines() == before
        assert {name: lsattr(tree.root / name) for name in flags} == flags


def test_what_was_made_immutable_since_gives_way(tree: Tree) -> None:
    taken, before = tree.capture(), tree.lines()
    (tree.root / "d/in/f").write_text("changed")
    (tree.root / "note").write_text("for after the rewind")
    (tree.root / "d/g").unlink()
    (tree.root / "d/g/deep/er").mkdir(parents=True)
    (tree.root / "d/g/deep/er/f").write_text("x")
    for name in ("d/in/f", "note", "d/g/deep/er/f", "d/g/deep/er", "d/g/deep", "d/g", "f", "d/in", "d", "."):
        chattr(tree.root / name, IMMUTABLE)
    tree.restore(taken)
    assert tree.lines() == before


@pytest.mark.parametrize("changed", ["content", "attributes", "flags"])
def test_an_immutable_file_of_several_names_comes_back_with_all_of_them(tree: Tree, changed: str) -> None:
    os.link(tree.root / "f", tree.root / "d/second")
    os.link(tree.root / "f", tree.root / "d/in/third")
    os.link(tree.root / "f", tree.root / "fourth")
    chattr(tree.root / "f", IMMUTABLE)
    taken, before = tree.capture(), tree.lines()
    chattr(tree.root / "f", 0)
    if changed == "content":
        (tree.root / "d/second").unlink()
        (tree.root / "f").write_text("changed")
        chattr(tree.root / "f", APPEND)
    elif changed == "attributes":
        os.chown(tree.root / "f", 7, 8)
        chattr(tree.root / "f", IMMUTABLE)
    tree.restore(taken)
    assert tree.lines() == before
    assert os.stat(tree.root / "f").st_nlink == 4
    assert sorted(os.listdir(tree.place)) == ["store", "tree"]


def test_a_flag_alone_is_a_difference_and_moves_nothing_else(tree: Tree) -> None:
    taken = tree.capture()
    inode, written = os.stat(tree.root / "f").st_ino, os.stat(tree.root / "f").st_mtime_ns
    chattr(tree.root / "f", QUIET)
    assert tree.scan(taken).digest != taken.digest
    tree.restore(taken)
    assert lsattr(tree.root / "f") == 0
    assert (os.stat(tree.root / "f").st_ino, os.stat(tree.root / "f").st_mtime_ns) == (inode, written)


def test_an_immutable_root_of_a_volume_and_of_a_bind_comes_back(place: Path) -> None:
    plain = PlainUpper(place / "engine")
    roots = [plain.mount(StateKind.VOLUME, "/vol", "v"), plain.mount(StateKind.BIND, "/data")]
    for root in roots:
        (root / "f").write_text("1")
        chattr(root, IMMUTABLE)
    snapshot, _ = plain.capture()
    before = [walk(str(root)) for root in roots]
    for root in roots:
        chattr(root, 0)
        (root / "f").unlink()
        (root / "note").write_text("x")
        chattr(root, IMMUTABLE)
    with plain.staged(snapshot.snapshot_id) as staged:
        staged.apply(verify="full")
    assert [walk(str(root)) for root in roots] == before
    assert [lsattr(root) for root in roots] == [IMMUTABLE, IMMUTABLE]


def test_flags_survive_the_index_in_its_file(tree: Tree) -> None:
    chattr(tree.root / "f", QUIET)
    chattr(tree.root / "d", APPEND)
    taken = tree.capture()
    save_index(tree.place, "c", Index({ROOTFS: taken}, upper=tree.place))
    assert tree.scan(load_index(tree.place, "c").trees[ROOTFS]).digest == taken.digest


def test_nothing_immutable_outlives_a_removal(tree: Tree) -> None:
    for name in ("d/in/f", "d/in", "d", "log", "."):
        chattr(tree.root / name, IMMUTABLE)
    with beneath.closing(os.open(tree.root, os.O_RDONLY)) as root:
        assert remove_paths(root, PathSet.of(["/d"])) == 4
        assert remove(root, b"log") == 1
    assert os.listdir(tree.root) == ["f"]
