"""One walk of a workspace: what git can hold of it, by path, and the word for what it cannot.

An entry whose inode, ctime, size and mode are as the last walk found them is taken over unread, unless it is as young
as that walk (git's racily-clean rule) or a process maps it.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions
from snapshot_drivers.errors import LimitExceeded
from snapshot_drivers.git.trees import EXECUTABLE, LINK, PLAIN, Listing, Tracked
from snapshot_drivers.git.workspace import Classes
from snapshot_drivers.leases import Leases, opened
from snapshot_drivers.overlay.paths import PathSet

_RACY_NS: Final = 20_000_000
_COARSE_RACY_NS: Final = 3_000_000_000
_PATH_BYTES: Final = 4095
"""Longer paths no program can open, git included (PATH_MAX)."""
_MOST_PATHS_BYTES: Final = 256 << 20
_PIECE_BYTES: Final = 1 << 20

Store = Callable[[int, Callable[[], Iterator[bytes]]], bytes | None]
"""Answers the name of a blob, given its size and a source of its pieces; ``None``: these were not so many bytes."""


class Gap(NamedTuple):
    """Something that is there and not held."""

    path: bytes
    reason: str


class Sign(NamedTuple):
    """By what an unchanged entry is known."""

    inode: int
    ctime_ns: int
    size: int
    mode: int


@dataclass
class Seen:
    """What a walk found."""

    taken_ns: int = 0
    """Wall clock before the walk began."""
    listing: Listing = field(default_factory=dict)
    signs: dict[bytes, Sign] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    left_alone: list[bytes] = field(default_factory=list)
    stays: set[bytes] = field(default_factory=set)
    """Directories above something that is left alone: they cannot give way."""
    entries: int = 0
    content_bytes: int = 0


class Walk:
    """One walk."""

    def __init__(
        self,
        classes: Classes,
        options: CaptureOptions,
        store: Store,
        *,
        most_file_bytes: int,
        known: Seen | None = None,
        dirty_inodes: Set[int] = frozenset(),
        leases: Leases,
    ) -> None:
        """``store`` stores content, or only names it; ``known``: an earlier walk of the same workspace."""
        self._classes = classes
        self._options = options
        self._store = store
        self._most_file_bytes = most_file_bytes
        self._known = known or Seen()
        self._dirty_inodes = dirty_inodes
        self._leases = leases
        self._seen = Seen()
        self._path_bytes = 0

    def run(self, root_fd: int | None) -> Seen:
        """All below ``root_fd``; nothing where that is ``None``.

        Raises: LimitExceeded. OSError: the root itself cannot be read.
        """
        seen = self._seen = Seen(taken_ns=time.time_ns())
        if root_fd is None:
            return seen
        place = beneath.Descent(root_fd)
        trail = [(b"", self._classes.paths, iter(self._list(root_fd)), 0)]
        try:
            while trail:
                above, paths, entries, before = trail[-1]
                step = next(entries, None)
                if step is None:
                    trail.pop()
                    if trail:
                        place.up()
                        if len(seen.listing) + len(seen.gaps) == before and above[:-1] not in seen.stays:
                            seen.gaps.append(Gap(above[:-1], "git holds no empty directory"))
                    continue
                name, found = step
                path = above + name
                if self._is_left_out(name, path, paths):
                    continue
                self._count(path)
                try:
                    if len(path) > _PATH_BYTES:
                        seen.gaps.append(Gap(path, f"its path is longer than {_PATH_BYTES} bytes"))
                    elif stat.S_ISDIR(found.st_mode):
                        inside = self._enter(place, name)
                        held = len(seen.listing) + len(seen.gaps)
                        trail.append((path + b"/", paths.below(name), inside, held))
                        if len(trail) > self._options.max_depth:
                            raise LimitExceeded(
                                f"the workspace has more levels than max_depth ({self._options.max_depth})"
                            )
                    else:
                        self._entry(place.fd, name, path, found)
                except OSError as error:
                    seen.gaps.append(Gap(path, f"cannot be read: {error.strerror}"))
        finally:
            place.close()
        return seen

    def _list(self, directory_fd: int) -> list[tuple[bytes, os.stat_result]]:
        try:
            return beneath.list_directory(directory_fd, self._options.max_entries)
        except beneath.TooManyEntries:
            raise self._too_many() from None

    def _enter(self, place: beneath.Descent, name: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
        place.down(name)
        try:
            return iter(self._list(place.fd))
        except OSError:
            place.up()
            raise

    def _count(self, path: bytes) -> None:
        self._seen.entries += 1
        self._path_bytes += len(path)
        if self._seen.entries > self._options.max_entries:
            raise self._too_many()
        if self._path_bytes > _MOST_PATHS_BYTES:
            raise LimitExceeded(f"the paths of the workspace are longer than {_MOST_PATHS_BYTES} bytes together")

    def _too_many(self) -> LimitExceeded:
        return LimitExceeded(f"the workspace has more entries than max_entries ({self._options.max_entries})")

    def _is_left_out(self, name: bytes, path: bytes, paths: PathSet) -> bool:
        by_path = paths.holds(name)
        stays = paths.keeps(name) if by_path else name in self._classes.left_alone
        if stays:
            self._seen.left_alone.append(path)
            above = path.rpartition(b"/")[0]
            while above and above not in self._seen.stays:
                self._seen.stays.add(above)
                above = above.rpartition(b"/")[0]
        return by_path or stays or name in self._classes.volatile

    def _entry(self, directory_fd: int, name: bytes, path: bytes, found: os.stat_result) -> None:
        seen = self._seen
        sign = Sign(found.st_ino, found.st_ctime_ns, found.st_size, found.st_mode)
        if stat.S_ISREG(found.st_mode):
            seen.content_bytes += found.st_size
            if seen.content_bytes > self._options.max_content_bytes:
                raise LimitExceeded(
                    f"the workspace holds more than max_content_bytes ({self._options.max_content_bytes})"
                )
        if self._is_unchanged(path, sign):
            seen.listing[path], seen.signs[path] = self._known.listing[path], sign
            return
        with beneath.closing(beneath.look(directory_fd, name)) as looked:
            now = os.fstat(looked)
            if stat.S_ISLNK(now.st_mode):
                target = os.readlink(b"", dir_fd=looked)
                mode, blob = LINK, self._store(len(target), lambda: iter([target]))
            elif not stat.S_ISREG(now.st_mode):
                seen.gaps.append(Gap(path, "git holds files and symbolic links only"))
                return
            elif now.st_size > self._most_file_bytes:
                reason = f"it has {now.st_size} bytes, more than snapshots.options.max_file_bytes"
                seen.gaps.append(Gap(path, reason))
                return
            else:
                mode = EXECUTABLE if now.st_mode & stat.S_IXUSR else PLAIN
                with opened(looked, self._leases) as file:
                    blob = self._store(now.st_size, lambda: _pieces(file, now.st_size))
        if blob is None:
            seen.gaps.append(Gap(path, "it was changed while it was read"))
            return
        seen.listing[path], seen.signs[path] = Tracked(mode, blob), sign

    def _is_unchanged(self, path: bytes, sign: Sign) -> bool:
        if self._known.signs.get(path) != sign or sign.inode in self._dirty_inodes:
            return False
        racy_ns = _RACY_NS if sign.ctime_ns % 1_000_000_000 else _COARSE_RACY_NS
        return sign.ctime_ns < self._known.taken_ns - racy_ns


def _pieces(file: int, size: int) -> Iterator[bytes]:
    position = 0
    while position < size:
        piece = beneath.read(file, min(_PIECE_BYTES, size - position), position)
        if not piece:
            return
        yield piece
        position += len(piece)
