"""The one gateway to what a container controls follows no link, crosses no mount, and goes to any depth."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from snapshot_drivers import beneath
from snapshot_drivers.removal import remove

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def top(tmp_path: Path) -> Iterator[int]:
    for path in ("a/b/c", "outside"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "a/b/c/f").write_text("inside")
    (tmp_path / "outside/c").mkdir()
    (tmp_path / "outside/f").write_text("outside")
    with beneath.closing(os.open(tmp_path, os.O_RDONLY)) as descriptor:
        yield descriptor


def descend(top: int, *names: bytes) -> list[bytes]:
    place = beneath.Descent(top)
    try:
        for name in names:
            place.down(name)
        return [name for name, _ in beneath.list_directory(place.fd)]
    finally:
        place.close()


def deep(levels: int, name: bytes = b"d" * 200) -> None:
    """Makes a chain of directories below the present one, in which a file stands at the bottom."""
    home = os.open(".", os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name)
        os.chdir(name)
    os.close(os.open(b"bottom", os.O_CREAT | os.O_WRONLY))
    os.fchdir(home)
    os.close(home)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("target", ["relative", "absolute", "magic"])
def test_a_link_in_any_position_is_an_error(top: int, tmp_path: Path, position: int, target: str) -> None:
    assert descend(top, b"a", b"b", b"c") == [b"f"]
    where = tmp_path.joinpath(*("a", "b", "c")[: position + 1])
    moved = where.rename(where.with_name("real"))
    where.symlink_to({"relative": "real", "absolute": str(moved), "magic": f"/proc/self/fd/{top}"}[target])
    with pytest.raises(OSError) as refused:
        descend(top, b"a", b"b", b"c")
    assert refused.value.errno in (errno.ELOOP, errno.ENOTDIR)


@pytest.mark.parametrize("position", ["a", "a/b", "a/b/c"])
def test_open_below_follows_no_link_either(top: int, tmp_path: Path, position: str) -> None:
    os.close(beneath.open_below(tmp_path, tmp_path / "a/b/c"))
    (tmp_path / position).rename(tmp_path / "real")
    (tmp_path / position).symlink_to(tmp_path / "real")
    with pytest.raises(OSError) as refused:
        beneath.open_below(tmp_path, tmp_path / "a/b/c")
    assert refused.value.errno in (errno.ELOOP, errno.ENOTDIR)


@pytest.mark.parametrize("path", ["..", "../x", "a/../..", "/etc"])
def test_open_below_leaves_the_top_for_nothing(top: int, tmp_path: Path, path: str) -> None:
    with pytest.raises(OSError, match="below"):
        beneath.open_below(tmp_path / "a", tmp_path / "a" / path)


def test_open_below_knows_names_that_begin_with_dots(tmp_path: Path) -> None:
    (tmp_path / "..strange").mkdir()
    os.close(beneath.open_below(tmp_path, tmp_path / "..strange"))


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0", b"/"])
def test_what_is_no_single_name_is_refused(top: int, name: bytes) -> None:
    for call in (beneath.open_directory, beneath.look, remove):
        with pytest.raises(ValueError, match="component"):
            call(top, name)


@needs_root
def test_a_mount_is_not_crossed(top: int, tmp_path: Path) -> None:
    subprocess.run(["mount", "--bind", tmp_path / "outside", tmp_path / "a/b"], check=True)
    subprocess.run(["mount", "--bind", tmp_path / "outside/f", tmp_path / "a/f"], check=False)
    try:
        for call in (lambda: descend(top, b"a", b"b"), lambda: descend(top, b"a", b"b", b"c")):
            with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
                call()
        with pytest.raises(OSError):
            remove(top, b"a")
        assert (tmp_path / "outside/f").read_text() == "outside"
    finally:
        subprocess.run(["umount", tmp_path / "a/b"], check=True)


def test_only_regular_files_are_opened(top: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("a/b/c/f")
    for name in (b"fifo", b"link", b"a"):
        with beneath.closing(beneath.look(top, name)) as looked, pytest.raises(OSError, match="regular"):
            beneath.open_regular(looked)


def test_a_directory_that_is_moved_while_walked_is_an_error_and_never_another_one(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    os.mkdir("elsewhere")
    deep(100, b"d")
    with beneath.closing(os.open(tmp_path, os.O_RDONLY)) as root_fd:
        place = beneath.Descent(root_fd)
        for _ in range(100):
            place.down(b"d")
        # What is above the kept descriptors moves away: going up meets another parent.
        os.rename("/".join(["d"] * 20), "elsewhere/d")
        with pytest.raises(OSError, match="moved"):
            for _ in range(100):
                place.up()
        place.close()
        place.close()
    assert not held(tmp_path)


@contextmanager
def removed_at_last(path: Path) -> Iterator[None]:
    """What is so deep that no other tool removes it is gone in any case."""
    try:
        yield
    finally:
        subprocess.run(["rm", "-rf", *path.iterdir()], check=True)


def held(path: Path) -> list[str]:
    """Descriptors of this process at or below a path."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        except OSError as error:
            assert error.errno == errno.ENAMETOOLONG
            target = str(path)
        if target.startswith(str(path)):
            found.append(name)
    return found


def test_going_down_and_up_any_depth_holds_few_descriptors(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    deep(5000)
    with beneath.closing(os.open(tmp_path, os.O_RDONLY)) as root_fd, removed_at_last(tmp_path):
        place = beneath.Descent(root_fd)
        most = 0
        for level in range(5000):
            place.down(b"d" * 200)
            if level % 500 == 499:
                most = max(most, len(held(tmp_path)))
        assert [name for name, _ in beneath.list_directory(place.fd)] == [b"bottom"]
        while place.depth:
            place.up()
        assert place.fd == root_fd
        assert most <= 64 + 5000 // 256 + 2
        assert len(held(tmp_path)) == 1
        assert remove(root_fd, b"d" * 200) == 5001
        assert os.listdir(root_fd) == []
        assert len(held(tmp_path)) == 1


def test_a_removal_goes_through_no_link_and_counts(top: int, tmp_path: Path) -> None:
    (tmp_path / "a/b/link").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "a/fifo")
    assert remove(top, b"a") == 6
    assert (tmp_path / "outside/f").read_text() == "outside"
    with pytest.raises(FileNotFoundError):
        remove(top, b"a")


def test_a_listing_starts_at_the_beginning_each_time_and_stops_where_told(top: int) -> None:
    assert [name for name, _ in beneath.list_directory(top)] == [b"a", b"outside"]
    with pytest.raises(beneath.TooManyEntries):
        beneath.list_directory(top, 1)
    assert [name for name, _ in beneath.list_directory(top)] == [b"a", b"outside"]


def test_attributes_of_links_and_nodes_are_read_without_opening_them(top: int, tmp_path: Path) -> None:
    os.setxattr(tmp_path / "outside/f", b"user.\xff", b"v\0")
    with (
        beneath.closing(beneath.open_directory(top, b"outside")) as outside,
        beneath.closing(beneath.look(outside, b"f")) as looked,
    ):
        assert beneath.read_xattrs(looked, looked=True) == (("user.\udcff", b"v\0"),)
