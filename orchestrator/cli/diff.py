"""What changed in a container between two breakpoints."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel, ConfigDict

from orchestrator.cli.answer import print_json, say
from orchestrator.cli.options import DataDirPath, Json, Run, existing_data_dir
from orchestrator.cli.render import console, one_line, styled
from orchestrator.cli.run_view import RunView, read_run
from orchestrator.collected import collected
from orchestrator.errors import UsageError
from orchestrator.lineage import find_checkpoint
from snapshot_drivers.base import Change

if TYPE_CHECKING:
    from orchestrator.data_dir import DataDir
    from snapshot_drivers.base import SnapshotDriver

IMAGE = "image"
"""Stands for the pristine image."""

MAX_FILE_BYTES = 2**20
MAX_FILES = 500
"""Files whose text is compared; the rest is only listed."""

_STYLES = {"A": "green", "D": "red", "M": "yellow", "T": "magenta", "m": "cyan"}


class FileDiff(BaseModel):
    """One changed path, with its text where that was asked for and can be shown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: str
    path: str
    kind: str
    text: str | None = None
    """A unified diff."""
    omitted: str | None = None
    """Why there is none."""


Side = Annotated[str, typer.Argument(help=f"A breakpoint's id, or '{IMAGE}' for the pristine image.")]


def diff(
    run: Run,
    a: Side,
    b: Side,
    content: Annotated[bool, typer.Option("--content", help="Show the changed text too.")] = False,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """List the files that differ between two breakpoints: A added, D deleted, M content, T type, m attributes."""
    place = existing_data_dir(data_dir)
    view = read_run(place, run)
    older, newer = _snapshot(view, a), _snapshot(view, b)
    if newer is None:
        raise UsageError(f"the second of the two must be a breakpoint, not '{IMAGE}': exchange them")
    driver = _driver(place, view)
    try:
        found = list(_compare(driver, older, newer, content))
    finally:
        driver.close()
    if json:
        print_json({"run_id": view.run.run_id, "a": a, "b": b, "changes": found})
    else:
        _show(found)


def _snapshot(view: RunView, side: str) -> str | None:
    if side == IMAGE:
        return None
    if not side.isascii() or not side.isdigit():
        raise UsageError(f"{side!r} is neither a breakpoint's id nor '{IMAGE}' (see: orchestrator breakpoints RUN)")
    event = find_checkpoint(view.events, int(side))
    if event.after is None:
        raise UsageError(f"breakpoint {side} has no snapshot ({event.error or 'none was taken'}): choose another")
    if when := collected(view.events).get(event.after):
        raise UsageError(f"the snapshot of breakpoint {side} was collected by gc ({when}): choose another")
    return event.after


def _driver(place: DataDir, view: RunView) -> SnapshotDriver:
    from orchestrator.stored import driver_of

    return driver_of(view.run, view.events, place.store)


def _compare(driver: SnapshotDriver, older: str | None, newer: str, content: bool) -> Iterator[FileDiff]:
    compared = 0
    for change in driver.diff(older, newer):
        entry = FileDiff(status=change.status, path=change.path, kind=change.kind.value)
        if content and change.status in "ADM":
            compared += 1
            if compared > MAX_FILES:
                entry = entry.model_copy(update={"omitted": f"more than {MAX_FILES} files differ"})
            else:
                entry = entry.model_copy(update=_text(driver, change, older, newer))
        yield entry


def _text(driver: SnapshotDriver, change: Change, older: str | None, newer: str) -> dict[str, str | None]:
    """``text``, or ``omitted`` with the reason."""
    sides = []
    for snapshot, absent in ((older, "A"), (newer, "D")):
        if change.status == absent:
            sides.append(b"")
            continue
        pieces = driver.read_file(snapshot, change.path) if snapshot is not None else None
        if pieces is None:
            reason = "the image's own content is not stored" if snapshot is None else "not a regular file"
            return {"omitted": reason}
        read = _bounded(pieces)
        if read is None:
            return {"omitted": f"larger than {MAX_FILE_BYTES} bytes"}
        sides.append(read)
    if any(b"\0" in side for side in sides):
        return {"omitted": "binary"}
    try:
        before, after = (side.decode("utf-8").splitlines(keepends=True) for side in sides)
    except UnicodeDecodeError:
        return {"omitted": "binary"}
    return {"text": _unified(before, after, change.path)}


def _unified(before: list[str], after: list[str], path: str) -> str:
    lines = []
    for line in difflib.unified_diff(before, after, fromfile=f"a{path}", tofile=f"b{path}"):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines)


def _bounded(pieces: Iterator[bytes]) -> bytes | None:
    """All pieces joined; ``None`` when they are too large."""
    total = bytearray()
    for piece in pieces:
        total += piece
        if len(total) > MAX_FILE_BYTES:
            return None
    return bytes(total)


def _show(found: list[FileDiff]) -> None:
    if not found:
        say("No file differs.")
        return
    out = console()
    for entry in found:
        place = "" if entry.kind == "rootfs" else f"  [{entry.kind}]"
        omitted = f"  ({entry.omitted})" if entry.omitted else ""
        out.print(styled(f"{entry.status} {one_line(entry.path)}{place}{omitted}", _STYLES.get(entry.status, "")))
        for line in (entry.text or "").splitlines():
            style = "green" if line.startswith("+") else "red" if line.startswith("-") else ""
            out.print(styled(f"    {line}", style))
