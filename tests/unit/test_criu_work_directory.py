"""Images of processes on their way: nothing of them outlives its owner."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from snapshot_drivers.criu.work_directory import remove_abandoned, work_directory

TOO_LARGE_FOR_MEMORY = 1 << 60


def _die_with_images(disk: Path) -> None:
    with work_directory(disk, TOO_LARGE_FOR_MEMORY) as work:
        (work / "pages-1.img").write_bytes(b"secret")
        os._exit(9)


def test_one_on_the_disk_is_gone_after_its_block(tmp_path: Path) -> None:
    with work_directory(tmp_path, TOO_LARGE_FOR_MEMORY) as work:
        assert work.parent == tmp_path and work.stat().st_mode & 0o777 == 0o700
        (work / "pages-1.img").write_bytes(b"secret")
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_owner_left_is_removed_and_a_living_one_keeps_its_own(tmp_path: Path) -> None:
    dying = multiprocessing.get_context("spawn").Process(target=_die_with_images, args=(tmp_path,))
    dying.start()
    dying.join(60)
    assert dying.exitcode == 9 and len(list(tmp_path.glob("*/pages-1.img"))) == 1
    with work_directory(tmp_path, TOO_LARGE_FOR_MEMORY) as work:
        (work / "mine").touch()
        assert remove_abandoned(tmp_path) == 1
        assert list(tmp_path.iterdir()) == [work] and (work / "mine").exists()
