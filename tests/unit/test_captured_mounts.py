"""What stands in the coverage of a mount, and what a restore does to it: on plain directories, without an engine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from snapshot_drivers.base import CaptureOptions, CoverageItem, CoverageState, Sharer, Snapshot, StateKind
from snapshot_drivers.errors import RestoreRefused
from snapshot_drivers.mountinfo import parse_mountinfo
from snapshot_drivers.overlay.layers import Layers
from snapshot_drivers.overlay.sources import open_sources
from tests.unit.plain_upper import PlainUpper

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the engine's directories must belong to root")
TABLE = b"""\
1 0 0:1 / / rw - overlay overlay rw
2 1 0:2 / /proc rw - proc proc rw
3 2 0:3 / /proc/acpi rw - tmpfs tmpfs rw
4 1 0:4 / /dev rw - tmpfs tmpfs rw
5 4 0:5 / /dev/pts rw - devpts devpts rw
6 4 0:6 / /dev/shm rw - tmpfs shm rw
7 1 0:7 /hosts /etc/hosts rw - ext4 /dev/sda rw
8 1 0:7 /lib /usr/lib/gpu ro,nosuid - ext4 /dev/sda rw
9 1 0:8 / /mine\\012x rw - tmpfs tmpfs rw
10 6 0:9 / /dev/shm rw - tmpfs tmpfs rw
"""


@pytest.fixture
def plain(tmp_path: Path) -> PlainUpper:
    return PlainUpper(tmp_path / "engine")


def items(snapshot: Snapshot, path: str) -> list[CoverageItem]:
    return [item for item in snapshot.coverage.items if item.path == path]


@pytest.mark.parametrize("volatile", ["/data/vol", "/data"])
def test_a_volume_on_or_below_a_volatile_path_is_not_stored_and_is_emptied(plain: PlainUpper, volatile: str) -> None:
    place, other = plain.mount(StateKind.VOLUME, "/data/vol", "v"), plain.mount(StateKind.VOLUME, "/data-2", "w")
    plain.options = CaptureOptions(volatile=(volatile,))
    (plain.upper / "data").mkdir()
    (plain.upper / "data/vol").mkdir()
    for root in (place, other):
        (root / "f").write_bytes(os.urandom(100_000))
    place.chmod(0o750)
    snapshot, _ = plain.capture()
    assert snapshot.stored_bytes < 150_000
    assert items(snapshot, "/data/vol")
    assert all(item.state is CoverageState.EXCLUDED and item.reason for item in items(snapshot, "/data/vol"))
    assert [item.state for item in items(snapshot, "/data-2")] == [CoverageState.CAPTURED]
    (place / "d").mkdir()
    (place / "d/cache").write_text("x")
    place.chmod(0o700)
    (other / "f").unlink()
    with plain.staged(snapshot.snapshot_id) as staged:
        staged.apply(verify="full")
    assert os.listdir(place) == []
    assert place.stat().st_mode & 0o777 == 0o750
    assert os.listdir(other) == ["f"]


def test_a_volume_of_other_containers_is_captured_and_not_restored(plain: PlainUpper) -> None:
    place = plain.mount(StateKind.VOLUME, "/vol", "v")
    (place / "f").write_text("1")
    (own,) = plain.mounts
    plain.mounts = [replace(own, shared_with=(Sharer("asleep", False),))]
    snapshot, _ = plain.capture()
    assert [item.state for item in items(snapshot, "/vol")] == [CoverageState.CAPTURED]
    plain.mounts = [replace(own, shared_with=(Sharer("asleep", False), Sharer("busy", True)))]
    beside, _ = plain.capture()
    assert [item.state for item in items(beside, "/vol")] == [CoverageState.CAPTURED, CoverageState.UNKNOWN]
    assert "busy" in (items(beside, "/vol")[1].reason or "")
    assert "asleep" not in (items(beside, "/vol")[1].reason or "")
    (place / "f").write_text("2")
    with pytest.raises(RestoreRefused, match=r"asleep \(stopped\), busy"), plain.staged(snapshot.snapshot_id):
        pass
    assert (place / "f").read_text() == "2"
    plain.mounts = [own]
    with plain.staged(snapshot.snapshot_id) as staged:
        staged.apply()
    assert (place / "f").read_text() == "1"


def test_what_the_container_mounted_itself_is_named(plain: PlainUpper, tmp_path: Path) -> None:
    for path in ("/dev", "/dev/shm"):
        plain.mount(StateKind.TMPFS, path)
    (tmp_path / "hosts").touch()
    plain.etc_files = (("/etc/hosts", tmp_path / "hosts"),)
    plain.table = parse_mountinfo(TABLE)
    running = replace(plain.target(), init_pid=1)
    with open_sources(running, Layers(plain.upper, (), plain.top / "layer/merged"), plain.open_mounts) as sources:
        found = sources.left_out
    assert [item.path for item in found] == ["/mine\nx", "/dev/shm"]
    assert all(item.state is CoverageState.EXCLUDED and "gone after a restore" in str(item.reason) for item in found)
