"""What must be done to a workspace so that it holds what a snapshot says: pure."""

from __future__ import annotations

import os
from dataclasses import dataclass

from snapshot_drivers.errors import RestoreRefused
from snapshot_drivers.git.trees import Listing, Tracked
from snapshot_drivers.git.walk import Seen


@dataclass(frozen=True)
class Plan:
    """What to do, in the order of the fields."""

    remove: tuple[bytes, ...]
    """Paths of what is not in the snapshot, the deepest first; directories that this leaves empty go, too."""
    write: dict[bytes, Tracked]
    """Files and links to be made anew."""
    adjust: dict[bytes, Tracked]
    """Files of which only the execute bit differs."""

    @property
    def touched(self) -> int:
        """Entries that it touches."""
        return len(self.remove) + len(self.write) + len(self.adjust)


def make_plan(seen: Seen, wanted: Listing, untracked: frozenset[bytes]) -> Plan:
    """How what was ``seen`` becomes ``wanted``; ``untracked`` was there and not held then, so it stays.

    Raises: RestoreRefused: what is left alone would have to give way.
    """
    present = seen.listing
    for path in wanted:
        if path in seen.stays:
            raise RestoreRefused(
                f"{os.fsdecode(path)!r} is a file in the snapshot and a directory now that holds what is left alone; "
                "move that away"
            )
    there = {*present, *(gap.path for gap in seen.gaps)}
    remove = {path for path in there if path not in wanted and path not in untracked}
    write = {path: entry for path, entry in wanted.items() if path not in present or _differs(present[path], entry)}
    adjust = {path: entry for path, entry in wanted.items() if path in present and path not in write}
    adjust = {path: entry for path, entry in adjust.items() if present[path] != entry}
    return Plan(tuple(sorted(remove, reverse=True)), write, adjust)


def _differs(one: Tracked, two: Tracked) -> bool:
    return one.blob != two.blob or (one.mode & 0o170000) != (two.mode & 0o170000)
