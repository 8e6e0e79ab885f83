"""An image of a snapshot's files with one layer above the run's own, made of what the engine saves and loads.

Source: the archive of "Image JSON v1.2", and the OCI image layout beside a ``manifest.json``; engines know either.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final

from snapshot_drivers.commit.engine import FLAT, REPOSITORY, ImageEngine, NoImage
from snapshot_drivers.commit.record import ImageRecord
from snapshot_drivers.commit.squash import Squash
from snapshot_drivers.errors import RestoreError, StoreDamaged, UnsupportedHost
from snapshot_drivers.pieces import digest_of, pieces_of, plain, tar_stream

_MOST_TEXT_BYTES: Final = 4 << 20


def flat_image(engine: ImageEngine, record: ImageRecord, base: tuple[str, ...], directory: Path) -> str:
    """Id of an image of the layers ``base``, the run's own, and one more. ``directory``: for what lies in between.

    Raises: EngineError. RestoreError: no room. UnsupportedHost: the engine hands out something else than its layers.
    """
    tag = f"{REPOSITORY}:{record.snapshot.snapshot_id}{FLAT}"
    try:
        return engine.image(tag).image_id
    except NoImage:
        pass
    try:
        with ExitStack() as stack:
            layers, config = _taken_apart(engine, record, directory, stack)
            merged = stack.enter_context(tempfile.TemporaryFile(dir=directory))
            Squash(layers[len(base) :]).write(merged)
            ids = [*base, digest_of(pieces_of(merged))]
            _load(engine, tag, config, ids, [*layers[: len(base)], merged])
    except OSError as error:
        raise RestoreError(f"cannot put the layers of {tag} together: {error}; nothing was touched") from error
    image = engine.image(tag)
    if image.layer_ids != tuple(ids):
        raise StoreDamaged(f"the engine made {tag} of other layers than it was given")
    return image.image_id


def _taken_apart(
    engine: ImageEngine, record: ImageRecord, directory: Path, stack: ExitStack
) -> tuple[list[IO[bytes]], dict[str, Any]]:
    """The image's layers, lowest first, and its configuration."""
    found: dict[str, IO[bytes]] = {}
    texts: dict[str, bytes] = {}
    for name, content in engine.saved(record.image_id):
        spool = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 some are closed at once, the others by the stack
        for piece in plain(content):
            spool.write(piece)
        digest = digest_of(pieces_of(spool))
        if digest in record.layer_ids:
            found[digest] = stack.enter_context(spool)
            continue
        spool.seek(0)
        texts[name] = spool.read(_MOST_TEXT_BYTES)
        spool.close()
    if missing := set(record.layer_ids) - found.keys():
        raise UnsupportedHost(
            f"the engine does not hand out layer {min(missing)} as it was stored, so the layers of "
            f"{record.snapshot.snapshot_id} cannot be put together"
        )
    manifest = json.loads(texts["manifest.json"])[0]
    return [found[layer] for layer in record.layer_ids], json.loads(texts[manifest["Config"]])


def _load(engine: ImageEngine, tag: str, config: dict[str, Any], ids: list[str], layers: list[IO[bytes]]) -> None:
    """The image of these layers is on the engine."""
    config = {key: value for key, value in config.items() if key != "history"}
    text = json.dumps({**config, "rootfs": {"type": "layers", "diff_ids": ids}}).encode()
    paths = [f"{layer.removeprefix('sha256:')}/layer.tar" for layer in ids]
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [tag], "Layers": paths}]).encode()
    files = [
        (path, layer.seek(0, 2), pieces_of(layer)) for path, layer in dict(zip(paths, layers, strict=True)).items()
    ]
    engine.load(tar_stream([("config.json", len(text), [text]), *files, ("manifest.json", len(manifest), [manifest])]))
