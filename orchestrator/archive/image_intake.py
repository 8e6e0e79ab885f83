"""The image in an archive on its way in: layers and configuration, by their content addresses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from orchestrator.archive import form
from orchestrator.archive.head import PackedImage
from orchestrator.archive.reader import Member
from orchestrator.archive.staging import Staging
from orchestrator.engine_images import Layer, pieces_of
from orchestrator.errors import ArchiveRefused


class ImageIntake:
    """Takes the members of one image. What is in its layers is the engine's matter, as with any image."""

    def __init__(self, staged: Staging, wanted: PackedImage) -> None:
        self.config: bytes | None = None
        """The configuration, once it came."""
        self._staged = staged
        self._wanted = wanted
        self._layers: dict[str, Path] = {}

    def layer(self, member: Member) -> None:
        """A layer. Raises: ArchiveRefused: it is none of the image's."""
        digest = hashlib.sha256()

        def hashed() -> Iterator[bytes]:
            for piece in member.pieces():
                digest.update(piece)
                yield piece

        if not self._wanted.included or len(self._layers) == len(set(self._wanted.layer_ids)):
            raise ArchiveRefused(f"{member.name}: the head says nothing of such a layer")
        name = member.name.rpartition("/")[2]
        self._staged.write(f"layers/{name}", hashed())
        layer_id = f"sha256:{digest.hexdigest()}"
        if layer_id not in self._wanted.layer_ids or layer_id in self._layers:
            raise ArchiveRefused(f"{member.name}: is no layer of the image, or stands twice")
        self._layers[layer_id] = self._staged.layers / name

    def configuration(self, member: Member) -> None:
        """The configuration. Raises: ArchiveRefused: it is that of other layers."""
        data = member.read()
        if not self._wanted.included:
            raise ArchiveRefused(f"{member.name}: the head says nothing of it")
        try:
            said = json.loads(data)
            layers, architecture = said["rootfs"]["diff_ids"], said["architecture"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ArchiveRefused(f"{member.name}: is no configuration of an image: {error!r}") from error
        if (layers, architecture) != (self._wanted.layer_ids, self._wanted.architecture):
            raise ArchiveRefused(f"{member.name}: names other layers than the head")
        self.config = data

    def finish(self) -> None:
        """Raises: ArchiveRefused: a part of the image is missing."""
        if self._wanted.included and (self.config is None or set(self._layers) != set(self._wanted.layer_ids)):
            raise ArchiveRefused(f"{form.IMAGE_CONFIG}: the image is not complete")

    def image_id(self) -> str:
        """What Docker's own store calls the image: the hash of its configuration."""
        return f"sha256:{hashlib.sha256(self.config or b'').hexdigest()}"

    def layers(self) -> Iterator[Layer]:
        """The layers, each to be read before the next."""
        for layer_id, path in self._layers.items():
            with path.open("rb") as file:
                yield Layer(layer_id, path.stat().st_size, pieces_of(file))
