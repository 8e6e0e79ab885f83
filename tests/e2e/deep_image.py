"""An image of as many layers as an engine takes, made without building: a ``docker save`` archive of tiny layers."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TAG = "contract-deep:latest"


@contextmanager
def deep_image(client: Any, base: str, layers: int) -> Iterator[str]:
    """Name of an image with that many layers on top of ``base``; each writes ``/layers/<number>`` and ``/newest``."""
    below = client.images.get(base).attrs
    made = [_layer(number) for number in range(1, layers + 1)]
    known = below["RootFS"]["Layers"]
    new = [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in made]
    config = {
        "architecture": below["Architecture"],
        "os": "linux",
        "config": {"Env": below["Config"]["Env"]},
        "rootfs": {
            "type": "layers",
            "diff_ids": [*known, *new],
        },
    }
    # The engine has the layers of the base already, so it does not ask for their files.
    names = [f"known-{number}.tar" for number in range(len(known))] + [f"{number}.tar" for number in range(layers)]
    manifest = [{"Config": "config.json", "RepoTags": [TAG], "Layers": names}]
    files = {f"{number}.tar": data for number, data in enumerate(made)}
    files |= {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
    client.images.load(_archive(files))
    try:
        yield TAG
    finally:
        client.images.remove(TAG)


def _layer(number: int) -> bytes:
    content = b"%d\n" % number
    return _archive({f"layers/{number}": content, "newest": content})


def _archive(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return made.getvalue()
