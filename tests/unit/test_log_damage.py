"""The context log on failing disks, under other writers, interrupts, kills and clocks that jump."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from orchestrator import context_log
from orchestrator.context_log import RESERVE_SUFFIX, ContextLog
from orchestrator.data_dir import DataDir
from orchestrator.ending import ending, time_left_s
from orchestrator.errors import Busy, HostError, LogDamaged
from orchestrator.events import EndEvent, NoteEvent, RunEvent
from orchestrator.lineage import checkpoints, head, next_breakpoint_id, status
from orchestrator.session import Session
from orchestrator.task import Limits
from orchestrator.totals import totals
from snapshot_drivers.errors import UnsupportedHost
from tests.unit.directory_container import Bench, bash
from tests.unit.run_builder import RunBuilder

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tiny tmpfs needs root")
KILLS = 200


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def note(text: str = "x") -> NoteEvent:
    return NoteEvent(step=0, parent_seq=0, text=text)


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


# --- what stands in it


@pytest.mark.parametrize(
    "text",
    ["\ud800", "\udfff\ud800", "a\u2028b\u2029c", "\x00", "\x85\x0b\x0c\x1c\x1d\x1e", "\r\n\r", "\ufeff", "\U0001f600"],
    ids=ascii,
)
def test_strange_characters_stay_on_their_line_and_come_back(path: Path, text: str) -> None:
    run = RunBuilder(path)
    run.step(text, result=text)
    run.note(text, messages=[{"role": "user", text: text}])
    run.close()
    assert len(lines_of(path)) == len(run.events) == len(path.read_text("ascii").splitlines())
    read = ContextLog.open(path, "r1")
    assert (read.events, read.damage) == (run.events, [])


def test_a_changed_character_in_a_message_is_damage_and_not_another_conversation(path: Path) -> None:
    run = RunBuilder(path)
    run.step("the secret is 42")
    run.close()
    path.write_bytes(path.read_bytes().replace(b"secret is 42", b"secret is 43"))
    log = ContextLog.open(path, "r1")
    assert [(found.line_number, found.lost) for found in log.damage] == [(3, True), (4, False)]
    assert "checksum" in log.damage[0].reason


def test_any_flipped_bit_is_found(path: Path) -> None:
    run = RunBuilder(path)
    run.note("some text")
    run.close()
    raw = path.read_bytes()
    start = raw.index(b"\n") + 1
    for position in range(start, len(raw) - 1):
        for bit in (0, 3, 6):
            changed = bytearray(raw)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            assert ContextLog.open(path, "r1").damage, (position, bit, bytes(changed[start:]))


def test_a_line_without_a_checksum_is_taken_as_it_stands(path: Path) -> None:
    run = RunBuilder(path)
    run.note("old")
    run.close()
    old = [{key: value for key, value in json.loads(line).items() if key != "crc"} for line in lines_of(path)]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    read = ContextLog.open(path, "r1")
    assert (read.events, read.damage) == (run.events, [])


@pytest.mark.parametrize("bad", [b"", b"   ", b"\x00" * 40, b"\xff\xfe", b"[1]", b"[" * 100_000])
def test_a_bad_line_in_the_middle_costs_itself_only(path: Path, bad: bytes) -> None:
    run = RunBuilder(path)
    run.step()
    run.step()
    run.close()
    lines = lines_of(path)
    lines.insert(3, bad)
    path.write_bytes(b"\n".join(lines) + b"\n")
    with ContextLog.open(path, "r1", writer=True) as log:
        assert [(found.line_number, found.torn, found.lost) for found in log.damage] == [(4, False, True)]
        assert log.append(note()).seq == 8
        assert log.line_of[8] == 9
    assert [row.damaged for row in checkpoints(log.events)] == [None, None]


def test_a_breakpoint_never_takes_the_number_of_one_that_cannot_be_read(path: Path) -> None:
    run = RunBuilder(path)
    run.step()
    run.checkpoint()
    run.close()
    lines = lines_of(path)
    lines[4] = lines[4].replace(b"model", b"modem")
    path.write_bytes(b"\n".join(lines) + b"\n")
    log = ContextLog.open(path, "r1")
    assert [row.breakpoint_id for row in checkpoints(log.events)] == [0]
    assert next_breakpoint_id(log.events, log.lost_lines_after) == 2


def test_events_of_every_kind_are_known_to_the_reader(path: Path) -> None:
    from orchestrator.events import ModelFailureEvent

    run = RunBuilder(path)
    failure = ModelFailureEvent(
        step=0, parent_seq=0, breakpoint_id=None, model="m", parameters={}, request_digest="", text="no", attempts=1,
        failed_tries=[],
    )  # fmt: skip
    run.add(failure)
    run.close()
    assert ContextLog.open(path, "r1").events[-1].kind == "model_failure"


# --- other writers, other files


def test_the_second_writer_of_a_run_gets_busy(tmp_path: Path) -> None:
    run = DataDir(tmp_path / "d").open().create_run("r1", task_text="")
    with run.lock(), pytest.raises(Busy), run.lock():
        pass


def test_a_writer_refuses_when_the_file_has_grown_behind_its_back(path: Path) -> None:
    run = RunBuilder(path)
    other = ContextLog.open(path, "r1", writer=True)
    other.append(note("theirs"))
    before = path.read_bytes()
    with pytest.raises(Busy, match="another process"):
        run.note("ours")
    assert path.read_bytes() == before
    assert [event.kind for event in run.events] == ["run"]


@pytest.mark.parametrize("how", ["removed", "replaced", "cut"])
def test_a_writer_refuses_when_its_file_is_not_its_own_any_more(path: Path, how: str) -> None:
    run = RunBuilder(path)
    run.note("one")
    raw = path.read_bytes()
    if how == "cut":
        os.truncate(path, 10)
    else:
        path.unlink()
    if how == "replaced":
        path.write_bytes(raw)
    with pytest.raises((LogDamaged, Busy)):
        run.note("two")
    assert not path.exists() or len(path.read_bytes()) <= len(raw)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
@pytest.mark.parametrize("writer", [True, False])
def test_what_is_no_regular_file_is_refused_at_once(path: Path, tmp_path: Path, kind: str, writer: bool) -> None:
    target = tmp_path / "target"
    target.write_text("theirs")
    if kind == "link":
        path.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(LogDamaged, match="no regular file"):
        ContextLog.open(path, "r1", writer=writer)
    assert target.read_text() == "theirs"


@pytest.mark.parametrize("name", ["run.json", "lock"])
def test_the_other_files_of_a_run_may_be_pipes_without_anybody_waiting(tmp_path: Path, name: str) -> None:
    run = DataDir(tmp_path / "d").open().create_run("r1", task_text="")
    os.mkfifo(run.path / name)
    run.is_locked()
    assert run.created_at()
    with pytest.raises(LogDamaged):
        run.read_record()


# --- disks


@needs_root
def test_an_append_on_a_full_disk_fails_with_the_reason_and_leaves_the_log_whole(tiny: Path) -> None:
    path = tiny / "events.jsonl"
    run = RunBuilder(path)
    filler = tiny / "filler"
    with filler.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space"):
        while True:
            stream.write(b"x" * 4096)
    with pytest.raises(HostError, match=r"No space left on device.*make room"):
        for _ in range(100):
            run.note("y" * 3000)
    count = len(run.events)
    assert path.read_bytes().endswith(b"}\n")
    end = EndEvent(step=0, parent_seq=0, status="failed", reason="engine_error", text="the disk is full")
    assert run.add(end).seq == count, "how it ended can be said: room for that was held back"
    filler.unlink()
    run.note("there is room again")
    run.close()
    read = ContextLog.open(path, "r1")
    assert (len(read.events), read.damage) == (count + 2, [])
    assert not path.with_suffix(RESERVE_SUFFIX).exists()


@needs_root
def test_a_run_whose_disk_fills_up_ends_failed_and_can_be_read_and_continued(tmp_path: Path, tiny: Path) -> None:
    replies: list[dict[str, Any]] = [bash(f"head -c 12000 /dev/zero | tr '\\0' {letter}") for letter in "abcdef" * 5]
    bench = Bench(tmp_path, replies)
    bench.session.close()
    log = ContextLog.open(tiny / "events.jsonl", "bench", writer=True)
    resources = ExitStack()
    resources.callback(log.close)
    bench.session = Session(
        bench.loaded, log, bench.container, bench.driver, check=lambda _: bench.check(), observer=bench.recorder,
        resources=resources,
    )  # fmt: skip
    bench.session.begin()
    result = bench.run()
    assert (result.status, result.reason) == ("failed", "engine_error")
    read = ContextLog.open(tiny / "events.jsonl", "bench")
    assert read.damage == []
    assert tuple(status(read.events, locked=False)) == ("failed", "engine_error")
    assert "No space left" in next(event.text for event in read.events if event.kind == "engine_error")
    subprocess.run(["mount", "-o", "remount,size=4m", tiny], check=True)
    with ContextLog.open(tiny / "events.jsonl", "bench", writer=True) as again:
        assert again.append(NoteEvent(step=0, parent_seq=0, text="x")).seq == len(read.events)


@needs_root
def test_a_read_only_data_directory_is_told_before_any_container(tiny: Path) -> None:
    place = DataDir(tiny / "data").open()
    run = place.create_run("r1", task_text="x")
    with ContextLog.open(run.events_path, "r1", writer=True) as log:
        log.append(
            RunEvent(step=0, parent_seq=None, task={}, tools=[], driver="memory", container="c", messages=[]),
        )
    subprocess.run(["mount", "-o", "remount,ro", tiny], check=True)
    place.open()
    assert len(ContextLog.open(run.events_path, "r1").events) == 1, "looking works"
    with pytest.raises(HostError, match="Read-only file system"):
        place.create_run("r2", task_text="x")
    with pytest.raises(HostError, match="Read-only file system"), run.lock():
        pass
    with pytest.raises(HostError, match="Read-only file system"):
        ContextLog.open(run.events_path, "r1", writer=True)
    from snapshot_drivers.registry import make_driver

    with pytest.raises(UnsupportedHost, match="Read-only file system"):
        make_driver("overlay", place.store)


# --- cut off


def test_an_interrupt_in_the_middle_of_an_append_leaves_no_half_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunBuilder(path)
    before = path.read_bytes()
    real = os.write

    def half(descriptor: int, data: memoryview) -> int:
        real(descriptor, data[: len(data) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(KeyboardInterrupt):
        run.note("x" * 300)
    monkeypatch.undo()
    assert path.read_bytes() == before
    monkeypatch.setattr(os, "fsync", lambda _descriptor: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run.note("y")
    monkeypatch.undo()
    run.note("after")
    run.close()
    read = ContextLog.open(path, "r1")
    assert ([event.seq for event in read.events], read.damage) == ([0, 1], [])


def test_a_writer_may_be_killed_at_any_moment(path: Path) -> None:
    """What it confirmed is there, in order, once; what was cut off never happened; the next one goes on."""
    RunBuilder(path).close()
    pick = random.Random(34)
    confirmed = 0
    torn = 0
    for _ in range(KILLS):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                with ContextLog.open(path, "r1", writer=True) as log:
                    while True:
                        event = log.append(note("z" * pick.choice((10, 3000, 60_000))), sync=False)
                        os.write(writing, b"%d\n" % event.seq)
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading, "rb") as answers:
            answers.readline()
            time.sleep(pick.random() * 0.003)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            rest = answers.read().split()
        log = ContextLog.open(path, "r1")
        torn += any(found.torn for found in log.damage)
        assert all(found.torn for found in log.damage)
        assert [event.seq for event in log.events] == list(range(len(log.events)))
        confirmed = max([confirmed, *(int(number) for number in rest)])
        assert log.events[-1].seq >= confirmed
        if len(log.events) > 15:
            os.truncate(path, len(path.read_bytes().split(b"\n")[0]) + 1)
            confirmed = 0
    assert torn < KILLS


# --- clocks


class Clock(datetime):
    """A wall clock that a test sets."""

    shift = timedelta()

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.now(tz) + cls.shift


@pytest.mark.parametrize("jump", [timedelta(days=-400), timedelta(days=400)])
def test_a_clock_that_jumps_changes_no_duration_number_or_order(
    path: Path, monkeypatch: pytest.MonkeyPatch, jump: timedelta
) -> None:
    monkeypatch.setattr(context_log, "datetime", Clock)
    monkeypatch.setattr(Clock, "shift", timedelta())
    run = RunBuilder(path)
    run.step("one")
    monkeypatch.setattr(Clock, "shift", jump)
    run.step("two")
    assert 0 <= totals(run.events).duration_s < 60
    times = [datetime.fromisoformat(event.at) for event in run.events]
    assert times == sorted(times)
    limits = Limits(wall_time_s=3600)
    assert ending(run.events, run.events, limits, run.log.now()) is None
    left_s = time_left_s(run.events, limits, run.log.now())
    assert left_s is not None and 3500 < left_s <= 3600
    run.close()
    again = RunBuilder(path)
    again.step("three")
    assert totals(again.events).duration_s >= 0
    assert [row.breakpoint_id for row in checkpoints(again.events)] == [0, 1, 2]
    at = head(again.events)
    assert at is not None and at.seq == again.events[-1].seq == 9
    assert ending(again.events, again.events, Limits(), datetime.now(UTC)) is None
