"""A look at a container's processes is not of one moment; a child of nobody is believed at the second look only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshot_drivers.criu import trees
from snapshot_drivers.criu.trees import Process, Running

SERVER = Process(10, 2, 1, {"VmSize": "1 kB"}, "launch serve", True)
CHILD = Process(11, 3, 12, {"VmSize": "1 kB"}, "sleep 1", False)


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([Running((SERVER,), (CHILD,)), Running((SERVER, CHILD), ())], Running((SERVER, CHILD), ())),
        ([Running((SERVER,), (CHILD,))] * 2, Running((SERVER,), (CHILD,))),
        ([Running((SERVER, CHILD), ())], Running((SERVER, CHILD), ())),
    ],
    ids=["its parent ended meanwhile", "it is nobody's", "nothing is nobody's"],
)
def test_what_is_nobodys_is_so_at_two_looks(
    monkeypatch: pytest.MonkeyPatch, looks: list[Running], expected: Running
) -> None:
    left: Iterator[Running] = iter(looks)
    monkeypatch.setattr(trees, "look", lambda *_: next(left))
    target: Any = None
    assert trees.settled(target, Path()) == expected
    assert next(left, None) is None
