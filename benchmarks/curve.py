"""A picture of a few series over one axis, as an SVG that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP = 620, 150, 70, 34
_COLOURS = ("#1f6feb", "#bf5700", "#2da44e")
_GREY = "#57606a"
_STYLE = f"font-family='sans-serif' font-size='12' fill='{_GREY}'"


@dataclass(frozen=True)
class Panel:
    """One diagram: series that share an axis from 0 on."""

    title: str
    series: dict[str, Sequence[float]]


def svg(xs: Sequence[float], panels: Sequence[Panel], x_label: str) -> str:
    """The panels below one another."""
    height = len(panels) * (_HEIGHT + _TOP + 18) + 30
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_LEFT + _WIDTH + 30} {height}' width='760'>",
        "<rect width='100%' height='100%' fill='white'/>",
    ]
    for number, panel in enumerate(panels):
        parts += _panel(xs, panel, number * (_HEIGHT + _TOP + 18))
    parts.append(
        f"<text x='{_LEFT + _WIDTH}' y='{height - 8}' text-anchor='end' {_STYLE}>{escape(x_label)}</text></svg>"
    )
    return "\n".join(parts) + "\n"


def _panel(xs: Sequence[float], panel: Panel, top: int) -> list[str]:
    most = max(max(values) for values in panel.series.values()) * 1.15 or 1.0
    floor = top + _TOP + _HEIGHT
    parts = [f"<text x='{_LEFT}' y='{top + 20}' {_STYLE} font-weight='bold'>{escape(panel.title)}</text>"]
    for share in (0.0, 0.5, 1.0):
        y = floor - share * _HEIGHT
        parts.append(f"<line x1='{_LEFT}' x2='{_LEFT + _WIDTH}' y1='{y}' y2='{y}' stroke='#d0d7de'/>")
        parts.append(f"<text x='{_LEFT - 8}' y='{y + 4}' text-anchor='end' {_STYLE}>{share * most:.3g}</text>")
        x = _LEFT + share * _WIDTH
        parts.append(f"<text x='{x}' y='{floor + 15}' text-anchor='middle' {_STYLE}>{share * xs[-1]:,.0f}</text>")
    for number, (name, values) in enumerate(panel.series.items()):
        points = " ".join(
            f"{_LEFT + x / xs[-1] * _WIDTH:.1f},{floor - value / most * _HEIGHT:.1f}"
            for x, value in zip(xs, values, strict=True)
        )
        colour = _COLOURS[number]
        parts.append(f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.5'/>")
        x = _LEFT + _WIDTH - 150 * (len(panel.series) - number)
        style = _STYLE.replace(_GREY, colour)
        parts.append(f"<text x='{x}' y='{top + 20}' {style}>{escape(name)}</text>")
    return parts
