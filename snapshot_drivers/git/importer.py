"""The stream that is handed to ``git fast-import``: blobs, then the commit that names them.

Source: git-fast-import(1), "Input Format".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import IO, Final

_PIECE_BYTES: Final = 1 << 20


def object_id(kind: str, size: int, pieces: Iterable[bytes]) -> bytes:
    """The name that git gives to an object of that content."""
    digest = hashlib.sha256(b"%s %d\0" % (kind.encode(), size))
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


class Importer:
    """Writes the stream of one ``git fast-import``."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.stored: set[bytes] = set()
        """Names of the blobs that were handed over."""
        self.stored_bytes = 0

    def blob(self, size: int, pieces: Iterable[bytes]) -> bytes | None:
        """A blob is stored; its name, or ``None`` where the pieces were not ``size`` bytes."""
        digest = hashlib.sha256(b"blob %d\0" % size)
        self._stream.write(b"blob\ndata %d\n" % size)
        left = size
        for piece in pieces:
            kept = piece[:left]
            digest.update(kept)
            self._stream.write(kept)
            left -= len(kept)
        complete = not left
        while left:
            self._stream.write(bytes(min(left, _PIECE_BYTES)))
            left -= min(left, _PIECE_BYTES)
        self._stream.write(b"\n")
        self.stored_bytes += size
        self.stored.add(digest.digest())
        return digest.digest() if complete else None

    def commit(
        self,
        ref: str,
        message: bytes,
        at_s: int,
        parent: str | None,
        removed: Iterable[bytes],
        changed: Iterable[tuple[bytes, int, bytes]],
    ) -> None:
        """A commit of the parent's files with these changes: paths removed; paths with mode and blob."""
        self._stream.write(b"commit %s\ncommitter orchestrator <> %d +0000\n" % (ref.encode(), at_s))
        self._stream.write(b"data %d\n%s\n" % (len(message), message))
        if parent is not None:
            self._stream.write(b"from %s\n" % parent.encode())
        for path in removed:
            self._stream.write(b"D %s\n" % _quoted(path))
        for path, mode, blob in changed:
            self._stream.write(b"M %o %s %s\n" % (mode, blob.hex().encode(), _quoted(path)))
        self._stream.write(b"\n")


def _quoted(path: bytes) -> bytes:
    escaped = path.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")
    return b'"' + escaped + b'"'
