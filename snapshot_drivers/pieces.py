"""Pieces of streams: as a file, hashed, unpacked, and written as tar files."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, Final

_PIECE_BYTES: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"


class PieceFile(io.RawIOBase):
    """Reads pieces one after the other."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        super().__init__()
        self._pieces = iter(pieces)
        self._rest = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer from the next piece; 0 at the end."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = piece
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def read(self, size: int = -1) -> bytes:
        """``size`` bytes, fewer only at the end: a tar file's reader expects that."""
        found = bytearray()
        while len(found) < size:
            piece = super().read(size - len(found))
            if not piece:
                break
            found += piece
        return bytes(found)


def tar_stream(files: Iterable[tuple[str, int, Iterable[bytes]]]) -> Iterator[bytes]:
    """A tar file of regular files: name, size and content of each."""
    for name, size, pieces in files:
        member = tarfile.TarInfo(name)
        member.size = size
        yield member.tobuf(tarfile.GNU_FORMAT)
        yield from pieces
        yield bytes(-size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def plain(content: IO[bytes]) -> Iterator[bytes]:
    """A stream from where it is, uncompressed: engines hand out layers in either form.

    Raises: OSError: it is compressed and damaged.
    """
    first = content.read(_PIECE_BYTES)
    unpack = zlib.decompressobj(wbits=31) if first.startswith(_GZIP) else None
    piece = first
    while piece:
        if unpack is None:
            yield piece
        else:
            yield from _unpacked(unpack, piece)
        piece = content.read(_PIECE_BYTES)


def _unpacked(unpack: zlib._Decompress, piece: bytes) -> Iterator[bytes]:
    while piece:
        try:
            yield unpack.decompress(piece, _PIECE_BYTES)
        except zlib.error as error:
            raise OSError(f"a compressed layer is damaged: {error}") from error
        piece = unpack.unconsumed_tail


def digest_of(pieces: Iterable[bytes]) -> str:
    """As engines write it."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


def pieces_of(file: Any) -> Iterator[bytes]:
    """An open file from its beginning."""
    file.seek(0)
    while piece := file.read(_PIECE_BYTES):
        yield piece
