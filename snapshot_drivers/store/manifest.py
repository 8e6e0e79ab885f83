"""The manifest of a snapshot: its existence is the commit point. ``manifests/<snapshot id>.json``, never changed.

Written after the pack that holds its content (temporary name, fsync, rename, fsync of the directory); deleted before
it.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from snapshot_drivers.base import Snapshot, StateKind
from snapshot_drivers.errors import CaptureError, StoreDamaged, UnknownSnapshot
from snapshot_drivers.store.content import sync_directory

MANIFESTS: Final = "manifests"
FORMAT_VERSION: Final = 1
_SNAPSHOT_ID: Final = re.compile(r"s-[0-9a-v]{26}")
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuv"


class StoredTree(BaseModel):
    """One captured tree: the root filesystem's upper layer, a volume, a tmpfs or a bind mount."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: StateKind
    path: str
    """Where it is mounted in the container."""
    name: str | None = None
    """A volume's name."""
    root: str
    """Hex digest of the tree."""
    entries: int


class StoredFile(BaseModel):
    """One of Docker's three files under /etc, by content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    digest: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int


class StoredImage(BaseModel):
    """One image file of captured processes, by content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    blocks: tuple[str, ...]
    """Hex digests of its pieces, in order."""


class StoredProcesses(BaseModel):
    """The processes of a snapshot: their images, what they must be again, and the mark that nobody edited either."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    images: tuple[StoredImage, ...]
    facts: str
    """JSON: what each process was, to be compared before it goes on."""
    seal: str = ""
    """HMAC of the whole manifest with this field empty, by the data directory's own key."""


class Manifest(BaseModel):
    """Everything that a restore needs to know."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT_VERSION
    snapshot: Snapshot
    image_id: str
    layer_ids: tuple[str, ...]
    architecture: str
    lower_dirs: tuple[str, ...]
    """The image's layers on the host that captured it: overlayfs' own attributes mean something only above these."""
    trees: tuple[StoredTree, ...]
    etc_files: tuple[StoredFile, ...]
    processes: StoredProcesses | None = None


def new_snapshot_id() -> str:
    """``s-`` and 26 characters: 50 bits of milliseconds, then 80 random bits; sorts by time."""
    number = (int(time.time() * 1000) << 80) | secrets.randbits(80)
    return "s-" + "".join(_DIGITS[(number >> shift) & 31] for shift in range(125, -1, -5))


class ManifestStore:
    """Manifests by snapshot id."""

    def __init__(self, root: Path) -> None:
        """``root`` is the store directory."""
        self._directory = root / MANIFESTS
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(self, manifest: Manifest) -> None:
        """The snapshot exists.

        Raises: CaptureError: it could not be written.
        """
        path = self._path(manifest.snapshot.snapshot_id)
        temporary = path.with_name(f".tmp-{path.name}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(manifest.model_dump_json())
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            sync_directory(self._directory)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise CaptureError(f"cannot write the manifest {path}: {error.strerror}") from error

    def read(self, snapshot_id: str) -> Manifest:
        """The manifest of that snapshot.

        Raises: UnknownSnapshot, StoreDamaged.
        """
        path = self._path(snapshot_id)
        try:
            text = path.read_bytes()
        except FileNotFoundError as error:
            raise UnknownSnapshot(f"the store holds no snapshot {snapshot_id} (looked for {path})") from error
        except OSError as error:
            raise StoreDamaged(f"cannot read the manifest {path}: {error.strerror}") from error
        try:
            manifest = Manifest.model_validate_json(text)
        except ValidationError as error:
            raise StoreDamaged(f"the manifest {path} is damaged: {error.errors()[0]['msg']}") from error
        if manifest.snapshot.snapshot_id != snapshot_id:
            raise StoreDamaged(f"the manifest {path} is that of another snapshot ({manifest.snapshot.snapshot_id})")
        return manifest

    def delete(self, snapshot_id: str) -> None:
        """The snapshot is gone. Repeatable."""
        with suppress(FileNotFoundError):
            self._path(snapshot_id).unlink()
            sync_directory(self._directory)

    def _path(self, snapshot_id: str) -> Path:
        if not _SNAPSHOT_ID.fullmatch(snapshot_id):
            raise UnknownSnapshot(f"not the name of a snapshot: {snapshot_id!r}")
        return self._directory / f"{snapshot_id}.json"
