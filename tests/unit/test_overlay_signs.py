"""What overlayfs itself writes into an upper directory, under every option that a host may have set: it goes back, and
is read as the container sees it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshot_drivers.base import CaptureOptions, Snapshot
from snapshot_drivers.errors import UnsupportedHost
from snapshot_drivers.overlay.changes import changes_between, file_content
from tests.tree_walker import walk
from tests.unit.mounted_upper import MountedUpper

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
OPTIONS = ["", "redirect_dir=on", "redirect_dir=on,metacopy=on", "redirect_dir=on,xino=on,nfs_export=off"]
Make = Callable[[str], MountedUpper]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[MountedUpper] = []

    def mounted(options: str) -> MountedUpper:
        box = MountedUpper(tmp_path / "engine", options)
        made.append(box)
        for name in ("a/in/f", "a/g", "b/f", "c", "sub/d/f", "sub/e"):
            (box.lower / name).parent.mkdir(parents=True, exist_ok=True)
            (box.lower / name).write_text(f"image's {name}\n")
        os.link(box.lower / "c", box.lower / "c2")
        box.start()
        return box

    yield mounted
    for box in made:
        box.kill()


def taken(box: MountedUpper) -> tuple[Snapshot, list[str]]:
    return box.capture()[0], walk(str(box.merged), leave_out=())


def move(source: Path, target: Path) -> None:
    """As ``mv`` does: it copies where the kernel refuses to rename."""
    shutil.move(source, target)


def changed_by(box: MountedUpper, snapshot: Snapshot, older: Snapshot | None = None) -> dict[str, str]:
    before = box.manifests.read(older.snapshot_id) if older else None
    found = changes_between(before, box.manifests.read(snapshot.snapshot_id), box.content.read)
    return {change.path: change.status for change in found}


def read(box: MountedUpper, snapshot: Snapshot, path: str) -> bytes | None:
    pieces = file_content(box.manifests.read(snapshot.snapshot_id), path, box.content.read)
    return None if pieces is None else b"".join(pieces)


def rename_directories(merged: Path) -> None:
    move(merged / "a", merged / "b/moved")
    (merged / "b/moved/g").write_text("changed after the move\n")
    move(merged / "sub/d", merged / "sub/beside")
    (merged / "a").mkdir()
    (merged / "a/new").write_text("where the old one was\n")
    move(merged / "b/moved/in", merged / "in")


def change_attributes(merged: Path) -> None:
    os.chmod(merged / "c", 0o600)
    os.chown(merged / "b/f", 7, 8)
    move(merged / "sub/e", merged / "renamed")


def link_lower_files(merged: Path) -> None:
    os.link(merged / "c", merged / "a/c3")
    os.link(merged / "b/f", merged / "f-hard")
    (merged / "b/f").write_text("both names\n")


def make_again(merged: Path) -> None:
    shutil.rmtree(merged / "a")
    (merged / "a").mkdir()
    (merged / "a/g").write_text("new\n")
    shutil.rmtree(merged / "sub")
    (merged / "sub").symlink_to("b")
    (merged / "b/f").unlink()
    (merged / "b/f").mkdir()
    (merged / "c").unlink()


CHANGES = [rename_directories, change_attributes, link_lower_files, make_again]


@pytest.mark.parametrize("options", OPTIONS)
def test_every_state_comes_back_from_every_other(make: Make, options: str) -> None:
    box = make(options)
    states = [taken(box)]
    for change in CHANGES:
        change(box.merged)
        states.append(taken(box))
        box.restore(states[0][0].snapshot_id)
    for which in (1, 2, 1, 4, 3, 4, 2, 3, 0, 3, 3):
        box.restore(states[which][0].snapshot_id)
        assert walk(str(box.merged), leave_out=()) == states[which][1]
        assert taken(box)[0].root_digest == states[which][0].root_digest


@pytest.mark.parametrize("options", OPTIONS)
def test_the_difference_and_the_files_are_what_the_container_sees(make: Make, options: str) -> None:
    box = make(options)
    pristine, _ = taken(box)
    rename_directories(box.merged)
    change_attributes(box.merged)
    snapshot, _ = taken(box)
    gone = {"/a/in", "/a/g", "/sub/d", "/sub/e"}  # a directory of the image stands for all that it held
    come = {"/a/new", "/b/moved", "/b/moved/g", "/in", "/in/f", "/sub/beside", "/sub/beside/f", "/renamed"}
    wanted = {**dict.fromkeys(gone, "D"), **dict.fromkeys(come, "A"), "/c": "m", "/b/f": "m"}
    found = changed_by(box, snapshot, pristine)
    if "metacopy" not in options:  # a copy that was made to change attributes alone cannot be told from another
        wanted |= {"/c": "M", "/b/f": "M"}
    assert found == changed_by(box, snapshot) == wanted
    assert changed_by(box, pristine, snapshot) == {
        path: {"A": "D", "D": "A"}.get(status, status) for path, status in wanted.items()
    }
    for path, _, names in os.walk(box.merged):
        for name in names:
            file = Path(path, name)
            assert read(box, snapshot, f"/{file.relative_to(box.merged)}") == file.read_bytes(), file
    for path in gone | {"/a/in/f", "/sub/d/f"}:
        assert read(box, snapshot, path) is None


def test_a_file_below_a_deleted_directory_is_not_read_from_the_image(make: Make) -> None:
    box = make("")
    shutil.rmtree(box.merged / "a")
    (box.merged / "b/f").unlink()
    snapshot, _ = taken(box)
    assert read(box, snapshot, "/a/in/f") is None
    assert read(box, snapshot, "/b/f") is None
    assert read(box, snapshot, "/b/f/x") is None
    assert read(box, snapshot, "/c") == b"image's c\n"


def test_an_unchanged_file_is_not_touched_by_any_restore(make: Make) -> None:
    box = make("redirect_dir=on,metacopy=on")
    for name in ("kept", "d/kept"):
        (box.merged / name).parent.mkdir(exist_ok=True)
        (box.merged / name).write_text(name)
        os.setxattr(box.merged / name, "user.k", b"v")
    first, _ = taken(box)
    before = [os.stat(box.upper / name) for name in ("kept", "d/kept")]
    rename_directories(box.merged)
    (box.merged / "d/other").write_text("x")
    second, _ = taken(box)
    for snapshot in (first, second, first, first):
        box.restore(snapshot.snapshot_id)
        for was, name in zip(before, ("kept", "d/kept"), strict=True):
            now = os.stat(box.upper / name)
            assert (now.st_ino, now.st_mtime_ns, now.st_ctime_ns) == (was.st_ino, was.st_mtime_ns, was.st_ctime_ns)


def test_flags_that_overlayfs_keeps_in_an_attribute_come_back(make: Make) -> None:
    box = make("")
    (box.merged / "f").write_text("1")
    for flags, names in (("+i", ("f", "b")), ("+a", ("c",)), ("+dA", ("a/g",))):
        subprocess.run(["chattr", flags, *(box.merged / name for name in names)], check=True)
    snapshot, before = taken(box)
    subprocess.run(["chattr", "-ia", box.merged / "f", box.merged / "b", box.merged / "c"], check=True)
    shutil.rmtree(box.merged / "b")
    (box.merged / "f").unlink()
    box.restore(snapshot.snapshot_id)
    assert walk(str(box.merged), leave_out=()) == before
    with pytest.raises(PermissionError):
        (box.merged / "f").write_text("2")
    with pytest.raises(PermissionError):
        (box.merged / "b/new").touch()


@pytest.mark.parametrize("option", ["userxattr", "index=on"])
def test_an_overlay_that_keeps_its_signs_elsewhere_is_refused(make: Make, option: str) -> None:
    box = make(option)
    with pytest.raises(UnsupportedHost, match=option):
        box.capture()


def test_excluded_and_volatile_paths_of_the_image_stay_and_come_back_as_the_images(make: Make) -> None:
    box = make("")
    box.options = CaptureOptions(excluded=("/a/in",), volatile=("/sub",))
    snapshot, _ = taken(box)
    (box.merged / "a/in/f").write_text("kept")
    shutil.rmtree(box.merged / "sub")
    (box.merged / "a/g").write_text("changed")
    box.restore(snapshot.snapshot_id)
    assert (box.merged / "a/in/f").read_text() == "kept"
    assert (box.merged / "a/g").read_text() == "image's a/g\n"
    assert (box.merged / "sub/d/f").read_text() == "image's sub/d/f\n"
