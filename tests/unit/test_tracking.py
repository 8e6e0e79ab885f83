"""Captures and restores that look at changed entries alone: they lose nothing, and notice when they cannot know."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshot_drivers import beneath
from snapshot_drivers.inode_flags import write_flags
from snapshot_drivers.overlay import tracking
from snapshot_drivers.overlay.audit import Audit
from snapshot_drivers.overlay.tracker import TrackerLost
from tests.built_helpers import built_helpers
from tests.tree_walker import walk
from tests.unit.tracked_upper import TrackedUpper

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a mark on a file system and a mount need root")


@pytest.fixture
def upper() -> Iterator[TrackedUpper]:
    with tempfile.TemporaryDirectory(prefix="tracking-", dir="/var/tmp") as place:
        made = TrackedUpper(Path(place))
        try:
            yield made
        finally:
            made.close()


def fill(merged: Path, flat: int = 600) -> None:
    """A large directory, some small ones, one of a lower layer."""
    (merged / "flat").mkdir()
    for number in range(flat):
        (merged / "flat" / f"f{number}").write_text(str(number))
    for name in ("a/b/c", "d/e", "g"):
        (merged / name).mkdir(parents=True)
        (merged / name / "file").write_text(name)


def test_what_rests_is_not_listed_again(upper: TrackedUpper, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(upper.merged)
    upper.take()
    first = upper.take()
    listed: list[int] = []
    listing = beneath.list_directory
    monkeypatch.setattr(beneath, "list_directory", lambda *words: listed.append(words[0]) or listing(*words))
    (upper.merged / "flat/new").write_text("x")
    (upper.merged / "d/e/file").write_text("changed")
    second = upper.take()
    assert not listed
    assert upper.tree.reread == 2
    assert first.root_digest != second.root_digest == upper.whole().root_digest
    assert second.entries == first.entries + 1


def lines(upper: TrackedUpper) -> list[str]:
    """The walker's; which of its signs overlayfs has linked to one inode is its own affair."""
    return [re.sub(r"( 20000 0:0 .*) b'.*'  ", r"\1 b''  ", line) for line in walk(str(upper.upper))]


CHANGES: dict[str, Callable[[Path], object]] = {
    "a directory moves": lambda at: os.rename(at / "a/b", at / "g/moved"),
    "a directory moves to where the walk comes first": lambda at: os.rename(at / "d/e", at / "a/moved"),
    "directories change places": lambda at: (
        os.rename(at / "a", at / "x"),
        os.rename(at / "d", at / "a"),
        os.rename(at / "x", at / "d"),
    ),
    "a directory goes and comes": lambda at: (
        shutil.rmtree(at / "a"),
        (at / "a").mkdir(),
        (at / "a/n").write_text("1"),
    ),
    "a file becomes a directory": lambda at: ((at / "g/file").unlink(), (at / "g/file/deep").mkdir(parents=True)),
    "a directory becomes a file": lambda at: (shutil.rmtree(at / "d"), (at / "d").write_text("1")),
    "a tree is copied in": lambda at: shutil.copytree(at / "flat", at / "g/copy"),
    "a name is added": lambda at: os.link(at / "flat/f1", at / "g/second"),
    "a file of the image is removed": lambda at: (at / "image").unlink(),
    "a file of the image changes": lambda at: (at / "image").write_text("x"),
    "an attribute is set": lambda at: os.setxattr(at / "a/b", "user.k", b"v"),
    "the root's mode changes": lambda at: at.chmod(0o700),
    "half of a large directory goes": lambda at: [(at / f"flat/f{number}").unlink() for number in range(0, 600, 2)],
    "most of it goes": lambda at: [(at / f"flat/f{number}").unlink() for number in range(590)],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=[name.replace(" ", "-") for name in CHANGES])
def test_what_changed_is_captured_as_by_a_whole_walk(upper: TrackedUpper, change: Callable[[Path], object]) -> None:
    upper.kill()
    (upper.lower / "image").write_text("of the image")
    upper.start()
    fill(upper.merged)
    for _ in range(2):
        first = upper.take()
    before = lines(upper)
    change(upper.merged)
    second = upper.take()
    assert second.root_digest == upper.whole().root_digest != first.root_digest
    assert (second.entries, upper.take().root_digest) == (upper.whole().entries, second.root_digest)
    after = lines(upper)
    for path in upper.merged.rglob("file"):
        if path.is_file():
            path.write_text("and once more")
            assert upper.take().root_digest == upper.whole().root_digest
    for snapshot, wanted in ((first, before), (second, after)):
        upper.go_back(snapshot)
        assert lines(upper) == wanted
        assert upper.take().root_digest == upper.whole().root_digest == snapshot.root_digest


def test_a_large_directory_changes_a_little_again_and_again(upper: TrackedUpper) -> None:
    fill(upper.merged, 1500)
    chance, taken = random.Random(1), []
    for _ in range(12):
        for _ in range(chance.randrange(1, 20)):
            path = upper.merged / f"flat/f{chance.randrange(2000)}"
            if path.exists() and chance.random() < 0.5:
                path.unlink()
            else:
                path.write_text(str(chance.random()))
        taken.append((upper.take(), lines(upper)))
        assert taken[-1][0].root_digest == upper.whole().root_digest
    for snapshot, wanted in chance.sample(taken, 6):
        upper.go_back(snapshot)
        assert lines(upper) == wanted


def test_a_restore_that_is_not_carried_out_costs_the_next_capture_nothing_but_time(upper: TrackedUpper) -> None:
    fill(upper.merged)
    first = upper.take()
    (upper.merged / "flat/f1").write_text("x")
    second = upper.take()
    (upper.merged / "flat/f2").write_text("y")
    with upper.staged(first.snapshot_id, upper.index):
        pass
    third = upper.take()
    assert second.root_digest != third.root_digest == upper.whole().root_digest


def test_a_change_that_nobody_reported_ends_the_tracker(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory(prefix="tracking-", dir="/var/tmp") as place:
        upper = TrackedUpper(Path(place), make_audit=lambda: Audit(one_in=1, budget_s=60))
        try:
            fill(upper.merged, 30)
            file = upper.merged / "flat/f7"
            with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 1) as mapped:
                time.sleep(0.05)  # no racily clean entry is left
                for _ in range(2):
                    upper.take()
                with caplog.at_level(logging.ERROR):
                    mapped[0:1] = b"!"  # by a process that the capture does not know of
                    missed = upper.take()
                assert missed.root_digest == upper.whole().root_digest
                assert "missed a change of /flat/f7" in caplog.text
                assert upper.tracking.tracker is None
            (upper.merged / "flat/f8").write_text("later")
            assert upper.take().root_digest == upper.whole().root_digest
        finally:
            upper.close()


def test_a_tracker_that_is_killed_is_missed_and_started_again(upper: TrackedUpper) -> None:
    fill(upper.merged)
    for _ in range(2):
        upper.take()
    died = upper.tracker.pid
    (upper.merged / "flat/f1").write_text("before")
    os.kill(died, signal.SIGKILL)
    while upper.tracker.is_alive:
        time.sleep(0.01)
    (upper.merged / "flat/f2").write_text("after")
    assert upper.take().root_digest == upper.whole().root_digest
    assert upper.tracker.pid != died
    (upper.merged / "flat/f3").write_text("again")
    assert upper.take().root_digest == upper.whole().root_digest
    assert upper.tree.reread == 1


def test_a_tracker_that_is_silent_is_not_waited_for(upper: TrackedUpper) -> None:
    fill(upper.merged)
    for _ in range(2):
        upper.take()
    silent = upper.tracker.pid
    os.kill(silent, signal.SIGSTOP)
    (upper.merged / "flat/f1").write_text("x")
    assert upper.take().root_digest == upper.whole().root_digest
    assert not Path(f"/proc/{silent}").exists()


def test_a_tracker_does_not_outlive_its_owner(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from snapshot_drivers.overlay.tracker import Tracker; "
        "print(Tracker.start(os.open(sys.argv[1], os.O_RDONLY), Path(sys.argv[2])).pid, flush=True); os.kill(0, 9)"
    )
    words = [sys.executable, "-c", program, str(tmp_path), str(built_helpers() / "tracker")]
    done = subprocess.run(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], start_new_session=True)
    tracker = Path(f"/proc/{int(done.stdout)}")
    deadline = time.monotonic() + 30
    while tracker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_flood_overflows_the_kernels_queue_and_all_is_walked(upper: TrackedUpper) -> None:
    fill(upper.merged)
    for _ in range(2):
        upper.take()
    os.kill(upper.tracker.pid, signal.SIGSTOP)
    most = int(Path("/proc/sys/fs/fanotify/max_queued_events").read_text())
    names = upper.merged.parent / "flood-a", upper.merged.parent / "flood-b"
    names[0].write_text("")
    for number in range(most // 2 + 10):
        os.rename(names[number % 2], f"{names[(number + 1) % 2]}")
        os.utime(names[(number + 1) % 2])
        os.truncate(names[(number + 1) % 2], number)
    (upper.merged / "flat/f1").write_text("after the flood")
    os.kill(upper.tracker.pid, signal.SIGCONT)
    assert upper.take().root_digest == upper.whole().root_digest
    (upper.merged / "flat/f2").write_text("later")
    assert upper.take().root_digest == upper.whole().root_digest
    assert upper.tree.reread == 1, "after a whole walk it is believed again"


def test_the_memory_of_a_tracker_is_bounded(upper: TrackedUpper) -> None:
    fill(upper.merged, 10)
    upper.take()
    upper.tracker.changes()
    place = upper.merged.parent
    names = [place / f"{number:0250}" for number in range(35_000)]
    names[0].write_text("")
    for name, following in itertools.pairwise(names):
        os.rename(name, following)
    rss_bytes = int(Path(f"/proc/{upper.tracker.pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    assert rss_bytes < 40 << 20
    with pytest.raises(TrackerLost, match="more changed"):
        upper.tracker.changes()
    (place / "after").write_text("")
    assert b"after" in [name for _, name in upper.tracker.changes().names([place.stat().st_ino])]


def test_flags_that_nobody_reports_are_seen_by_the_next_whole_walk(
    upper: TrackedUpper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_BELIEVED_CAPTURES", 3)
    fill(upper.merged)
    for _ in range(2):
        upper.take()
    with (upper.merged / "flat/f1").open("rb") as file:
        write_flags(file.fileno(), 0x40)
    upper.take()
    assert upper.take().root_digest == upper.whole().root_digest


def test_two_runs_on_one_file_system_do_not_take_each_others_word(upper: TrackedUpper) -> None:
    with tempfile.TemporaryDirectory(prefix="tracking-", dir="/var/tmp") as place:
        other = TrackedUpper(Path(place))
        try:
            for one in (upper, other):
                fill(one.merged)
            for _ in range(2):
                upper.take(), other.take()
            for number, one in enumerate((upper, other)):
                (one.merged / "flat/f1").write_text(f"of {number}")
            for one in (upper, other):
                assert one.take().root_digest == one.whole().root_digest
                assert one.tree.reread == 1
        finally:
            other.close()
