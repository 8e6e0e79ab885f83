"""The leaves of a stored tree, each once, what a leaf names before the leaf itself.

Without recursion: directories may be nested as deep as a container likes.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

from snapshot_drivers.errors import StoreDamaged
from snapshot_drivers.tree import Get, unpack

Entry = list[Any]
"""One entry as it is stored (see ``tree``)."""
MODE, XATTRS, PAYLOAD = 1, 5, 7
"""Places in an entry."""


class Leaf(NamedTuple):
    """A run of entries of one directory."""

    digest: bytes
    entries: list[Entry]
    path: Callable[[], str]
    """Of its directory, worked out when it is asked for: below 20,000 levels it has a megabyte."""


class _Frame:
    """A leaf that is being looked at."""

    __slots__ = ("at", "below", "digest", "entries")

    def __init__(self, digest: bytes, entries: list[Entry]) -> None:
        self.digest = digest
        self.entries = entries
        self.at = -1
        self.below: list[bytes] = []

    def next_below(self, done: Container[bytes]) -> bytes | None:
        """A leaf that has to come first."""
        while True:
            while self.below:
                digest = self.below.pop()
                if digest not in done:
                    return digest
            self.at += 1
            if self.at == len(self.entries):
                return None
            self.below = below(self.entries[self.at])


def below(entry: Entry) -> list[bytes]:
    """The leaves that an entry names, last first: none, unless it is a directory."""
    return list(reversed(entry[PAYLOAD])) if stat.S_ISDIR(entry[MODE]) and entry[PAYLOAD] else []


def stored_entry(digest: bytes, get: Get) -> Entry:
    """The entry of a tree's root.

    Raises: StoreDamaged.
    """
    try:
        found = unpack(get(digest))
    except ValueError as error:
        raise StoreDamaged(f"object {digest.hex()} is no node of a tree: {error}") from error
    if not isinstance(found, list):
        raise StoreDamaged(f"object {digest.hex()} is no node of a tree")
    return found


def leaves_below(root: Entry, read: Callable[[bytes], list[Entry]], done: Container[bytes]) -> Iterator[Leaf]:
    """Each leaf below ``root`` that is not in ``done``.

    Whoever takes one puts it into ``done`` before asking for the next. ``read`` gives the entries of a leaf.
    """
    way = [_Frame(b"", [root])]
    while way:
        frame = way[-1]
        first = frame.next_below(done)
        if first is not None:
            way.append(_Frame(first, read(first)))
            continue
        way.pop()
        if way:
            yield Leaf(frame.digest, frame.entries, lambda: _path(way))


def _path(way: list[_Frame]) -> str:
    names = b"/".join(frame.entries[frame.at][0] for frame in way[1:])
    return f"/{names.decode('utf-8', 'backslashreplace')}"
