"""Over a limit a checkpoint fails with that word; what was stored before is unhurt, and the run does as it was told."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.task import load_task_data
from snapshot_drivers.base import CaptureOptions
from snapshot_drivers.errors import LimitExceeded
from snapshot_drivers.overlay.driver import OverlayDriver
from snapshot_drivers.store.collect import Collector
from snapshot_drivers.store.pack import packs_in
from tests.unit.directory_container import SUBMIT, Bench, bash
from tests.unit.plain_upper import PlainUpper

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tiny tmpfs needs root")


def write_content(upper: Path) -> None:
    for number in range(6):
        (upper / f"f{number}").write_bytes(os.urandom(1 << 20))


def write_files(upper: Path) -> None:
    for number in range(200):
        (upper / f"f{number}").touch()


def write_levels(upper: Path) -> None:
    os.makedirs(upper / "/".join("d" * 40))


def write_attributes(upper: Path) -> None:
    (upper / "f").touch()
    for number in range(20):
        os.setxattr(upper / "f", f"user.a{number}", b"x" * 100)


CASES = {
    "max_entries": (CaptureOptions(max_entries=100), write_files),
    "max_depth": (CaptureOptions(max_depth=30), write_levels),
    "max_content_bytes": (CaptureOptions(max_content_bytes=5 << 20), write_content),
    "max_xattr_bytes": (CaptureOptions(max_xattr_bytes=1000), write_attributes),
    "store_quota_bytes": (CaptureOptions(store_quota_bytes=5 << 20), write_content),
    "min_free_bytes": (CaptureOptions(min_free_bytes=1 << 60), write_content),
}


@pytest.mark.parametrize("word", CASES)
def test_a_limit_is_named_and_hurts_nothing(tmp_path: Path, word: str) -> None:
    options, write = CASES[word]
    plain = PlainUpper(tmp_path)
    (plain.upper / "before").write_text("before")
    first, index = plain.capture()
    packs = packs_in(tmp_path / "store/packs")
    write(plain.upper)
    plain.options = options
    with pytest.raises(LimitExceeded, match=word):
        plain.capture(index)
    assert packs_in(tmp_path / "store/packs") == packs
    assert plain.manifests.ids() == [first.snapshot_id]
    plain.options = CaptureOptions()
    second, _ = plain.capture(index)
    driver = OverlayDriver(tmp_path / "store")
    assert not any(driver.verify([first.snapshot_id, second.snapshot_id], content=True).values())
    driver.close()


def test_a_quota_counts_what_all_runs_store_and_gc_makes_room_under_it(tmp_path: Path) -> None:
    plain = PlainUpper(tmp_path)
    plain.options = CaptureOptions(store_quota_bytes=3 << 20)
    (plain.upper / "big").write_bytes(os.urandom(2 << 20))
    first, index = plain.capture()
    (plain.upper / "big").write_bytes(os.urandom(2 << 20))
    with pytest.raises(LimitExceeded, match="orchestrator gc"):
        plain.capture(index)
    plain.manifests.delete(first.snapshot_id)
    Collector(tmp_path / "store").run()
    plain.capture(index)


def test_what_is_stored_already_needs_no_room(tmp_path: Path) -> None:
    plain = PlainUpper(tmp_path)
    (plain.upper / "big").write_bytes(os.urandom(2 << 20))
    plain.capture()
    plain.options = CaptureOptions(store_quota_bytes=1, min_free_bytes=1 << 60)
    second, _ = plain.capture()
    assert second.stored_bytes == 0


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@needs_root
def test_a_large_capture_stops_before_the_last_room_is_taken(small: Path) -> None:
    plain = PlainUpper(small)
    with (plain.upper / "big").open("wb") as file:
        for _ in range(24):
            file.write(os.urandom(1 << 20))
    plain.options = CaptureOptions(min_free_bytes=30 << 20)
    with pytest.raises(LimitExceeded, match="min_free_bytes"):
        plain.capture()
    assert os.statvfs(small).f_bavail * 4096 > 30 << 20, "what was written before is gone"
    plain.content.close()


def limited(tmp_path: Path, on_failure: str) -> Bench:
    make_many = bash("mkdir many; for i in $(seq 300); do touch many/$i; done")
    replies = [make_many, bash("rm -r many; touch done"), SUBMIT]
    return Bench(tmp_path, replies, snapshots={"limits": {"max_entries": 200}, "on_failure": on_failure})


def test_a_run_stops_at_a_limit_unless_it_was_told_to_go_on(tmp_path: Path) -> None:
    bench = limited(tmp_path, "stop")
    result = bench.run()
    assert (result.status, result.reason) == ("failed", "engine_error")
    assert any("max_entries" in event.text for event in bench.of("engine_error"))


def test_a_run_that_degrades_goes_on_with_a_breakpoint_that_cannot_be_restored(tmp_path: Path) -> None:
    bench = limited(tmp_path, "degrade")
    assert bench.run().status == "succeeded"
    without = [event for event in bench.of("checkpoint") if event.after is None]
    assert len(without) == 1 and "max_entries" in without[0].error


@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        ({}, {"min_free_bytes": 256 * 2**20, "store_quota_bytes": None, "max_entries": 1_000_000}),
        (
            {"store_quota_bytes": "2g", "max_content_bytes": "1m"},
            {"store_quota_bytes": 2**31, "max_content_bytes": 2**20},
        ),
    ],
)
def test_the_task_says_the_limits(tmp_path: Path, limits: dict[str, Any], fields: dict[str, Any]) -> None:
    load: Callable[..., Any] = load_task_data
    data = {"name": "t", "image": "x", "agent": {"kind": "manual"}, "snapshots": {"limits": limits}}
    options = load(data, source_dir=tmp_path, environ={}).spec.snapshots.capture_options()
    assert {name: getattr(options, name) for name in fields} == fields
