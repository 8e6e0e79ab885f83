"""What runs in a container, as a coverage names it where it is not captured."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from snapshot_drivers.base import CoverageItem, CoverageState, StateKind
from snapshot_drivers.command_line import command_line

_SHOWN: Final = 20
_OWN: Final = "/.orchestrator/"
"""Begins the command lines of the product's own helpers."""


def not_captured(pids: Iterable[int], reason: str) -> list[CoverageItem]:
    """The processes of these host pids, PID 1 and our own aside, and why they are not held."""
    found = []
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
            shown = command_line(pid)
        except OSError:
            continue
        inside = next((line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")), "?")
        if inside != "1" and not shown.startswith(_OWN):
            found.append(f"pid {inside} {shown or '(no command line)'}")
    items = [process(text, CoverageState.EXCLUDED, reason) for text in found[:_SHOWN]]
    if len(found) > _SHOWN:
        items.append(process(f"{len(found) - _SHOWN} more processes", CoverageState.EXCLUDED, "as above"))
    return items


def process(path: str, state: CoverageState, reason: str) -> CoverageItem:
    """A piece of coverage of processes."""
    return CoverageItem(kind=StateKind.PROCESS, path=path, state=state, reason=reason)
