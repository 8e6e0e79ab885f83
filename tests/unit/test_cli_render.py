"""No text of a container or a model is ever obeyed by a terminal."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli.event_lines import event_line
from orchestrator.cli.live import LiveProgress, PlainProgress, Tally
from orchestrator.cli.render import console, money, one_line, seconds, show_table, size, styled, visible
from orchestrator.events import CheckpointEvent, Event, ModelCallEvent, NoteEvent, Progress, SubmissionEvent
from tests.unit.run_builder import WHOLE

ANY_TEXT = st.text(
    alphabet=st.one_of(
        st.characters(codec=None, exclude_categories=()),
        st.sampled_from("\x1b\x07\x9b\u202e\u2066\u200f\udc80[]/\\\n\t"),
    ),
    max_size=80,
)
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]"
)
MARKUP = ["[/foo]", "[link=https://example.invalid]x[/link]", "[bold red]x", ":smile:", "[@click=quit]x[/]"]


def printed(text: str, *, width: int = 200) -> str:
    stream = io.StringIO()
    out = console(stream)
    out.width = width
    out.print(styled(text, "bold"))
    return stream.getvalue()


@given(ANY_TEXT)
def test_visible_text_has_nothing_that_a_terminal_obeys(text: str) -> None:
    shown = visible(text)
    assert not OBEYED.search(shown)
    shown.encode("utf-8")


@given(st.text(alphabet=st.characters(categories=("L", "N", "P", "S", "Zs")), max_size=60))
def test_ordinary_text_is_shown_as_it_is(text: str) -> None:
    assert visible(text) == text


@given(ANY_TEXT)
def test_one_line_is_one_line(text: str) -> None:
    shown = one_line(text, 20)
    assert len(shown) <= 20
    assert "\n" not in shown
    assert not OBEYED.search(shown)


def test_what_is_spelled_out() -> None:
    assert visible("a\x1b[31m\r\x9b\x00") == "a\\x1b[31m\\x0d\\x9b\\x00"
    assert visible("\u202e \udcff \ud83d") == "\\u202e \\xff \\ud83d"
    assert visible("\n\t ä 漢 😀") == "\n\t ä 漢 😀"
    assert visible("\U000e0041") == "\\U000e0041"


@given(ANY_TEXT)
def test_printed_text_has_no_control_byte_but_line_feed_and_tab(text: str) -> None:
    data = printed(text).encode("utf-8")
    assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", data)


@pytest.mark.parametrize("text", MARKUP)
def test_markup_is_text(text: str) -> None:
    assert printed(text) == text + "\n"


@pytest.mark.parametrize("text", MARKUP)
def test_markup_in_tables_is_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["A", "B"], [[text, "x\x1b]8;;y\n"]])
    out = capsys.readouterr().out
    assert text in out
    assert "\x1b" not in out


def test_a_table_without_a_terminal_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["A"], [["x" * 500]])
    assert "x" * 500 in capsys.readouterr().out


def checkpoint_event(note: str | None = None, error: str | None = None) -> CheckpointEvent:
    return CheckpointEvent(
        at="2026-01-01T00:00:00+00:00", step=1, parent_seq=0, after=None if error else "s", breakpoint_id=3,
        checkpoint_kind="model", driver="memory", coverage=WHOLE, progress=None, note=note, error=error,
        capture_ms=12.4, frozen_ms=3.2, waited_ms=5.0, stored_bytes=2048,
    )  # fmt: skip


def model_event(text: str) -> ModelCallEvent:
    call = {"id": "1", "type": "function", "function": {"name": text, "arguments": text}}
    return ModelCallEvent(
        at="2026-01-01T00:00:00+00:00", step=1, parent_seq=0, breakpoint_id=0, model=text, parameters={},
        request_digest="", request_messages=1, response={}, finish_reason=text, usage=None, cost_usd=None,
        latency_ms=1500, attempts=2, messages=[{"role": "assistant", "content": text, "tool_calls": [call]}],
    )  # fmt: skip


def events_with(text: str) -> list[Event]:
    return [
        checkpoint_event(note=text),
        checkpoint_event(error=text),
        model_event(text),
        NoteEvent(at="2026-01-01T00:00:00+00:00", step=1, parent_seq=0, text=text),
        SubmissionEvent(
            at="2026-01-01T00:00:00+00:00", step=1, parent_seq=0, progress=Progress(satisfied=1, total=2),
            failed=text, feedback=text, duration_ms=1,
        ),
    ]  # fmt: skip


@given(ANY_TEXT)
def test_each_event_is_one_harmless_line(text: str) -> None:
    for event in events_with(text):
        line = event_line(event)
        assert "\n" not in line.text
        assert not OBEYED.search(line.text)


def test_lines_state_the_numbers() -> None:
    assert event_line(checkpoint_event()).text == "3  [12 ms, frozen 3 ms, waited 5 ms, 2.0 KiB stored]"
    assert "? tokens, 1.5 s, 2 tries" in event_line(model_event("x")).text


@given(ANY_TEXT)
def test_progress_on_a_pipe_is_one_line_for_each_event(text: str) -> None:
    stream = io.StringIO()
    watcher = PlainProgress(stream)
    for event in events_with(text):
        watcher.event(event)
    watcher.status(text)
    assert stream.getvalue().count("\n") == 6
    assert not OBEYED.search(stream.getvalue().replace("\n", ""))


def test_a_closed_pipe_does_not_end_the_run() -> None:
    stream = io.StringIO()
    stream.close()
    PlainProgress(stream).status("x")


@pytest.mark.parametrize("text", [*MARKUP, "\x1b]52;c;x\x07", "\u202e"])
def test_the_live_view_shows_foreign_text_harmlessly(text: str) -> None:
    stream = io.StringIO()
    out = console(stream)
    out.width = 200
    live = LiveProgress(out, Tally(2, 10))
    for event in events_with(text):
        live.event(event)
    live.thinking(2)
    live.status(text)
    out.print(live)
    shown = stream.getvalue()
    assert "step 1 of 10 · 0 tokens + 1 unknown · $0.0000 + 1 unknown · rewinds 0" in shown
    assert "████████████░░░░░░░░░░░░ 1/2" in shown
    assert "checkpoint 3: captured in 12 ms, frozen 3 ms, waited 5 ms, 2.0 KiB stored" in shown
    assert not OBEYED.search(shown.replace("\n", ""))


def test_a_bar_before_the_first_submission_and_without_a_checklist() -> None:
    assert Tally(3, None).bar() == "░" * 24 + " nothing submitted, 3 criteria"
    assert Tally(0, None).bar() == "none"


def test_numbers_for_people() -> None:
    assert [size(count) for count in (0, 1023, 1024, 5 * 2**30)] == ["0 B", "1023 B", "1.0 KiB", "5.0 GiB"]
    assert [seconds(value) for value in (1.25, 75, 3700)] == ["1.2 s", "1 min 15 s", "1 h 01 min"]
    assert [money(0.5, 0), money(0.5, 2)] == ["$0.5000", "$0.5000 + 2 unknown"]
