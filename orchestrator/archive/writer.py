"""Writes an archive under a temporary name; it has its own name once it is whole and on the disk."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from orchestrator.archive.form import END, header, padding
from orchestrator.context_log import sync_directory
from orchestrator.errors import HostError, UsageError


class ArchiveWriter:
    """An archive in the making."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def add(self, name: str, data: bytes) -> None:
        """A member. Raises: OSError."""
        self.add_stream(name, len(data), (data,))

    def add_stream(self, name: str, size: int, pieces: Iterable[bytes]) -> None:
        """A member of that size. Raises: OSError."""
        self._stream.write(header(name, size))
        written = 0
        for piece in pieces:
            self._stream.write(piece)
            written += len(piece)
        if written != size:
            raise OSError(5, f"{written} bytes came of {size}", name)
        self._stream.write(padding(size))

    def end(self) -> None:
        """Nothing follows. Raises: OSError."""
        self._stream.write(END)


@contextmanager
def new_archive(path: Path) -> Iterator[ArchiveWriter]:
    """What is added in the block is the archive at ``path``, readable to us alone; after an error there is none.

    Raises: UsageError: something is there. HostError: it cannot be written.
    """
    if os.path.lexists(path):
        raise UsageError(f"{path} exists: remove it, or give another name to --to")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "wb", buffering=1 << 20) as stream:
                writer = ArchiveWriter(stream)
                yield writer
                writer.end()
                stream.flush()
                os.fsync(stream.fileno())
            os.link(temporary, path)  # unlike a rename, it replaces nothing
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(path.parent)
    except FileExistsError as error:
        raise UsageError(f"{path} exists: remove it, or give another name to --to") from error
    except OSError as error:
        raise HostError(f"{path}: the archive cannot be written: {error.strerror}") from error
