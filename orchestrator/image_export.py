"""Makes an ordinary image of the engine from a checkpoint: the run's image and one layer on it."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from pydantic import BaseModel, ConfigDict

from orchestrator.engine_images import EngineImages, Layer, pieces_of
from orchestrator.errors import HostError, Refused, UsageError
from orchestrator.events import Event
from orchestrator.lineage import find_checkpoint
from orchestrator.run_dir import RunDir
from orchestrator.task import LoadedTask, load_recorded
from snapshot_drivers.base import CoverageState, StateKind
from snapshot_drivers.overlay.image_layer import ImageLayer, apparent_bytes
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import Manifest, ManifestStore

_OF_A_CONTAINER: Final = frozenset(
    {"Hostname", "Domainname", "AttachStdin", "AttachStdout", "AttachStderr", "OpenStdin", "StdinOnce", "Tty", "Image"}
)
"""What a configuration says of a container, not of an image."""
_SHORTEST_SECRET: Final = 6


class ExportedImage(BaseModel):
    """What ``image`` answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    breakpoint_id: int
    tag: str
    image_id: str
    layer_bytes: int
    """Of the layer on the run's image."""
    left_out: list[str]
    """Entries of the root filesystem that are not in the image, with the reason."""
    not_included: list[str]
    """Mounts of the container, whose content belongs to no image."""
    secrets: list[str]
    """Secrets of the task whose values stand in files of the image."""


def export_image(
    run: RunDir,
    events: Sequence[Event],
    store: Path,
    breakpoint_id: int,
    tag: str,
    *,
    images: EngineImages,
    environ: Mapping[str, str],
    accept_partial: bool = False,
) -> ExportedImage:
    """An image of that tag shows the root filesystem of the checkpoint, with the task's user, directory and variables.

    Not its secrets, nor what was mounted: volumes, memory file systems, binds.

    Raises: UsageError: no such checkpoint, or the tag is in use. Refused: the checkpoint, or an image, cannot hold all
        of it. UnknownSnapshot, StoreDamaged, RestoreRefused, EngineError, HostError.
    """
    checkpoint = find_checkpoint(events, breakpoint_id)
    if checkpoint.after is None:
        raise UsageError(f"breakpoint {breakpoint_id} has no snapshot ({checkpoint.error}): choose another one")
    manifest = ManifestStore(store).read(checkpoint.after)
    task = load_recorded(run.task_path, source_dir=run.path, environ=environ)
    if not accept_partial:
        _refuse_incomplete(manifest, breakpoint_id)
    if images.has(tag):
        raise UsageError(f"image {tag} exists: choose another --tag, or remove it (docker rmi {tag})")
    content = ContentStore(store)
    try:
        layer = ImageLayer(bytes.fromhex(_rootfs(manifest)), content.read)
        with tempfile.TemporaryFile(dir=store) as spool:
            _check_room(apparent_bytes(layer.root, content.read), spool)
            digest, size, secrets = _spool(layer, spool, task.secrets)
            if layer.left_out and not accept_partial:
                named = "; ".join(layer.left_out[:5])
                raise Refused(f"an image cannot hold all of it: {named}: pass --accept-partial to leave that out")
            base = images.configuration(manifest.image_id)
            diff_ids = [*manifest.layer_ids, digest]
            said = f"orchestrator image {run.run_id} {breakpoint_id}"
            config = json.dumps(_configuration(base, task, diff_ids, said=said, at=checkpoint.at)).encode()
            # Docker's own store has the layers below; containerd's wants to be given them again.
            is_enough = images.layer_directories(manifest.image_id)
            below = () if is_enough else images.plain_layers(manifest.image_id, manifest.layer_ids)
            spool.seek(0)
            images.load(config, itertools.chain(below, [Layer(digest, size, pieces_of(spool))]), diff_ids, tag)
    except OSError as error:
        raise HostError(f"{store}: the layer cannot be written: {error.strerror}: see to the disk there") from error
    finally:
        content.close()
    return ExportedImage(
        run_id=run.run_id,
        breakpoint_id=breakpoint_id,
        tag=tag,
        image_id=f"sha256:{hashlib.sha256(config).hexdigest()}",
        layer_bytes=size,
        left_out=layer.left_out,
        not_included=[f"{tree.kind} {tree.path}" for tree in manifest.trees if tree.kind is not StateKind.ROOTFS],
        secrets=secrets,
    )


def _refuse_incomplete(manifest: Manifest, breakpoint_id: int) -> None:
    lost = [
        f"{item.kind} {item.path}: {item.reason}"
        for item in manifest.snapshot.coverage.items
        if item.kind is StateKind.ROOTFS and item.state in (CoverageState.MISSING, CoverageState.UNKNOWN)
    ]
    if lost:
        raise Refused(
            f"breakpoint {breakpoint_id} does not hold all of the root filesystem ({'; '.join(lost[:5])}): pass "
            "--accept-partial to leave that out"
        )


def _rootfs(manifest: Manifest) -> str:
    return next(tree.root for tree in manifest.trees if tree.kind is StateKind.ROOTFS)


def _check_room(wanted: int, spool: BinaryIO) -> None:
    disk = os.fstatvfs(spool.fileno())
    free = disk.f_bavail * disk.f_frsize
    if wanted > free:
        raise HostError(
            f"the layer would have {wanted} bytes (in an image holes of sparse files are zeros), {free} are free"
        )


def _spool(layer: ImageLayer, spool: BinaryIO, secrets: Mapping[str, str]) -> tuple[str, int, list[str]]:
    """The layer is in the file; its content address, its size, and the secrets whose values are in it."""
    digest, size = hashlib.sha256(), 0
    values = {name: value.encode() for name, value in secrets.items() if len(value) >= _SHORTEST_SECRET}
    found: set[str] = set()
    for piece in layer.pieces():
        digest.update(piece)
        size += len(piece)
        spool.write(piece)
        found.update(name for name, value in values.items() if value in piece)
    spool.flush()
    return f"sha256:{digest.hexdigest()}", size, sorted(found)


def _configuration(
    base: Mapping[str, Any], task: LoadedTask, diff_ids: list[str], *, said: str, at: str
) -> dict[str, Any]:
    """The configuration of the run's image, with what the task says of user, directory and variables."""
    spec = task.spec
    config = {key: value for key, value in (base.get("Config") or {}).items() if key not in _OF_A_CONTAINER}
    variables = dict(item.split("=", 1) for item in config.get("Env") or () if "=" in item)
    variables |= spec.env_for_exec({})
    config |= {
        "Env": [f"{name}={value}" for name, value in variables.items()],
        "User": spec.user,
        "WorkingDir": spec.workdir,
    }
    below = [{"created": base.get("Created"), "created_by": f"layer of {base['Id']}"} for _ in diff_ids[:-1]]
    return {
        "architecture": base["Architecture"],
        "os": base["Os"],
        "created": at,
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
        "history": [*below, {"created": at, "created_by": said}],
    }
