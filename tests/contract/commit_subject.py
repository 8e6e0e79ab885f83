"""The container of the overlay driver's subject, for the commit driver: of the engine's host it is told nothing."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import docker.errors

from snapshot_drivers.base import Mount, Snapshot, StateKind, Target
from snapshot_drivers.commit.driver import CommitDriver
from snapshot_drivers.commit.engine import DEFAULT_ENGINE, REPOSITORY
from snapshot_drivers.overlay.layers import find_layers
from tests.contract.overlay_subject import OverlaySubject
from tests.tree_walker import ENGINE_OWNED, walk

_NOT_LOOKED_AT: Final = (b"/usr", b"/var", b"/lib", b"/bin", b"/sbin", b"/etc", b"/tm", b"/vol")
"""The suite changes nothing there; the last three are where the engine makes mount points and links of its own."""
_MTIME: Final = re.compile(r"( \d+:\d+ -?\d+?)\d{9} ")


class CommitSubject(OverlaySubject):
    """See ``Subject``. Its tree is what an image holds: whole seconds of times, and the root filesystem alone."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory)
        self.options_of_driver = {"engine": os.environ.get("DOCKER_HOST") or DEFAULT_ENGINE, **options}
        self.replace(self.image_id)
        self.sh("mkdir -p /w")
        self.reopen()

    def reopen(self) -> None:
        self.driver.close()
        self.driver = CommitDriver(self.directory / "store", **self.options_of_driver)  # type: ignore[assignment]

    def target(self) -> Target:
        others = (Mount(StateKind.TMPFS, "/dev", None), Mount(StateKind.TMPFS, "/dev/shm", None))
        nowhere = {"engine_root": Path("/nonexistent"), "storage_driver": "unknown", "upper_hint": None}
        return replace(super().target(), image_id=self.image_id, layer_ids=self.layer_ids, mounts=others, **nowhere)

    def restore(self, snapshot: Snapshot, verify: str = "difference") -> None:
        """Without having the engine read the whole image each time: the suite looks at the tree itself."""
        super().restore(snapshot, "difference")

    @property
    def image_id(self) -> str:
        return str(self.holder.attrs["Image"])

    @property
    def layer_ids(self) -> tuple[str, ...]:
        return tuple(self.client.images.get(self.image_id).attrs["RootFS"]["Layers"])

    def replace(self, image_id: str) -> Target:
        """See ``Lifecycle``."""
        self.container.reload()
        old = self.container.attrs
        request = {**old["Config"], "Image": image_id, "HostConfig": old["HostConfig"]}
        for key in ("Hostname", "Domainname", "Volumes"):
            request.pop(key)
        self.container.remove(force=True)
        made = self._client_api.create_container_from_config(request, self.name)
        self.container = self.client.containers.get(made["Id"])
        self.start()
        return self.target()

    @property
    def upper(self) -> Path:
        return find_layers(super().target()).upper

    def tree(self) -> list[str]:
        return [_MTIME.sub(r"\1 ", line) for line in walk(self.root, (*ENGINE_OWNED, *_NOT_LOOKED_AT))]

    def close(self) -> None:
        super().close()
        client = docker.from_env()
        for path in (self.directory / "store/commit").glob("s-*.json"):
            for tag in (path.stem, f"{path.stem}-flat"):
                with suppress(docker.errors.APIError):
                    client.images.remove(f"{REPOSITORY}:{tag}")
        client.close()

    def damage_content(self) -> None:
        """A bit of each file in the topmost layer of each image of a snapshot."""
        for image in self.client.images.list(REPOSITORY):
            layer = Path(image.attrs["GraphDriver"]["Data"]["UpperDir"])
            for path in filter(Path.is_file, (layer / "w").rglob("*")):
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
