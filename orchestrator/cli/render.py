"""How foreign text reaches a terminal: made visible, never as markup, never as control codes.

Task names, tool output, file names, notes and error messages come from a container or a model. They pass through
``visible`` and are printed as plain text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction marks
    "\u2028\u2029\ufeff\ufff9-\ufffb"  # separators, byte order mark, interlinear annotation
    "\U000e0000-\U000e007f"  # tags: text that shows nothing
    "\ud800-\udfff]"
)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def visible(text: str) -> str:
    """``text`` with everything that a terminal would obey, or that would hide or reorder text, spelled out.

    Line feeds and tabs stay. Bytes that were no UTF-8 (surrogate escapes) show as hexadecimal, like control characters.
    """
    return _INVISIBLE.sub(_spelled, text)


def _spelled(match: re.Match[str]) -> str:
    code = ord(match.group())
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def one_line(text: str, limit: int = 0) -> str:
    """``visible`` text on one line; longer than ``limit`` characters (0: no limit) it ends in ``…``."""
    flat = visible(text).replace("\n", "⏎").replace("\t", " ")
    return flat if not limit or len(flat) <= limit else flat[: limit - 1] + "…"


def console(stream: TextIO | None = None) -> Console:
    """A console that interprets nothing in what it prints; ``stream``: instead of standard output."""
    from rich.console import Console

    return Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=True)


def styled(text: str, style: str = "") -> Text:
    """Foreign text in one style."""
    from rich.text import Text

    return Text(visible(text), style=style)


def show_table(columns: list[str], rows: list[list[str]], *, right: frozenset[str] = frozenset()) -> None:
    """A table of foreign text on standard output; columns named in ``right`` are aligned to the right.

    Without a terminal nothing is wrapped or cut: lines are as long as they need to be.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column, justify="right" if column in right else "left", overflow="fold", no_wrap=column in right
        )
    for row in rows:
        table.add_row(*(styled(one_line(cell)) for cell in row))
    out = console()
    if not out.is_terminal:
        out = console()
        out.width = 10_000
    out.print(table, soft_wrap=False)


def size(count: int) -> str:
    """A number of bytes for a person."""
    value = float(count)
    for unit in _UNITS[:-1]:
        if value < 1024:
            return f"{int(value)} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"


def money(known_usd: float, unknown: int) -> str:
    """Known costs, and how many calls have none."""
    text = f"${known_usd:.4f}"
    return f"{text} + {unknown} unknown" if unknown else text


def seconds(value: float) -> str:
    """A duration for a person."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"
