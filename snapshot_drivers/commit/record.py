"""What the store keeps of a snapshot that is an image on an engine; its existence is the commit point.

``commit/<snapshot id>.json``, written after the image has its tag (temporary name, fsync, rename), removed before it.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from snapshot_drivers.base import Snapshot
from snapshot_drivers.errors import CaptureError, StoreDamaged, UnknownSnapshot
from snapshot_drivers.store.durable import create_temporary, publish, sync_directory

DIRECTORY: Final = "commit"
"""In the store."""
_SNAPSHOT_ID: Final = re.compile(r"s-[0-9a-v]{26}")
EMPTY_LAYER: Final = f"sha256:{hashlib.sha256(bytes(1024)).hexdigest()}"
"""A layer without entries: a tar file's two last blocks alone."""


class ImageRecord(BaseModel):
    """One snapshot."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = 1
    snapshot: Snapshot
    image_id: str
    """Of the snapshot."""
    layer_ids: tuple[str, ...]
    base_image_id: str
    """Of the run."""
    changes: tuple[tuple[str, int], ...]
    """Paths that differ from the run's image, sorted, with the engine's word for how."""


def state_digest(layer_ids: tuple[str, ...]) -> str:
    """Stands for a stack of layers; those that hold nothing change nothing."""
    return hashlib.sha256("\n".join(one for one in layer_ids if one != EMPTY_LAYER).encode()).hexdigest()


class Records:
    """Records by snapshot id."""

    def __init__(self, store: Path) -> None:
        """``store`` is the store directory."""
        self._directory = store / DIRECTORY
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(self, record: ImageRecord) -> None:
        """The snapshot exists. Raises: CaptureError."""
        path = self._path(record.snapshot.snapshot_id)
        temporary: Path | None = None
        try:
            temporary, file = create_temporary(path)
            with file:
                file.write(record.model_dump_json().encode("utf-8", "surrogatepass"))
                publish(temporary, file, path)
        except OSError as error:
            if temporary is not None:
                with suppress(OSError):
                    temporary.unlink()
            raise CaptureError(f"cannot write {path}: {error.strerror}") from error

    def read(self, snapshot_id: str) -> ImageRecord:
        """The record of that snapshot. Raises: UnknownSnapshot, StoreDamaged."""
        path = self._path(snapshot_id)
        try:
            record = ImageRecord.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise UnknownSnapshot(f"the store holds no snapshot {snapshot_id} (looked for {path})") from error
        except OSError as error:
            raise StoreDamaged(f"cannot read {path}: {error.strerror}") from error
        except ValidationError as error:
            raise StoreDamaged(f"{path} is damaged: {error.errors()[0]['msg']}") from error
        if record.snapshot.snapshot_id != snapshot_id:
            raise StoreDamaged(f"{path} is that of another snapshot ({record.snapshot.snapshot_id})")
        return record

    def delete(self, snapshot_id: str) -> None:
        """The snapshot is gone. Repeatable. Raises: UnknownSnapshot: that is no name of one. OSError."""
        self._path(snapshot_id).unlink(missing_ok=True)
        sync_directory(self._directory)

    def _path(self, snapshot_id: str) -> Path:
        if not _SNAPSHOT_ID.fullmatch(snapshot_id):
            raise UnknownSnapshot(f"not the name of a snapshot: {snapshot_id!r}")
        return self._directory / f"{snapshot_id}.json"
