"""A plain upper directory with a real overlay mounted above it, as the kernel mounts a container's."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.unit.plain_upper import PlainUpper


class MountedUpper(PlainUpper):
    """``merged`` is what a container would see; the image below it is ``lower``. Killed, it is not mounted."""

    def __init__(self, top: Path, options: str = "") -> None:
        super().__init__(top)
        self._options = options
        self.lower = top / "image"
        self.merged = top / "layer/merged"
        for directory in (self.lower, self.merged, top / "layer/work", top / "layer-init"):
            directory.mkdir()
        # The topmost is the engine's own, for the mount points of the container.
        self._layers = f"{top / 'layer-init'}:{self.lower}"
        (top / "layer/lower").write_text(self._layers)

    def kill(self) -> None:
        """See ``Lifecycle``."""
        if self.merged.is_mount():
            subprocess.run(["umount", self.merged], check=True)

    def start(self) -> int:
        """See ``Lifecycle``."""
        layers = f"lowerdir={self._layers},upperdir={self.upper},workdir={self.top / 'layer/work'}"
        words = ["mount", "-t", "overlay", "overlay", "-o", ",".join(filter(None, [layers, self._options]))]
        subprocess.run([*words, self.merged], check=True)
        return super().start()

    def restore(self, snapshot_id: str) -> None:
        """Every byte of it is proven."""
        with self.staged(snapshot_id) as staged:
            staged.apply(verify="full")
