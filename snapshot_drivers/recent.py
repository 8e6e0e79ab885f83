"""Helpers that belong to a container each: kept for the next time, but not those of containers nobody asks about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

_MOST: Final = 3
"""A run's own container, and a copy or two of it."""


class Closable(Protocol):
    """What is to be closed when it is not needed any more."""

    def close(self) -> None:
        """Repeatable."""


T = TypeVar("T", bound=Closable)


class Recent(Generic[T]):
    """Those that were asked for last, by name. ``close`` it."""

    def __init__(self) -> None:
        self._known: dict[str, T] = {}

    def of(self, name: str, make: Callable[[], T]) -> T:
        """The one of that name, made unless it is there; the one that was asked for longest ago may have to go."""
        found = self._known.pop(name, None)
        self._known[name] = made = make() if found is None else found
        while len(self._known) > _MOST:
            self._known.pop(next(iter(self._known))).close()
        return made

    def close(self) -> None:
        """None is left. Repeatable."""
        while self._known:
            self._known.popitem()[1].close()
