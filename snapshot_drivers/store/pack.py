"""A pack: objects in one file that is never changed.

``packs/<pack id>.pack`` = ``MAGIC``, the frames back to back, the index, then the trailer: length of the index, BLAKE3
of the index, ``MAGIC``. A *frame* is a run of objects, as they are or compressed together by zstd. The index (msgpack)
is ``[frames, objects]``: a frame is ``[offset, bytes stored, bytes of its objects]`` (0 for the last: not compressed),
an object is ``[digest, number of its frame, offset in the frame, length]``.

A capture writes one frame that is not compressed: the container may be waiting. ``compact`` writes compressed ones.
"""

from __future__ import annotations

import os
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgpack

from snapshot_drivers.errors import StoreDamaged
from snapshot_drivers.store.durable import TEMPORARY
from snapshot_drivers.tree import digest_of

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACKS: Final = "packs"
SUFFIX: Final = ".pack"
MAGIC: Final = b"RWPACK02"
FRAME_BYTES: Final = 1 << 18
"""Objects are compressed together up to so many bytes: reading one costs the decompression of its frame."""
_LEVEL: Final = 3
_TRAILER: Final = struct.Struct("<Q32s8s")


class Place(NamedTuple):
    """Where one object lies in a pack."""

    digest: bytes
    offset: int
    """Of the frame."""
    stored: int
    """Bytes of the frame in the pack."""
    raw: int
    """Bytes of the frame's objects; 0: it is not compressed."""
    start: int
    """Of the object in the frame."""
    length: int


class Body:
    """The frames and the index of one pack, as they are written to a file."""

    def __init__(self, file: BinaryIO) -> None:
        """``file`` is empty.

        Raises: OSError, as all methods.
        """
        self._file = file
        self._file.write(MAGIC)
        self._frames: list[tuple[int, int, int]] = []
        self._objects: dict[bytes, tuple[int, int, int]] = {}
        self._plain = 0
        """Bytes of the frame that is not compressed, which comes first."""

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._objects

    def add(self, digest: bytes, data: bytes) -> None:
        """One object as it is; no frame may have been added."""
        self._file.write(data)
        self._objects[digest] = (0, self._plain, len(data))
        self._plain += len(data)
        self._frames = [(len(MAGIC), self._plain, 0)]

    def add_frame(self, objects: list[tuple[bytes, bytes]]) -> None:
        """Objects (digest, data) compressed together; as they are, where that makes them no smaller."""
        data = b"".join(item for _, item in objects)
        packed = zstd.compress(data, _LEVEL)
        raw = len(data)
        if len(packed) >= raw:
            packed, raw = data, 0
        offset = self._end()
        self._file.write(packed)
        start = 0
        for digest, item in objects:
            self._objects[digest] = (len(self._frames), start, len(item))
            start += len(item)
        self._frames.append((offset, len(packed), raw))

    def finish(self) -> list[Place]:
        """The index and the trailer stand behind the frames; where everything lies."""
        objects = [[digest, *place] for digest, place in self._objects.items()]
        index = msgpack.packb([[list(frame) for frame in self._frames], objects])
        self._file.write(index)
        self._file.write(_TRAILER.pack(len(index), digest_of(index), MAGIC))
        return _places(self._frames, objects)

    def _end(self) -> int:
        return sum(self._frames[-1][:2]) if self._frames else len(MAGIC)


def read_index(path: Path) -> list[Place]:
    """Where the objects of one pack lie.

    Raises: StoreDamaged: the pack is cut short, its index differs from its hash. OSError.
    """
    with path.open("rb") as pack:
        size = os.fstat(pack.fileno()).st_size
        if size >= len(MAGIC) + _TRAILER.size:
            whole = pack.read(len(MAGIC)) == MAGIC
            pack.seek(size - _TRAILER.size)
            length, checksum, magic = _TRAILER.unpack(pack.read(_TRAILER.size))
            if whole and magic == MAGIC and length <= size - _TRAILER.size - len(MAGIC):
                pack.seek(size - _TRAILER.size - length)
                index = pack.read(length)
                if digest_of(index) == checksum:
                    return _places(*msgpack.unpackb(index))
    raise StoreDamaged(f"{path} is damaged: its index cannot be read")


def read_frame(descriptor: int, place: Place) -> bytes:
    """The frame in which the object lies, decompressed.

    Raises: OSError. StoreDamaged: it cannot be decompressed.
    """
    data = os.pread(descriptor, place.stored, place.offset)
    if not place.raw:
        return data
    try:
        # Bounded: what is read here may be damaged, or written by somebody else.
        found = zstd.ZstdDecompressor().decompress(data, place.raw)
    except zstd.ZstdError as error:
        raise StoreDamaged(f"the frame at byte {place.offset} cannot be decompressed: {error}") from error
    return found


def read_object(descriptor: int, place: Place) -> bytes:
    """The object's bytes, as they are in a frame that is not compressed; nothing is checked.

    Raises: OSError.
    """
    return os.pread(descriptor, place.length, place.offset + place.start)


def _places(frames: list[Any], objects: list[Any]) -> list[Place]:
    found = []
    for digest, number, start, length in objects:
        offset, stored, raw = frames[number]
        found.append(Place(digest, offset, stored, raw, start, length))
    return found


def packs_in(directory: Path) -> dict[str, int]:
    """The ids of the packs in a store's directory of packs, with their sizes in bytes.

    Raises: OSError.
    """
    found = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX) and not entry.name.startswith(TEMPORARY):
                with suppress(FileNotFoundError):
                    found[entry.name.removesuffix(SUFFIX)] = entry.stat(follow_symlinks=False).st_size
    return found
