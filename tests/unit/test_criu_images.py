"""How images of memory are cut into blocks, and what CRIU's log is made to say."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot_drivers.criu import rpc
from snapshot_drivers.criu.log import LOG, log_reason
from snapshot_drivers.criu.pages import WINDOW_BYTES, block_lengths
from snapshot_drivers.criu.work_directory import work_directory

PAGE = 4096
Run = tuple[int, int]
"""Address and count of pages."""


def varint(number: int) -> bytes:
    return rpc.request(rpc.Kind.DUMP, {"pid": number})[5:]


def write_map(directory: Path, runs: list[Run], *, absent: list[Run] = []) -> None:  # noqa: B006
    """``pagemap-7.img`` of these runs, as CRIU writes it."""
    messages = [b"\x08\x03"]
    for address, count, flags in [*((*run, 4) for run in runs), *((*run, 1) for run in absent)]:
        messages.append(b"\x08" + varint(address) + b"\x10\x00\x20" + bytes([flags]) + b"\x28" + varint(count))
    framed = b"".join(struct.pack("<I", len(message)) + message for message in messages)
    (directory / "pagemap-7.img").write_bytes(b"magicmag" + framed)


@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 300)), min_size=1, max_size=20))
def test_blocks_make_up_the_image_and_none_crosses_a_window(
    tmp_path_factory: pytest.TempPathFactory, gaps: list[Run]
) -> None:
    directory = tmp_path_factory.mktemp("images")
    runs, page = [], 1
    for gap, count in gaps:
        runs.append(((page + gap) * PAGE, count))
        page += gap + count
    write_map(directory, runs)
    lengths = block_lengths(directory)["pages-3.img"]
    assert sum(lengths) == PAGE * sum(count for _, count in runs)
    windows = {(address + offset) // WINDOW_BYTES for address, count in runs for offset in range(0, count * PAGE, PAGE)}
    assert len(lengths) == len(windows) and max(lengths) <= WINDOW_BYTES


def test_a_heap_that_grows_moves_no_block_behind_it(tmp_path: Path) -> None:
    far = 1 << 40
    write_map(tmp_path, [(PAGE, 10), (far, 500)])
    before = block_lengths(tmp_path)["pages-3.img"]
    write_map(tmp_path, [(PAGE, 11), (far, 500)])
    assert block_lengths(tmp_path)["pages-3.img"] == [before[0] + PAGE, *before[1:]]


def test_pages_that_are_not_in_the_image_count_for_nothing(tmp_path: Path) -> None:
    write_map(tmp_path, [(PAGE, 3)], absent=[(1 << 30, 99)])
    assert block_lengths(tmp_path) == {"pages-3.img": [3 * PAGE]}


def test_the_log_is_put_into_words_and_what_is_unknown_is_quoted(tmp_path: Path) -> None:
    assert log_reason(tmp_path) == ""
    (tmp_path / LOG).write_text(
        "(00.1) all well\n(00.2)  30: Error (criu/fsnotify.c:1): fsnotify: Can't dump that handle\n"
    )
    assert log_reason(tmp_path).startswith("what it watches (inotify) was not found by a path (CRIU: ")
    (tmp_path / LOG).write_text("(00.2) Error (criu/x.c:9): something new\n")
    assert log_reason(tmp_path) == "Error (criu/x.c:9): something new"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("size_bytes", "on_disk"), [(1, False), (1 << 60, True)])
def test_images_lie_in_memory_where_there_is_enough_and_are_gone_afterwards(
    tmp_path: Path, size_bytes: int, on_disk: bool
) -> None:
    with work_directory(tmp_path, size_bytes) as place:
        (place / "pages-1.img").write_bytes(b"secret")
        assert place.stat().st_mode & 0o777 == 0o700
        assert len(list(tmp_path.iterdir())) == on_disk
        assert (place.stat().st_dev == tmp_path.stat().st_dev) == on_disk
    assert not list(tmp_path.iterdir()) and not place.exists()
