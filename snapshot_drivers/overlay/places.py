"""Where the inodes of a captured tree stand in it: what a walk needs that looks at changed entries alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from snapshot_drivers.overlay.runs import Runs
from snapshot_drivers.tree import Node

MANY_ENTRIES: Final = 256
"""The leaves of a directory with more entries are kept (see ``runs``); a smaller one is encoded as a whole."""


class Doubt(Exception):
    """What changed cannot be told from single entries: the tree has to be walked as a whole."""


@dataclass
class Places:
    """Of one tree in memory. A walk that changes them takes them over from the tree that it started from."""

    where: dict[int, tuple[int, bytes]]
    """The directory (its inode) and the name of each inode: one of its names. The root is its own directory."""
    runs: dict[int, Runs]
    """Of large directories, by inode."""

    @classmethod
    def of(cls, root: Node) -> Self:
        """The places of a tree that has been encoded."""
        made = cls({root.ino: (root.ino, b"")}, {})
        work = [root]
        while work:
            directory = work.pop()
            children = directory.children or {}
            number = directory.ino
            for name, child in children.items():
                made.where[child.ino] = (number, name)
                if child.children:
                    work.append(child)
            if len(children) > MANY_ENTRIES:
                runs = Runs.known(children, directory.digests or ())
                if runs is not None:
                    made.runs[number] = runs
        return made

    def forget(self, directory: int, node: Node) -> int:
        """The entry of that directory is gone, with all below it; answers how many entries these were.

        What a walk finds is written down after all that is gone, since it may be the same directory in another place.

        Raises: Doubt: the other names of one of them, or what a restore has to leave there, are concerned too.
        """
        count = 0
        work = [(directory, node)]
        while work:
            parent, gone = work.pop()
            count += 1
            if gone.link is not None or gone.shared or gone.stays:
                raise Doubt
            if self.where.get(gone.ino) == (parent, gone.name):
                del self.where[gone.ino]
            if gone.is_directory:
                self.runs.pop(gone.ino, None)
                work += [(gone.ino, child) for child in (gone.children or {}).values()]
        return count

    def marks(self, root: int, names: dict[int, set[bytes]], inodes: set[int]) -> dict[int, set[bytes]]:
        """The entries to look at, by directory, with the directories on the way to them.

        ``names``: entries that may have changed, by directory; ``inodes``: such entries by inode, all of this tree.

        Raises: Doubt: no way leads to one of them.
        """
        marks: dict[int, set[bytes]] = {root: set()}
        try:
            for directory, changed in names.items():
                self._mark(marks, directory, root).update(changed)
            for inode in inodes:
                if inode != root:
                    directory, name = self.where[inode]
                    self._mark(marks, directory, root).add(name)
        except KeyError as error:
            raise Doubt from error
        return marks

    def _mark(self, marks: dict[int, set[bytes]], directory: int, root: int) -> set[bytes]:
        found = marks.setdefault(directory, set())
        below, is_new = directory, True
        while is_new and below != root:
            above, name = self.where[below]
            is_new = above not in marks  # else its own way up was marked when it was
            marks.setdefault(above, set()).add(name)
            below = above
        return found
