"""Large raw answers in files of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.aside import DIRECTORY, INLINE_BYTES, put_aside, taken_back
from orchestrator.errors import LogDamaged

LARGE = {"body": "x hunter2 \ud800" * INLINE_BYTES}


def redacted(text: str) -> str:
    return text.replace("hunter2", "<secret>")


def test_what_is_small_stays_where_it_is(tmp_path: Path) -> None:
    small = {"body": "x"}
    assert put_aside(tmp_path, small, redacted) is small and taken_back(tmp_path, small) is small
    assert list(tmp_path.iterdir()) == []


def test_what_is_large_comes_back_without_secrets(tmp_path: Path) -> None:
    one = put_aside(tmp_path, LARGE, redacted)
    assert put_aside(tmp_path, LARGE, redacted) == one, "repeatable"
    assert len(list((tmp_path / DIRECTORY).iterdir())) == 1
    assert taken_back(tmp_path, one) == {"body": redacted(LARGE["body"])}


@pytest.mark.parametrize("damage", [b"", b"no gzip", None])
def test_a_damaged_or_missing_file_is_named(tmp_path: Path, damage: bytes | None) -> None:
    one = put_aside(tmp_path, LARGE, redacted)
    file = tmp_path / DIRECTORY / one["aside"]
    file.unlink() if damage is None else file.write_bytes(damage)
    with pytest.raises(LogDamaged, match=file.name):
        taken_back(tmp_path, one)
