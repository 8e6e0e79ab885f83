"""The context log survives any text, any cut and any damage."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.context_log import ContextLog
from orchestrator.errors import HostError, LogDamaged
from orchestrator.events import EndEvent, NoteEvent, ToolCallEvent
from orchestrator.lineage import checkpoints, head, live_path, messages
from tests.unit.run_builder import RunBuilder

ANY_TEXT = st.text(alphabet=st.characters(codec=None, exclude_categories=()), max_size=60)


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def build(path: Path, steps: int = 3) -> RunBuilder:
    run = RunBuilder(path)
    for _ in range(steps):
        run.step("text")
    run.close()
    return run


def test_what_was_appended_is_read_back_equal(path: Path) -> None:
    run = build(path)
    read = ContextLog.open(path, "r1")
    assert read.events == run.events
    assert read.damage == []
    assert [event.seq for event in read.events] == list(range(10))


def test_the_file_is_private_and_each_line_is_ascii_json(path: Path) -> None:
    run = RunBuilder(path)
    run.step("x", result="\x00\ud800 \u2028 ä \n end")
    run.close()
    assert path.stat().st_mode & 0o777 == 0o600
    for line in lines_of(path):
        line.decode("ascii")
        assert isinstance(json.loads(line), dict)
    assert len(lines_of(path)) == len(run.events)


@settings(max_examples=150, deadline=None)
@given(ANY_TEXT)
def test_any_text_survives(text: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = RunBuilder(Path(directory) / "e")
        run.checkpoint(note=text)
        run.call(text)
        run.tool(result=text, arguments=text)
        run.close()
        read = ContextLog.open(run.log.path, "r1")
        assert read.events == run.events
        joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        last = read.events[-1]
        assert isinstance(last, ToolCallEvent)
        assert (last.result, last.arguments) == (joined, joined)


def test_a_cut_at_any_byte_leaves_all_whole_lines_and_the_next_append_readable(path: Path, tmp_path: Path) -> None:
    run = build(path, steps=1)
    end = EndEvent(step=0, parent_seq=0, status="stopped", reason=None)
    raw = path.read_bytes()
    for cut in range(len(raw) + 1):
        stump = tmp_path / "stump"
        stump.write_bytes(raw[:cut])
        whole = raw[:cut].count(b"\n")
        assert len(ContextLog.open(stump, "r1").events) == whole
        assert stump.read_bytes() == raw[:cut], "a reader changes nothing"
        with ContextLog.open(stump, "r1", writer=True) as log:
            assert [found.torn for found in log.damage] == ([True] if raw[:cut].rpartition(b"\n")[2] else [])
            log.append(end if whole else run.events[0])
        again = ContextLog.open(stump, "r1")
        assert len(again.events) == whole + 1
        assert again.events[-1].seq == whole
        assert [found.torn for found in again.damage] == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=20)), max_size=4))
def test_foreign_bytes_anywhere_never_crash_a_reader(insertions: list[tuple[int, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "e"
        build(path, steps=2)
        lines = lines_of(path)
        for at, junk in insertions:
            lines.insert(min(at, len(lines)), junk.replace(b"\n", b""))
        path.write_bytes(b"\n".join(lines) + b"\n")
        log = ContextLog.open(path, "r1")
        assert len(log.events) == 7
        assert len(log.damage) == len(insertions)
        assert len(checkpoints(log.events)) == 2


def test_a_bad_line_in_the_middle_is_named_and_later_breakpoints_stay(path: Path) -> None:
    build(path)
    lines = lines_of(path)
    lines.insert(4, b'{"v":1,"seq":')
    path.write_bytes(b"\n".join(lines) + b"\n")
    log = ContextLog.open(path, "r1")
    assert [(found.line_number, found.torn) for found in log.damage] == [(5, False)]
    at = head(log.events)
    assert at is not None
    assert len(messages(live_path(log.events, at.seq))) == 2 + 3 * 2


def test_a_lost_line_makes_what_depends_on_it_refuse_and_leaves_the_rest(path: Path) -> None:
    build(path)
    lines = lines_of(path)
    lines[5] = b"x" * len(lines[5])  # the second step's model call
    path.write_bytes(b"\n".join(lines) + b"\n")
    log = ContextLog.open(path, "r1")
    assert [found.line_number for found in log.damage] == [6, 7]
    rows = checkpoints(log.events)
    assert [row.breakpoint_id for row in rows] == [0, 1, 2]
    assert len(live_path(log.events, 4)) == 5
    with pytest.raises(LogDamaged, match="event 5"):
        live_path(log.events, 7)


def test_a_new_event_never_takes_the_number_of_a_damaged_one(path: Path) -> None:
    build(path)
    lines = lines_of(path)
    lines[-1] = b"rubbish"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with ContextLog.open(path, "r1", writer=True) as log:
        assert log.append(NoteEvent(step=1, parent_seq=0, text="x")).seq == len(lines)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run_id": "other"}, "belongs to run 'other'"),
        ({"seq": 1}, "used twice"),
        ({"seq": -4}, "negative"),
        ({"parent_seq": 99}, "cannot continue event 99"),
        ({"parent_seq": None}, "cannot continue event None"),
        ({"v": 2}, "newer orchestrator"),
        ({"surplus": 1}, "surplus"),
        ({"text": None}, "text"),
    ],
)
def test_lines_that_do_not_belong_are_damage_with_the_reason(
    path: Path, change: dict[str, object], reason: str
) -> None:
    run = RunBuilder(path)
    run.note("a")
    run.note("b")
    run.close()
    lines = lines_of(path)
    data = json.loads(lines[2]) | change
    del data["crc"]
    lines[2] = json.dumps(data).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    log = ContextLog.open(path, "r1")
    assert len(log.events) == 2
    assert log.damage[0].line_number == 3
    assert reason in log.damage[0].reason


def test_an_event_of_an_unknown_kind_keeps_its_place_in_the_chain(path: Path) -> None:
    build(path, steps=1)
    data = {"v": 1, "seq": 4, "run_id": "r1", "at": "2026-01-01T00:00:00+00:00", "step": 1, "parent_seq": 3}
    with path.open("ab") as stream:
        stream.write(json.dumps(data | {"kind": "rerun", "extra": [1]}).encode() + b"\n")
    with ContextLog.open(path, "r1", writer=True) as log:
        assert log.damage == []
        event = log.append(NoteEvent(step=1, parent_seq=4, text="after"))
    assert len(live_path(log.events, event.seq)) == 6


def test_a_full_disk_leaves_the_log_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunBuilder(path)
    before = path.read_bytes()
    real = os.write

    def half_then_full(descriptor: int, data: memoryview) -> int:
        if len(data) < 400:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:200])

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(HostError, match="No space left"):
        run.note("x" * 300)
    monkeypatch.undo()
    assert path.read_bytes() == before
    run.note("fits")
    run.close()
    assert [event.seq for event in ContextLog.open(path, "r1").events] == [0, 1]


def test_a_missing_log_and_a_link_in_its_place_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(LogDamaged, match="no such file"):
        ContextLog.open(path, "r1")
    (tmp_path / "elsewhere").write_text("")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LogDamaged, match="no regular file"):
        ContextLog.open(path, "r1", writer=True)


def test_a_reader_cannot_append(path: Path) -> None:
    build(path, steps=0)
    with pytest.raises(HostError, match="not open for writing"):
        ContextLog.open(path, "r1").append(NoteEvent(step=0, parent_seq=0, text="x"))
