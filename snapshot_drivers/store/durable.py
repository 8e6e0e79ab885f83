"""Files that are whole once they have their name: written under a temporary one, synced, renamed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Final

TEMPORARY: Final = ".tmp-"
"""Begins the names of files that are being written, by holders of the store's lock alone (see ``lock``)."""


def sync_directory(path: Path) -> None:
    """Names created or renamed in the directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_temporary(path: Path) -> tuple[Path, BinaryIO]:
    """A new file, 0600, that ``publish`` will give the name ``path``; its present name and the open file.

    Raises: OSError.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    return temporary, os.fdopen(os.open(temporary, flags, 0o600), "wb", buffering=1 << 20)


def publish(temporary: Path, file: BinaryIO, path: Path) -> None:
    """What was written to ``file`` stands at ``path``, where nothing was, and survives a power cut; else it does not.

    Raises: OSError.
    """
    file.flush()
    os.fsync(file.fileno())
    temporary.rename(path)
    try:
        sync_directory(path.parent)
    except OSError:
        path.unlink()  # nobody was told of it yet
        raise
