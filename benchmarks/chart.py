"""The figures as a chart: a bar a series, states one below the other, time on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import Final

from benchmarks.series import Row

_LINE, _LABEL, _WIDTH, _TOP, _RIGHT = 20, 300, 560, 34, 90
_OWN: Final = ("#1b6ca8", ("checkpoint", "restore", "of which"))
_OTHER: Final = "#b9b9b9"


def chart(rows: Iterable[Row]) -> str:
    """An SVG document of the medians."""
    found = list(rows)
    low = 10 ** math.floor(math.log10(min(one.p50_ms for one in found)))
    high = 10 ** math.ceil(math.log10(max(one.p50_ms for one in found)))
    parts: list[str] = []
    at, state = _TOP, ""
    for one in found:
        if one.state != state:
            state = one.state
            at += _LINE
            parts.append(_text(8, at + 14, state, weight="bold"))
            at += _LINE
        width = max(1.0, _place(one.p50_ms, low, high))
        colour = _OWN[0] if one.what.startswith(_OWN[1]) else _OTHER
        parts.append(f'<rect x="{_LABEL}" y="{at + 3}" width="{width:.1f}" height="{_LINE - 6}" fill="{colour}"/>')
        parts.append(_text(_LABEL - 8, at + 14, one.what, anchor="end"))
        parts.append(_text(_LABEL + width + 6, at + 14, f"{one.p50_ms:,.1f} ms"))
        at += _LINE
    height, total = at + 12, _LABEL + _WIDTH + _RIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{total}" height="{height}" fill="white"/>',
            *_scale(low, high, height),
            *parts,
            "</svg>",
            "",
        ]
    )


def _place(value: float, low: float, high: float) -> float:
    return _WIDTH * math.log10(value / low) / math.log10(high / low)


def _scale(low: float, high: float, height: int) -> Iterable[str]:
    value = low
    while value <= high:
        x = _LABEL + _place(value, low, high)
        yield f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{height - 8}" stroke="#e4e4e4"/>'
        yield _text(x, _TOP - 8, f"{value:g} ms", anchor="middle")
        value *= 10


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
