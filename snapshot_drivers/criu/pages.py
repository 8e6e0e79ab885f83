"""Where an image of memory is cut into blocks: at the edges of address windows, not at offsets of the file.

The image holds the present pages of one address space back to back. A heap that grows by one page moves everything
behind it in the file, and nothing in the address space: cut by windows, what did not change is stored once.

Source: CRIU 4.2, ``images/pagemap.proto``; its ``include/image.h`` for the framing (two magic words, then messages with
their length before them).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from snapshot_drivers.criu.rpc import fields

WINDOW_BYTES: Final = 1 << 18
_PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")
_MAGIC_BYTES: Final = 8
_PAGES_ID = _ADDRESS = 1
_COUNT_BEFORE_4_1, _FLAGS, _COUNT = 2, 4, 5
_PRESENT: Final = 4


def block_lengths(work: Path) -> dict[str, list[int]]:
    """Lengths in bytes of the blocks of every pages image in ``work``, in order, by its name.

    Raises: ValueError: a page map cannot be read.
    """
    found = {}
    for path in work.glob("pagemap-*.img"):
        head, *runs = _messages(path.read_bytes())
        found[f"pages-{head[_PAGES_ID]}.img"] = _cut(
            (run[_ADDRESS], run.get(_COUNT) or run[_COUNT_BEFORE_4_1])
            for run in runs
            if run.get(_FLAGS, _PRESENT) & _PRESENT
        )
    return found


def _cut(runs: Iterable[tuple[int, int]]) -> list[int]:
    """Lengths of the pieces into which the windows cut runs of pages (address, count)."""
    lengths: list[int] = []
    last = -1
    for address, count in runs:
        end = address + count * _PAGE_BYTES
        while address < end:
            window = address // WINDOW_BYTES
            length = min(end, (window + 1) * WINDOW_BYTES) - address
            if window == last:
                lengths[-1] += length
            else:
                lengths.append(length)
            last = window
            address += length
    return lengths


def _messages(data: bytes) -> Iterator[dict[int, int]]:
    """The numbers in each message of an image."""
    place = _MAGIC_BYTES
    while place < len(data):
        (length,) = struct.unpack_from("<I", data, place)
        place += 4
        message = fields(data[place : place + length])
        yield {number: value for number, value in message if isinstance(value, int)}
        place += length
