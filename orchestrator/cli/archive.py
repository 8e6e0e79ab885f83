"""Commands that take a run elsewhere: pack and unpack (an archive), image (an image of the engine)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.answer import print_json, say, warn
from orchestrator.cli.change import Breakpoint
from orchestrator.cli.options import DataDirPath, Json, Run, TrustTask, connect, connect_images, existing_data_dir
from orchestrator.cli.options import data_dir as data_dir_of
from orchestrator.cli.render import size
from orchestrator.context_log import ContextLog
from orchestrator.errors import HostError

if TYPE_CHECKING:
    from orchestrator.engine import Engine
    from orchestrator.engine_images import EngineImages

_SHOWN = 10

AtBreakpoint = Annotated[
    int | None, typer.Argument(metavar="BREAKPOINT", help="Pack the run as it was there, with the way to it alone.")
]


def pack(
    run: Run,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The archive to be made.")],
    breakpoint_id: AtBreakpoint = None,
    without_image: Annotated[
        bool, typer.Option("--without-image", help="Leave the image's layers out; only their ids are compared later.")
    ] = False,
    with_memory: Annotated[
        bool, typer.Option("--with-memory", help="Pack the memory of processes too: it may hold any secret.")
    ] = False,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Put a run into one archive: log, task, snapshots, and the image's layers."""
    from orchestrator.archive.packing import pack as write

    place = existing_data_dir(data_dir)
    found = place.find(run)
    images = None if without_image else connect_images()
    try:
        result = write(
            found,
            place.store,
            to,
            environ=os.environ,
            breakpoint_id=breakpoint_id,
            images=images,
            processes=with_memory,
        )
    finally:
        if images is not None:
            images.close()
    _warn_of_secrets(result.secrets, "the archive")
    if result.processes:
        warn("the archive holds the memory of processes, with whatever secrets they knew")
    if json:
        print_json(result)
        return
    layers = "with the image's layers" if result.image else "without the image's layers"
    say(
        f"packed run {result.run_id} into {result.file}: {size(result.file_bytes)}, {len(result.breakpoints)} "
        f"breakpoints, {result.snapshots} snapshots, {layers}"
    )
    if result.left_out:
        say(f"not in it: the snapshots of breakpoints {', '.join(map(str, result.left_out))}")
    for name, count in sorted(result.attributes_left_out.items()):
        say(f"not in it: the attribute {name} of {count} entries")


def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An archive that 'pack' made.")],
    run_id: Annotated[str | None, typer.Option("--as", metavar="ID", help="Give the run another id.")] = None,
    trust_task: TrustTask = False,
    trust_processes: Annotated[
        bool, typer.Option("--trust-processes", help="Let a restore run the memory of processes that is in it.")
    ] = False,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Make a run out of an archive; nothing in it is believed unless it was checked."""
    from orchestrator.archive.unpacking import unpack as take

    place = data_dir_of(data_dir).open()
    try:
        with file.open("rb") as stream:
            result = take(
                stream,
                place,
                connect=_connect,
                run_id=run_id,
                trust_task=trust_task,
                trust_processes=trust_processes,
            )
    except OSError as error:
        raise HostError(f"{file}: the archive cannot be read: {error.strerror}") from error
    if result.processes_dropped:
        warn("the memory of processes was left out: pass --trust-processes if you vouch for who made the archive")
    if json:
        print_json(result)
        return
    renamed = f" (packed as {result.packed_as})" if result.packed_as != result.run_id else ""
    origin = "loaded from the archive" if result.image_loaded else "the engine had it"
    say(f"unpacked run {result.run_id}{renamed}: {len(result.breakpoints)} breakpoints; image: {origin}")
    say(f"see: orchestrator breakpoints {result.run_id}   ·   orchestrator restore {result.run_id} BREAKPOINT")


def image(
    run: Run,
    breakpoint_id: Breakpoint,
    tag: Annotated[str, typer.Option(metavar="NAME", help="The image's name, such as fixed:latest.")],
    accept_partial: Annotated[
        bool, typer.Option("--accept-partial", help="Leave out what the checkpoint, or an image, cannot hold.")
    ] = False,
    json: Json = False,
    data_dir: DataDirPath = None,
) -> None:
    """Make an ordinary image from a breakpoint: its root filesystem, without secrets and without mounts."""
    from orchestrator.image_export import export_image

    place = existing_data_dir(data_dir)
    found = place.find(run)
    events = ContextLog.open(found.events_path, found.run_id).events
    images = connect_images()
    try:
        result = export_image(
            found,
            events,
            place.store,
            breakpoint_id,
            tag,
            images=images,
            environ=os.environ,
            accept_partial=accept_partial,
        )
    finally:
        images.close()
    _warn_of_secrets(result.secrets, "the image")
    for text in result.left_out[:_SHOWN]:
        warn(f"not in the image: {text}")
    if json:
        print_json(result)
        return
    layer = f"a layer of {size(result.layer_bytes)}"
    say(f"image {result.tag} ({result.image_id[7:19]}): breakpoint {breakpoint_id} as {layer} on the run's image")
    if result.not_included:
        say(f"not in it, since it was mounted: {', '.join(result.not_included)}")


def _connect() -> tuple[Engine, EngineImages]:
    return connect(), connect_images()


def _warn_of_secrets(names: list[str], where: str) -> None:
    for name in names:
        warn(f"the value of the secret {name} stands in files: {where} holds it; give it to nobody who may not know it")
