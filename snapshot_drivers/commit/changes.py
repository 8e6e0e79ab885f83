"""The engine's lists of changed paths, put together and compared: pure.

An engine tells which paths of a container differ from its image, not how: so a path that differed in two snapshots
alike is not known to differ between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

MODIFIED: Final = 0
ADDED: Final = 1
DELETED: Final = 2

Changes = tuple[tuple[str, int], ...]


def without_directories(found: Iterable[tuple[str, int]], leave_out: str) -> Changes:
    """Sorted; without directories that only stand there for what changed in them, and what is below ``leave_out``."""
    kept = [(path, kind) for path, kind in sorted(found) if not f"{path}/".startswith(f"{leave_out}/")]
    above = {parent for path, _ in kept for parent in _parents(path)}
    return tuple((path, kind) for path, kind in kept if kind != MODIFIED or path not in above)


def stacked(lower: Iterable[tuple[str, int]], upper: Iterable[tuple[str, int]]) -> Changes:
    """Both lists as one: ``upper`` is relative to what ``lower`` made."""
    total = dict(lower)
    for path, kind in upper:
        before = total.get(path)
        if kind == DELETED:
            inside = f"{path}/"
            for other in [other for other in total if other.startswith(inside)]:
                del total[other]
            if before == ADDED:
                del total[path]
            else:
                total[path] = DELETED
        elif before is None:
            total[path] = kind
        elif before == DELETED:
            total[path] = MODIFIED
    return tuple(sorted(total.items()))


def differences(older: Iterable[tuple[str, int]], newer: Iterable[tuple[str, int]]) -> Iterator[tuple[str, str]]:
    """Status (see ``base.Change``) and path of what is known to differ, in the order of the paths."""
    before, after = dict(older), dict(newer)
    for path in sorted(before.keys() | after.keys()):
        was, now = before.get(path), after.get(path)
        if was == now:
            continue
        there_before, there_now = was not in (None, DELETED), now not in (None, DELETED)
        if was is None:
            there_before = now != ADDED
        if now is None:
            there_now = was != ADDED
        yield "M" if there_before and there_now else "A" if there_now else "D", path


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path
