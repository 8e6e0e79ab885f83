"""The leaves of one directory, kept in memory so that a change of a few names costs the leaves that these lie in.

A *run* is what stands between two names that end a leaf (see ``tree``): one leaf, or several where it is long. Names
that come and go change their own run, and the next one if a name that ends a leaf is among them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Final, Self

from snapshot_drivers.tree import Node, Put, encode_leaves, ends_leaf, first_names

_WHOLE_FROM: Final = 8
"""One name in so many changed: encoding them all is as quick."""


class Runs:
    """The names of a directory in order, and the first name and the digest of each of its leaves."""

    __slots__ = ("_firsts", "_names", "digests")

    def __init__(self, names: list[bytes], leaves: list[tuple[bytes, bytes]]) -> None:
        """``names`` are sorted; ``leaves`` as of ``encode_leaves``."""
        self._names = names
        self._firsts = [first for first, _ in leaves]
        self.digests = [digest for _, digest in leaves]

    @classmethod
    def known(cls, children: Iterable[bytes], digests: Iterable[bytes]) -> Self | None:
        """Those of a directory that is stored already; ``None`` if these cannot be its leaves."""
        names, stored = sorted(children), list(digests)
        firsts = first_names(names)
        return cls(names, list(zip(firsts, stored, strict=True))) if len(firsts) == len(stored) else None

    @classmethod
    def encoded(cls, children: Mapping[bytes, Node], put: Put) -> Self:
        """Every leaf is stored."""
        names = sorted(children)
        return cls(names, encode_leaves((children[name] for name in names), put))

    def update(self, changed: Iterable[bytes], children: Mapping[bytes, Node], put: Put) -> None:
        """The leaves are those of ``children``, in which the names ``changed`` came, went or became something else.

        The names may be in any order in ``children``, but each of its directories has been encoded.
        """
        touched = sorted(changed)
        if len(touched) * _WHOLE_FROM > len(self._names):
            whole = Runs.encoded(children, put)
            self._names, self._firsts, self.digests = whole._names, whole._firsts, whole.digests
            return
        for name in touched:
            place = bisect_left(self._names, name)
            is_there = place < len(self._names) and self._names[place] == name
            if name in children and not is_there:
                insort(self._names, name)
            elif name not in children and is_there:
                del self._names[place]
        for start, end in self._stretches(touched):
            self._encode(start, end, children, put)

    def names_outside(self, leaves: Container[bytes]) -> Iterator[bytes]:
        """The names in all leaves but these."""
        for number, digest in enumerate(self.digests):
            if digest not in leaves:
                start, *following = (bisect_left(self._names, first) for first in self._firsts[number : number + 2])
                yield from self._names[start : following[0] if following else None]

    def _stretches(self, touched: list[bytes]) -> list[tuple[int, int]]:
        """Places from which and up to which the names stand that share a run with a touched one, or follow its run."""
        found: list[tuple[int, int]] = []
        for name in touched:
            place = bisect_left(self._names, name)
            is_inside = bool(found) and place < found[-1][1]
            if is_inside and not (self._names[place] == name and ends_leaf(name)):
                continue
            start = place
            while start > 0 and not ends_leaf(self._names[start - 1]):
                start -= 1
            end = bisect_right(self._names, name)
            while end < len(self._names) and not ends_leaf(self._names[end]):
                end += 1
            end = min(end + 1, len(self._names))
            if found and start <= found[-1][1]:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((start, end))
        return found

    def _encode(self, start: int, end: int, children: Mapping[bytes, Node], put: Put) -> None:
        """The leaves of a stretch are new ones; those whose first name lies before or behind it stay."""
        leaves = encode_leaves((children[name] for name in self._names[start:end]), put)
        # By the names around it: the first of the leaves that give way may be gone itself.
        low = bisect_right(self._firsts, self._names[start - 1]) if start else 0
        high = bisect_left(self._firsts, self._names[end]) if end < len(self._names) else len(self._firsts)
        self._firsts[low:high] = [first for first, _ in leaves]
        self.digests[low:high] = [digest for _, digest in leaves]
