"""Sets of absolute paths in a container, split among its mounts and matched one component at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable


def covers(paths: Iterable[str], path: str) -> bool:
    """True if an absolute path is one of ``paths`` or lies below one."""
    return any(f"{path.rstrip('/')}/".startswith(f"{above.rstrip('/')}/") for above in paths)


class PathSet:
    """Paths below one directory, as a tree of components; a path that is held covers all below it."""

    __slots__ = ("_all", "_below", "_whole")

    def __init__(self) -> None:
        """An empty set."""
        self._all: bool | None = None
        self._whole: dict[bytes, bool] = {}
        self._below: dict[bytes, PathSet] = {}

    @classmethod
    def of(cls, paths: Iterable[str], mount: str = "/", *, passing: Iterable[str] = ()) -> PathSet:
        """Those of the absolute paths that lie below ``mount``, relative to it, or all that it holds if it lies in one.

        A restore removes the ``passing``.
        """
        made = cls()
        prefix = mount.rstrip("/") + "/"
        for group, stays in ((passing, False), (paths, True)):
            for path in group:
                if covers([path], mount):
                    made._all = stays
                elif path.startswith(prefix):
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
        return self._all is not None or name in self._whole

    def keeps(self, name: bytes) -> bool:
        """True if it is in the set and survives a restore."""
        return self._whole.get(name, self._all or False)

    def below(self, name: bytes) -> PathSet:
        """The set as seen from the subdirectory ``name``."""
        return self._below.get(name, _EMPTY)

    def __bool__(self) -> bool:
        return bool(self._whole or self._below) or self._all is not None

    def members(self) -> list[list[bytes]]:
        """Every path in the set as its components; the empty one stands for all that the directory holds."""
        if self._all is not None:
            return [[]]
        found = [[name] for name in sorted(self._whole)]
        for name, deeper in sorted(self._below.items()):
            found += [[name, *rest] for rest in deeper.members()]
        return found


_EMPTY = PathSet()
