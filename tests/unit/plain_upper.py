"""Plain directories in the shape of an engine's data root: capture and restore of the overlay driver without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from snapshot_drivers.base import CaptureOptions, Coverage, Mount, Snapshot, StateKind, Target
from snapshot_drivers.mountinfo import MountLine
from snapshot_drivers.namespaces import OpenedMounts
from snapshot_drivers.overlay.capture import Capture, Index
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.overlay.restore import StagedRestore
from snapshot_drivers.overlay.scan import Scanner
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import Manifest, ManifestStore, StoredTree, new_snapshot_id


class NoProcesses:
    """Stands for the freezer of a container in which nothing runs."""

    def thaw(self) -> None: ...

    def pids(self) -> list[int]:
        return []


class PlainUpper:
    """A stopped container: an upper directory, and whatever mounts a test adds. It is its own ``Lifecycle``."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.upper = top / "layer/upper"
        self.upper.mkdir(parents=True)
        (top / "layer/lower").write_text("l/none")
        self.content = ContentStore(top / "store")
        self.manifests = ManifestStore(top / "store")
        self.mounts: list[Mount] = []
        self.etc_files: tuple[tuple[str, Path], ...] = ()
        self.memory: dict[str, Path] = {}
        """Directories that stand for the memory file systems of the started container."""
        self.table: list[MountLine] = []
        """What the started container's mount table says."""
        self.options = CaptureOptions()

    def kill(self) -> None: ...

    def start(self) -> int:
        return os.getpid()

    def open_mounts(self, target: Target, paths: list[str]) -> OpenedMounts:
        roots = {path: os.open(self.memory[path], os.O_PATH) for path in paths if path in self.memory}
        return OpenedMounts(roots, self.table)

    def mount(self, kind: StateKind, path: str, name: str | None = None) -> Path:
        """Adds a mount and answers its directory."""
        place = self.top / f"mounts{path}/_data"
        place.mkdir(parents=True)
        memory = kind is StateKind.TMPFS
        self.mounts.append(Mount(kind, path, None if memory else place, name))
        if memory:
            self.memory[path] = place
        return place

    def target(self) -> Target:
        return Target(
            run_id="r",
            container_id="c" * 64,
            init_pid=None,
            engine_root=self.top,
            storage_driver="overlay2",
            upper_hint=self.upper,
            freeze_group="/none",
            image_id="i",
            layer_ids=("l",),
            architecture="a",
            mounts=tuple(self.mounts),
            etc_files=self.etc_files,
            etc_is_new=False,
            lifecycle=self,
        )

    def _parts(self) -> dict[str, Any]:
        return {"content": self.content, "freezer": NoProcesses(), "open_mounts": self.open_mounts}

    def capture(self, index: Index | None = None) -> tuple[Snapshot, Index]:
        parts = {**self._parts(), "manifests": self.manifests, "index": index or Index()}
        return Capture(self.target(), self.options, **parts).run(None)

    def snapshot_of(self, trees: dict[tuple[StateKind, str], Path]) -> Manifest:
        """The manifest of these trees, memory included, as if a running container had been captured."""
        snapshot_id, stored = new_snapshot_id(), []
        with self.content.writer(snapshot_id) as writer:
            for (kind, path), place in trees.items():
                descriptor = os.open(place, os.O_RDONLY)
                scanned = Scanner(writer.put, self.options, skip=PathSet()).scan(descriptor)
                os.close(descriptor)
                name = next((mount.name for mount in self.mounts if mount.path == path), None)
                stored.append(StoredTree(kind=kind, path=path, name=name, root=scanned.digest.hex(), entries=1))
        snapshot = Snapshot(
            snapshot_id=snapshot_id,
            parent_id=None,
            driver="overlay",
            created_at="",
            coverage=Coverage.of([]),
            root_digest="",
            entries=1,
            stored_bytes=0,
            capture_ms=0,
            frozen_ms=0,
        )
        lower = (str(self.top / "l/none"),)
        manifest = Manifest(
            snapshot=snapshot,
            image_id="i",
            layer_ids=("l",),
            architecture="a",
            lower_dirs=lower,
            trees=tuple(stored),
            etc_files=(),
        )
        self.manifests.write(manifest)
        return manifest

    @contextmanager
    def staged(self, snapshot_id: str, index: Index | None = None) -> Iterator[StagedRestore]:
        manifest = self.manifests.read(snapshot_id)
        staged = StagedRestore(self.target(), manifest, self.options, index=index or Index(), **self._parts())
        try:
            yield staged
        finally:
            staged.discard()


def descriptors(plain: PlainUpper) -> int:
    """How many this process holds, those of packs aside."""
    plain.content.close()
    return len(os.listdir("/proc/self/fd"))
