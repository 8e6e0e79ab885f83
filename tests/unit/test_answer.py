"""The launcher's answer: whatever comes, memory is bounded and nothing but frames is taken for an answer."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.answer import BoundedOutput, FrameReader, NoFrame


def frame(kind: str, data: bytes) -> bytes:
    return struct.pack("<BI", ord(kind), len(data)) + data


def cut_up(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(0, 40)))
def test_frames_are_read_however_the_stream_is_cut(outputs: list[bytes], sizes: list[int]) -> None:
    stream = frame("s", b"12") + b"".join(frame("o", data) for data in outputs) + frame("x", b"0-")
    reader = FrameReader()
    frames = [found for piece in cut_up(stream, sizes) for found in reader.feed(piece)]
    assert frames[0] == ("s", b"12") and frames[-1] == ("x", b"0-")
    assert b"".join(data for kind, data in frames if kind == "o") == b"".join(outputs)


@pytest.mark.parametrize(
    "text",
    [
        b"OCI runtime exec failed: exec failed: cannot exec in a paused container",
        b"some other text of the engine",
        b"xyz: not found",
        frame("s", b"1" * 65),
        struct.pack("<BI", ord("o"), 2**31),
    ],
)
def test_what_is_no_frame_is_told_apart(text: bytes) -> None:
    with pytest.raises(NoFrame) as caught:
        list(FrameReader().feed(text))
    assert caught.value.args[0] == text


@given(st.lists(st.binary(max_size=300)), st.integers(0, 200))
def test_output_is_kept_whole_or_cut_in_the_middle(pieces: list[bytes], limit: int) -> None:
    whole = b"".join(pieces)
    output = BoundedOutput(limit)
    for piece in pieces:
        output.add(piece)
    kept, cut = output.value()
    if len(whole) <= limit:
        assert (kept, cut) == (whole, 0)
        return
    head, _, tail = kept.partition(b"\n[... %d bytes cut here ...]\n" % cut)
    assert whole.startswith(head) and whole.endswith(tail)
    assert len(head) + len(tail) + cut == len(whole)
    assert limit - 6 <= len(head) + len(tail) <= limit


@given(st.text(min_size=30), st.integers(8, 40))
def test_a_cut_leaves_whole_characters(text: str, limit: int) -> None:
    output = BoundedOutput(limit)
    output.add(text.encode("utf-8", "ignore"))
    output.value()[0].decode("utf-8")


def test_memory_does_not_grow_with_the_output() -> None:
    output = BoundedOutput(0)
    for _ in range(1000):
        output.add(bytes(10_000))
    assert len(output._tail) < 100_000
    assert output.value()[1] == 10_000_000
