"""An engine's images as streams: what ``docker save`` and ``docker load`` exchange, and where their layers lie.

Its requests may last long, so it has a connection of its own.

Source: the "Image JSON v1.2" archive that every version of the engine reads: a configuration, ``manifest.json`` and a
tar file for each layer. A layer that the engine has below the same ones need not be in it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import BinaryIO, ClassVar, Final, NamedTuple, cast

from orchestrator.engine_connection import EngineConnection
from snapshot_drivers.errors import EngineError
from snapshot_drivers.pieces import PieceFile, tar_stream

_HOURS_S: Final = 4 * 3600
MOST_CONFIG_BYTES: Final = 4 << 20
_PIECE_BYTES: Final = 1 << 20


class SavedFile(NamedTuple):
    """A file of a saved image."""

    name: str
    """Its path in what the engine sends."""
    size: int
    content: BinaryIO


class Layer(NamedTuple):
    """A layer on its way to an engine."""

    diff_id: str
    """Content address of the plain tar stream."""
    size: int
    pieces: Iterable[bytes]


class EngineImages(EngineConnection):
    """Images of one engine, out and in."""

    request_s: ClassVar[int] = _HOURS_S

    def saved(self, image_id: str) -> Iterator[SavedFile]:
        """The regular files of the saved image, in the engine's order; each is to be read before the next.

        Raises: EngineError.
        """
        doing = f"save image {image_id}"
        stream = self._call(doing, self._api.get_image, image_id)
        pieces = cast("BinaryIO", io.BufferedReader(PieceFile(self._each(doing, stream)), _PIECE_BYTES))
        try:
            with tarfile.open(fileobj=pieces, mode="r|") as tar:
                for member in tar:
                    content = tar.extractfile(member) if member.isreg() else None
                    if content is not None:
                        yield SavedFile(member.name, member.size, cast("BinaryIO", content))
        except tarfile.TarError as error:
            raise EngineError(f"the engine could not {doing}: what it sent is no tar file: {error}") from error

    def load(self, config: bytes, layers: Iterable[Layer], diff_ids: Sequence[str], tag: str | None) -> None:
        """An image of that configuration is on the engine, under that tag, or without one (to be removed if unused).

        ``layers``: of the ``diff_ids`` those that the engine may lack.

        Raises: EngineError: it was refused, or a layer's content does not fit its address.
        """
        doing = f"load image {tag or hashlib.sha256(config).hexdigest()}"
        for answer in self._call(doing, self._api.load_image, _load_stream(config, layers, diff_ids, tag)):
            if "error" in answer:
                raise EngineError(f"the engine could not {doing}: {answer['error']}")

    def plain_layers(self, image_id: str, diff_ids: Sequence[str]) -> Iterator[Layer]:
        """The layers of the image, as an engine keeps them under their own addresses; each is to be read at once.

        Raises: EngineError: it keeps some otherwise (compressed).
        """
        missing = set(diff_ids)
        for file in self.saved(image_id):
            diff_id = f"sha256:{file.name.rpartition('/')[2]}"
            if diff_id in missing:
                missing.remove(diff_id)
                yield Layer(diff_id, file.size, pieces_of(file.content))
        if missing:
            raise EngineError(
                f"the engine keeps layers of image {image_id} compressed, so no layer can be put on them: an engine on "
                "overlay2 is needed"
            )

    def layer_directories(self, image_id: str) -> tuple[str, ...]:
        """Where the image's layers lie on the engine's host, topmost first; empty: only a container's mount tells.

        Raises: EngineError.
        """
        found = self._read(f"look at image {image_id}", self._api.inspect_image, image_id)
        data = (found.get("GraphDriver") or {}).get("Data") or {}
        if "UpperDir" not in data:
            return ()
        lower = data["LowerDir"].split(":") if data.get("LowerDir") else []
        return tuple(os.path.realpath(path) for path in (data["UpperDir"], *lower))

    def configuration(self, image_id: str) -> dict[str, object]:
        """What the engine knows of an image.

        Raises: EngineError.
        """
        return dict(self._read(f"look at image {image_id}", self._api.inspect_image, image_id))

    def has(self, reference: str) -> bool:
        """An image of that name is there. Raises: EngineError."""
        return bool(self._read(f"look for image {reference}", self._api.images, name=reference, quiet=True))


def pieces_of(content: BinaryIO) -> Iterator[bytes]:
    """What is left of a file."""
    while piece := content.read(_PIECE_BYTES):
        yield piece


def _load_stream(config: bytes, layers: Iterable[Layer], diff_ids: Sequence[str], tag: str | None) -> Iterator[bytes]:
    paths = [_layer_path(diff_id) for diff_id in diff_ids]
    manifest = [{"Config": "config.json", "RepoTags": [tag] if tag is not None else None, "Layers": paths}]
    text = json.dumps(manifest).encode()
    yield from tar_stream(
        chain(
            [("config.json", len(config), (config,))],
            ((_layer_path(layer.diff_id), layer.size, layer.pieces) for layer in layers),
            [("manifest.json", len(text), (text,))],
        )
    )


def _layer_path(diff_id: str) -> str:
    return f"{diff_id.removeprefix('sha256:')}/layer.tar"
