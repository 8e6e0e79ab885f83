"""The large answers beside the log (see ``aside``), as they leave and as they come."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator
from typing import Final

from orchestrator.errors import ArchiveRefused

_NAMED: Final = re.compile(rb'\{"aside":"([0-9a-f]{64}\.json\.gz)","bytes":([0-9]{1,12})\}')


def named_by(line: bytes) -> Iterator[tuple[str, int]]:
    """Names of the files that an encoded event speaks of, with the length of the text in them."""
    for found in _NAMED.finditer(line):
        yield found[1].decode("ascii"), int(found[2])


def check(member: str, data: bytes, length: int) -> None:
    """The file holds the text that its name says, of that length: no more than that is ever made of it.

    Raises: ArchiveRefused.
    """
    reader = zlib.decompressobj(wbits=31)
    try:
        text = reader.decompress(data, length + 1)
    except zlib.error as error:
        raise ArchiveRefused(f"{member}: is not gzip: {error}") from error
    if len(text) != length or not reader.eof or reader.unused_data:
        raise ArchiveRefused(f"{member}: does not hold the {length} bytes of the event that names it")
    if hashlib.sha256(text).hexdigest() != member.rpartition("/")[2].partition(".")[0]:
        raise ArchiveRefused(f"{member}: its content is not what its name says")
