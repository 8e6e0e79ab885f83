"""Commands for the store as a whole: gc, fsck."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.answer import print_json, say
from orchestrator.cli.options import DataDirPath, Json, existing_data_dir
from orchestrator.cli.render import size
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.data_dir import DataDir
    from orchestrator.store.collect import Collection
    from orchestrator.store.fsck import FileSystemCheck

_DAMAGED = 4
_SHOWN = 20


def gc(
    last: Annotated[
        int | None,
        typer.Option(
            min=0, help="Keep of each run its newest N checkpoints, its live path and those with a note only."
        ),
    ] = None,
    live_path: Annotated[
        bool, typer.Option("--live-path/--no-live-path", help="With --last: whether the live path is kept.")
    ] = True,
    notes: Annotated[
        bool, typer.Option("--notes/--no-notes", help="With --last: whether checkpoints with a note are kept.")
    ] = True,
    accept_damage: Annotated[
        bool, typer.Option("--accept-damage", help="Go on although a damaged snapshot may need what is removed.")
    ] = False,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Remove snapshots that no run keeps, and their content; compress the rest. Runs may go on meanwhile."""
    from orchestrator.snapshot_spec import Retention
    from orchestrator.store.collect import GarbageCollection

    retention = None if last is None else Retention(live_path=live_path, notes=notes, last=last)
    place = _with_a_store(data_dir)
    found = GarbageCollection(place, retention=retention).run(accept_damage=accept_damage)
    if json:
        print_json(found)
    else:
        _show_collection(found)


def fsck(
    repair: Annotated[
        bool,
        typer.Option(
            "--repair/--no-repair", help="Put damaged packs aside, so that their content can be stored again."
        ),
    ] = True,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Read the whole store, check every run against it, and name the breakpoints that damage touches."""
    from orchestrator.store.fsck import fsck as check

    found = check(_with_a_store(data_dir), repair=repair)
    if json:
        print_json(found)
    else:
        _show_check(found)
    raise typer.Exit(0 if found.whole else _DAMAGED)


def _with_a_store(given: Path | None) -> DataDir:
    """Raises: UsageError: there is none yet. HostError."""
    place = existing_data_dir(given)
    if not place.store.exists():
        raise UsageError(f"there is no store in {place.root} yet: choose another --data-dir")
    return place


def _show_collection(found: Collection) -> None:
    for run in found.runs:
        say(f"run {run.run_id}: {run.snapshots} snapshots collected, {run.kept} kept")
    if found.unnamed:
        say(f"{found.unnamed} snapshots that no run knows were removed")
    for run_id in found.driven:
        say(f"run {run_id} is being driven: its snapshots were kept")
    for run_id in found.unreadable:
        say(f"run {run_id} cannot be read in full and may name any snapshot: nothing that no log names was removed")
    for pack in found.damaged_packs:
        say(f"pack {pack} is damaged and was left as it is (see: orchestrator fsck)")
    say(
        f"content: {size(found.bytes_before)} in {found.packs_before} packs → {size(found.bytes_after)} in "
        f"{found.packs_after}"
    )


def _show_check(found: FileSystemCheck) -> None:
    for pack in found.damaged_packs:
        put = (
            "left in the store" if pack.moved_to is None else f"{pack.rescued} objects saved, moved to {pack.moved_to}"
        )
        say(f"pack {pack.pack}: {pack.reason}: {put}")
    for snapshot_id, reason in found.damaged_manifests.items():
        say(f"snapshot {snapshot_id}: {reason}")
    for run in found.damaged_runs:
        for problem in run.problems[:_SHOWN]:
            say(f"run {run.run_id}: {problem.file}{'' if problem.line is None else f':{problem.line}'}: {problem.text}")
        if len(run.problems) > _SHOWN:
            say(f"run {run.run_id}: and {len(run.problems) - _SHOWN} more (see: orchestrator verify {run.run_id})")
        lost = ", ".join(str(one.breakpoint_id) for one in run.breakpoints) or "none"
        say(f"run {run.run_id}: breakpoints that cannot be restored: {lost}")
    if found.lost_objects:
        say(f"{found.lost_objects} objects are lost until a capture meets their content again and stores it")
    if found.cache_remade:
        say("the cache of locations did not fit the packs and was made anew; nothing is lost by that")
    verdict = "whole" if found.whole else "DAMAGED"
    say(
        f"{verdict}: {found.objects} objects ({size(found.content_bytes)}) in {found.packs} packs, "
        f"{found.snapshots} snapshots, {found.runs} runs"
    )
