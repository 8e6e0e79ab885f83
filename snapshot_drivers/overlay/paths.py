"""Sets of absolute paths in a container, split among its mounts and matched one component at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable


class PathSet:
    """Paths below one directory, as a tree of components; a path that is held covers all below it."""

    __slots__ = ("_below", "_whole")

    def __init__(self) -> None:
        """An empty set."""
        self._whole: dict[bytes, bool] = {}
        self._below: dict[bytes, PathSet] = {}

    @classmethod
    def of(cls, paths: Iterable[str], mount: str = "/", *, passing: Iterable[str] = ()) -> PathSet:
        """Those of the absolute paths that lie below ``mount``, relative to it; a restore removes the ``passing``."""
        made = cls()
        prefix = mount.rstrip("/") + "/"
        for group, stays in ((passing, False), (paths, True)):
            for path in group:
                if path.startswith(prefix):
                    made._add([part for part in os.fsencode(path[len(prefix) :]).split(b"/") if part], stays)
        return made

    def _add(self, parts: list[bytes], stays: bool) -> None:
        if not parts:
            return
        if len(parts) == 1:
            self._whole[parts[0]] = stays
        else:
            self._below.setdefault(parts[0], PathSet())._add(parts[1:], stays)

    def holds(self, name: bytes) -> bool:
        """True if ``name`` right below is in the set, with all that it holds."""
        return name in self._whole

    def keeps(self, name: bytes) -> bool:
        """True if it is in the set and survives a restore."""
        return self._whole.get(name, False)

    def below(self, name: bytes) -> PathSet:
        """The set as seen from the subdirectory ``name``."""
        return self._below.get(name, _EMPTY)

    def __bool__(self) -> bool:
        return bool(self._whole or self._below)

    def members(self) -> list[list[bytes]]:
        """Every path in the set as its components."""
        found = [[name] for name in sorted(self._whole)]
        for name, deeper in sorted(self._below.items()):
            found += [[name, *rest] for rest in deeper.members()]
        return found


_EMPTY = PathSet()
