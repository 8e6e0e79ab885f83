"""Reads the members of an archive one after the other, none of which is believed: not even the tar headers.

The library's own reader would obey extended headers, links and sparse maps on its way to the next file. Here a header
is 512 bytes which must be the ones that its name and size make; whatever else there may be in a tar file ends the
reading.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import BinaryIO, Final

from orchestrator.archive.form import BLOCK_BYTES, END, GROUPS, header, padding, place_of
from orchestrator.errors import ArchiveRefused

_PIECE_BYTES: Final = 1 << 20
_KINDS: Final = {
    tarfile.LNKTYPE: "a hard link", tarfile.SYMTYPE: "a symbolic link", tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device", tarfile.DIRTYPE: "a directory", tarfile.FIFOTYPE: "a fifo",
    tarfile.XHDTYPE: "an extended header", tarfile.XGLTYPE: "an extended header", tarfile.GNUTYPE_SPARSE: "sparse",
    tarfile.GNUTYPE_LONGNAME: "a long name", tarfile.GNUTYPE_LONGLINK: "a long name",
}  # fmt: skip
_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


class Member:
    """A file of the archive; its content can be read once."""

    def __init__(self, stream: BinaryIO, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._stream = stream
        self._left = size

    def pieces(self) -> Iterator[bytes]:
        """The content.

        Raises: ArchiveRefused: the archive ends before it does.
        """
        while self._left:
            piece = self._stream.read(min(self._left, _PIECE_BYTES))
            if not piece:
                raise ArchiveRefused(f"{self.name}: the archive is cut off in it")
            self._left -= len(piece)
            yield piece

    def read(self) -> bytes:
        """The content as a whole: for members of bounded size."""
        return b"".join(self.pieces())

    def finish(self) -> None:
        """What was not read, and the padding, lie behind. Raises: ArchiveRefused."""
        for _ in self.pieces():
            pass
        filling = padding(self.size)
        if self._stream.read(len(filling)) != filling:
            raise ArchiveRefused(f"{self.name}: the archive is cut off, or is none, behind it")


def members(stream: BinaryIO) -> Iterator[Member]:
    """The members in their order, each allowed by its name, type and size.

    Raises: ArchiveRefused: the message begins with the member's name.
    """
    before = (-1, "")
    while (block := stream.read(BLOCK_BYTES)) != END[:BLOCK_BYTES]:
        member = _member(stream, block, first=before == (-1, ""))
        place = place_of(member.name)
        assert place is not None
        if place <= before:
            raise ArchiveRefused(f"{member.name}: stands behind {before[1]}: it is there twice or out of its order")
        if member.size > GROUPS[place[0]][1]:
            raise ArchiveRefused(f"{member.name}: {member.size} bytes are more than such a member may have")
        before = place
        yield member
        member.finish()
    if stream.read(BLOCK_BYTES) != END[BLOCK_BYTES:] or stream.read(1):
        raise ArchiveRefused(f"the archive does not end behind its last member ({before[1] or 'it has none'})")


def _member(stream: BinaryIO, block: bytes, *, first: bool) -> Member:
    try:
        found = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        if first and block[:2] in _COMPRESSED:
            raise ArchiveRefused(f"the file is compressed ({_COMPRESSED[block[:2]]}): decompress it first") from None
        raise ArchiveRefused(f"the archive is damaged, cut off, or no tar file: {error}") from None
    name = found.name
    if found.type != tarfile.REGTYPE:
        raise ArchiveRefused(f"{name}: is {_KINDS.get(found.type, 'of another type')}, only regular files are read")
    if place_of(name) is None:
        raise ArchiveRefused(f"{name}: no archive of a run has such a member")
    if found.size < 0 or header(name, found.size) != block:
        raise ArchiveRefused(f"{name}: its header says more than a name and a size")
    return Member(stream, name, found.size)
