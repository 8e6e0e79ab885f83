"""Timed series and their figures."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One figure: milliseconds."""

    state: str
    what: str
    p50_ms: float
    p95_ms: float
    rounds: int


def timed(work: Callable[[int], object], rounds: int, before: Callable[[int], object] = lambda _: None) -> list[float]:
    """Milliseconds of each round, without what is done before it."""
    found = []
    for number in range(rounds):
        before(number)
        began = time.perf_counter()
        work(number)
        found.append(1e3 * (time.perf_counter() - began))
    return found


def row(state: str, what: str, times: list[float]) -> Row:
    """The figures of one series."""
    ordered = sorted(times)
    return Row(state, what, statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1], len(ordered))


def show(rows: Iterable[Row]) -> None:
    """The table on the terminal; ``times a checkpoint``: of the first row that begins so, in the same state."""
    found = list(rows)
    table = Table("state", "what", "p50 ms", "p95 ms", "times a checkpoint")
    base = {one.state: one.p50_ms for one in reversed(found) if one.what.startswith("checkpoint")}
    for one in found:
        ratio = one.p50_ms / base[one.state]
        table.add_row(one.state, one.what, f"{one.p50_ms:.1f}", f"{one.p95_ms:.1f}", f"{ratio:.1f}")
    Console().print(table)


def docker(*words: str, host: str | None = None) -> str:
    """The engine's own client has done it; ``host``: another engine's socket."""
    at = ["--host", f"unix://{host}"] if host else []
    return subprocess.run(["docker", *at, *words], check=True, capture_output=True, text=True).stdout.strip()
