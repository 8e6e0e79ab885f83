"""The manifest of a snapshot: its existence is the commit point. ``manifests/<snapshot id>.json``, never changed.

Written after the pack that holds its content (temporary name, fsync, rename, fsync of the directory); deleted before
it. Who writes one holds the store since before it looked for the first object (``ContentStore.hold``).
"""

from __future__ import annotations

import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from snapshot_drivers.base import Snapshot, StateKind
from snapshot_drivers.errors import CaptureError, StoreDamaged, UnknownSnapshot
from snapshot_drivers.store.durable import create_temporary, publish, sync_directory
from snapshot_drivers.store.lock import StoreLock

MANIFESTS: Final = "manifests"
FORMAT_VERSION: Final = 1
_SNAPSHOT_ID: Final = re.compile(r"s-[0-9a-v]{26}")
_SUFFIX: Final = ".json"
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
    run_id: str = ""
    """The run for which it was taken: as long as that is driven, its log may be about to name it."""
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
        self._lock = StoreLock(root)

    def ids(self) -> list[str]:
        """All snapshots that exist, oldest first.

        Raises: OSError.
        """
        names = (path.stem for path in self._directory.iterdir() if path.suffix == _SUFFIX)
        return sorted(name for name in names if _SNAPSHOT_ID.fullmatch(name))

    def write(self, manifest: Manifest) -> None:
        """The snapshot exists.

        Raises: CaptureError: it could not be written.
        """
        path = self._path(manifest.snapshot.snapshot_id)
        temporary: Path | None = None
        try:
            with self._lock.shared():
                temporary, file = create_temporary(path)
                with file:
                    file.write(manifest.model_dump_json().encode())
                    publish(temporary, file, path)
        except OSError as error:
            if temporary is not None:
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

    def delete(self, *snapshot_ids: str) -> None:
        """These snapshots are gone. Repeatable."""
        for snapshot_id in snapshot_ids:
            self._path(snapshot_id).unlink(missing_ok=True)
        sync_directory(self._directory)

    def _path(self, snapshot_id: str) -> Path:
        if not _SNAPSHOT_ID.fullmatch(snapshot_id):
            raise UnknownSnapshot(f"not the name of a snapshot: {snapshot_id!r}")
        return self._directory / (snapshot_id + _SUFFIX)
