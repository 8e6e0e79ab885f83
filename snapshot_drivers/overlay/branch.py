"""The entries of a large directory that differ in a few names from those of an earlier look, which stays as it was."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Final

from snapshot_drivers.overlay.places import MANY_ENTRIES
from snapshot_drivers.tree import Node

_MOST_CHANGES: Final = 2000
"""With more of them a copy of all is made: each look costs the changes since the last copy."""


class Branch(MutableMapping[bytes, Node]):
    """A mapping on top of another one, of which it says what is different."""

    __slots__ = ("_base", "_changed", "_length")

    def __init__(self, base: dict[bytes, Node], changed: dict[bytes, Node | None], length: int) -> None:
        """Nobody changes ``base`` any more; ``changed``: entries of ours, ``None`` where there is none."""
        self._base = base
        self._changed = changed
        self._length = length

    def __getitem__(self, name: bytes) -> Node:
        found = self._changed[name] if name in self._changed else self._base[name]
        if found is None:
            raise KeyError(name)
        return found

    def __setitem__(self, name: bytes, node: Node) -> None:
        self._length += name not in self
        self._changed[name] = node

    def __delitem__(self, name: bytes) -> None:
        if name not in self:
            raise KeyError(name)
        self._changed[name] = None
        self._length -= 1

    def __contains__(self, name: object) -> bool:
        if name in self._changed:
            return self._changed[name] is not None
        return name in self._base

    def __iter__(self) -> Iterator[bytes]:
        yield from (name for name in self._base if self._changed.get(name, self) is not None)
        yield from (name for name, node in self._changed.items() if node is not None and name not in self._base)

    def __len__(self) -> int:
        return self._length

    def branched(self) -> MutableMapping[bytes, Node]:
        """See ``branched``."""
        if len(self._changed) > _MOST_CHANGES:
            return dict(self)
        return Branch(self._base, dict(self._changed), self._length)


def branched(entries: MutableMapping[bytes, Node]) -> MutableMapping[bytes, Node]:
    """The same entries, to be changed; ``entries`` itself must not be any more."""
    if isinstance(entries, Branch):
        return entries.branched()
    if isinstance(entries, dict) and len(entries) > MANY_ENTRIES:
        return Branch(entries, {}, len(entries))
    return dict(entries)
