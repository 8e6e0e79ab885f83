"""Process images in the store, and the seal without which none is restored: they are code and credentials."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final

from snapshot_drivers.criu.gateway import FEATURES
from snapshot_drivers.criu.log import LOG
from snapshot_drivers.criu.pages import WINDOW_BYTES, block_lengths
from snapshot_drivers.errors import RestoreRefused
from snapshot_drivers.store.manifest import Manifest, StoredImage, StoredProcesses

KEY: Final = "process.key"
"""In the data directory, 0600."""
_KEY_BYTES: Final = 32
_AHEAD: Final = 16
_OURS: Final = frozenset({LOG, FEATURES, "stats-dump", "stats-restore"})


def store_images(work: Path, put: Callable[[bytes], bytes], facts: str) -> StoredProcesses:
    """Every image of ``work`` is in the pack, in blocks, so that what did not change is stored once."""
    images = []
    lengths = block_lengths(work)
    for path in sorted(work.iterdir()):
        if path.name in _OURS or not path.is_file():
            continue
        size = path.stat().st_size
        cuts = lengths.get(path.name, [])
        if sum(cuts) != size:
            cuts = [WINDOW_BYTES] * -(-size // WINDOW_BYTES)
        with path.open("rb", buffering=0) as file:
            blocks = tuple(put(file.read(length)).hex() for length in cuts)
        images.append(StoredImage(name=path.name, blocks=blocks))
    return StoredProcesses(images=tuple(images), facts=facts)


def most_bytes(processes: StoredProcesses) -> int:
    """The images are no larger than this together."""
    return sum(len(image.blocks) for image in processes.images) * WINDOW_BYTES


def write_images(processes: StoredProcesses, work: Path, get: Callable[[bytes], bytes], *, keep_clock: bool) -> None:
    """The images are files in ``work``, 0600. Without ``keep_clock`` those of the tree's time namespace are left out.

    Raises: StoreDamaged: one is missing or its bytes differ. OSError: the disk is full.
    """
    for image in processes.images:
        if not keep_clock and image.name.startswith("timens-"):
            continue
        descriptor = os.open(work / image.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file, ThreadPoolExecutor(1) as writer:
            ahead: deque[Future[None]] = deque()
            for block in image.blocks:  # while one is written, the next is read and checked
                ahead.append(writer.submit(_write, file, get(bytes.fromhex(block))))
                if len(ahead) > _AHEAD:
                    ahead.popleft().result()
            for one in ahead:
                one.result()


def _write(file: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def sealed(manifest: Manifest, data_dir: Path) -> Manifest:
    """The manifest with the seal of this data directory."""
    if manifest.processes is None:
        return manifest
    seal = _seal(manifest, manifest.processes, _key(data_dir))
    return manifest.model_copy(update={"processes": manifest.processes.model_copy(update={"seal": seal})})


def check_seal(manifest: Manifest, data_dir: Path) -> None:
    """Raises: RestoreRefused: the manifest, or the list of its images, is not as this data directory wrote it."""
    if manifest.processes is None:
        return
    if not hmac.compare_digest(_seal(manifest, manifest.processes, _key(data_dir)), manifest.processes.seal):
        raise RestoreRefused(
            f"the processes of snapshot {manifest.snapshot.snapshot_id} do not carry the seal of {data_dir}: they were "
            "edited or come from elsewhere, and would run with whatever rights they claim. Nothing was touched"
        )


def _seal(manifest: Manifest, processes: StoredProcesses, key: bytes) -> str:
    blank = manifest.model_copy(update={"processes": processes.model_copy(update={"seal": ""})})
    return hmac.new(key, blank.model_dump_json().encode(), hashlib.sha256).hexdigest()


def _key(data_dir: Path) -> bytes:
    path = data_dir / KEY
    temporary = data_dir / f".{KEY}-{os.getpid()}-{secrets.token_hex(4)}"
    if not path.exists():
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another run was faster
            os.link(temporary, path)
        temporary.unlink()
    return path.read_bytes()
