"""Helpers of containers are kept while they are asked for, and closed when nobody does."""

from __future__ import annotations

from snapshot_drivers.recent import Recent


class Helper:
    def __init__(self, closed: list[str], name: str) -> None:
        self.name = name
        self._closed = closed

    def close(self) -> None:
        self._closed.append(self.name)


def test_the_one_that_was_asked_for_longest_ago_goes() -> None:
    closed: list[str] = []
    recent = Recent[Helper]()
    main = recent.of("main", lambda: Helper(closed, "main"))
    for number in range(5):
        recent.of(f"copy {number}", lambda number=number: Helper(closed, f"copy {number}"))  # type: ignore[misc]
        assert recent.of("main", lambda: Helper(closed, "another")) is main
    assert closed == ["copy 0", "copy 1", "copy 2"]
    recent.close()
    assert sorted(closed) == ["copy 0", "copy 1", "copy 2", "copy 3", "copy 4", "main"]
