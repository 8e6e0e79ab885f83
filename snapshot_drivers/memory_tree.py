"""A directory tree held in memory: read from a directory, written back to one, compared with another.

Hard links are one `Entry` object that stands under several names, so link groups need no book-keeping.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from snapshot_drivers.base import CaptureOptions
from snapshot_drivers.beneath import Descent, closing, list_directory, look, open_regular, read_xattrs
from snapshot_drivers.errors import LimitExceeded

Rules = dict[bytes, "Rules"]
"""Paths as nested components; an empty inner dict ends one."""


@dataclass
class Entry:
    """One inode: all of its attributes and its content."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: tuple[tuple[str, bytes], ...] = ()
    rdev: int = 0
    target: bytes = b""
    size: int = 0
    segments: tuple[tuple[int, bytes], ...] = ()
    """``(offset, data)`` of a regular file; the rest of it is holes."""
    children: dict[bytes, Entry] = field(default_factory=dict)
    """By name, in name order; empty but for directories."""

    def attributes(self) -> tuple[object, ...]:
        """What ``chmod`` and the like change."""
        return self.mode, self.uid, self.gid, self.mtime_ns, self.xattrs

    def content(self) -> tuple[object, ...]:
        """What is in it, names of children aside."""
        return self.rdev, self.target, self.size, self.segments

    @property
    def is_regular(self) -> bool:
        """True for a regular file."""
        return stat.S_ISREG(self.mode)

    def data(self) -> bytes:
        """Content of a regular file, holes as zeros."""
        filled = bytearray(self.size)
        for offset, data in self.segments:
            filled[offset : offset + len(data)] = data
        return bytes(filled)


def rules_of(paths: tuple[str, ...]) -> Rules:
    """The nested form of absolute paths; a path below another one is implied by it."""
    rules: Rules = {}
    for path in sorted(paths):
        at, parts = rules, [os.fsencode(part) for part in path.split("/") if part]
        for position, part in enumerate(parts):
            if part in at and not at[part]:
                break
            at = at.setdefault(part, {})
            if position == len(parts) - 1:
                at.clear()
    return rules


def is_ruled(rules: Rules | None, name: bytes) -> bool:
    """Whether ``name`` ends one of the paths."""
    return rules is not None and rules.get(name) == {}


class Reader:
    """Reads trees under the limits of one capture; what cannot be read becomes a gap, not an error."""

    def __init__(self, options: CaptureOptions) -> None:
        self._options = options
        self._seen: dict[tuple[int, int], Entry] = {}
        self.gaps: list[tuple[str, str]] = []
        """Path and reason of everything that could not be read."""
        self.entries = 0
        self.content_bytes = 0

    def read(self, root_fd: int, rules: Rules) -> Entry:
        """The tree of a directory without the ruled paths.

        Raises: LimitExceeded. OSError: the directory itself cannot be listed.
        """
        root = self._entry(root_fd, os.fstat(root_fd))
        place = Descent(root_fd)
        trail: list[tuple[bytes, Entry, Rules | None, Iterator[tuple[bytes, os.stat_result]]]]
        trail = [(b"", root, rules, iter(list_directory(root_fd)))]
        try:
            while trail:
                _, parent, ruled, names = trail[-1]
                step = next(names, None)
                if step is None:
                    trail.pop()
                    if trail:
                        place.up()
                    continue
                name, found = step
                if is_ruled(ruled, name):
                    continue
                try:
                    child = parent.children[name] = self._child(place.fd, name, found)
                    if stat.S_ISDIR(child.mode):
                        place.down(name)
                        trail.append((name, child, (ruled or {}).get(name), iter(list_directory(place.fd))))
                except OSError as error:
                    path = b"/".join([*(part[0] for part in trail), name])[:4096]
                    self.gaps.append((os.fsdecode(path), f"cannot be read: {error.strerror}"))
                if len(trail) > self._options.max_depth:
                    raise LimitExceeded(f"the tree has more levels than max_depth ({self._options.max_depth})")
        finally:
            place.close()
        return root

    def _child(self, directory_fd: int, name: bytes, found: os.stat_result) -> Entry:
        identity = (found.st_dev, found.st_ino)
        if found.st_nlink > 1 and identity in self._seen:
            return self._seen[identity]
        with closing(look(directory_fd, name)) as looked:
            entry = self._entry(looked, os.fstat(looked), looked=True)
            if stat.S_ISLNK(entry.mode):
                entry.target = os.readlink(b"", dir_fd=looked)
            elif stat.S_ISREG(entry.mode):
                self._content(entry, looked)
        if not stat.S_ISDIR(entry.mode):
            self._seen[identity] = entry
        return entry

    def _entry(self, descriptor: int, found: os.stat_result, *, looked: bool = False) -> Entry:
        self.entries += 1
        if self.entries > self._options.max_entries:
            raise LimitExceeded(f"the tree has more entries than max_entries ({self._options.max_entries})")
        xattrs = read_xattrs(descriptor, looked=looked)
        if sum(len(value) for _, value in xattrs) > self._options.max_xattr_bytes:
            raise LimitExceeded(f"an entry has more attributes than max_xattr_bytes ({self._options.max_xattr_bytes})")
        entry = Entry(found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns, xattrs)
        if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
            entry.rdev = found.st_rdev
        return entry

    def _content(self, entry: Entry, looked: int) -> None:
        with closing(open_regular(looked)) as descriptor:
            entry.size = os.fstat(descriptor).st_size
            segments = []
            for start, end in _data_ranges(descriptor, entry.size):
                self.content_bytes += end - start
                if self.content_bytes > self._options.max_content_bytes:
                    raise LimitExceeded(
                        f"the tree holds more than max_content_bytes ({self._options.max_content_bytes})"
                    )
                segments.append((start, os.pread(descriptor, end - start, start)))
            entry.segments = tuple(segments)


def _data_ranges(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and end of each run of data, by SEEK_DATA and SEEK_HOLE, in pieces that one read returns."""
    at = 0
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == 6:  # ENXIO: only a hole is left
                return
            raise
        end = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        for piece in range(start, end, 2**24):
            yield piece, min(piece + 2**24, end)
        at = end


def compare(older: Entry, newer: Entry) -> Iterator[tuple[str, bytes]]:
    """``(status, path)`` of what differs below the roots, in tree order; a directory's time alone is no change."""
    trail = [(b"", older, newer, iter(sorted(older.children.keys() | newer.children.keys())))]
    while trail:
        path, before, after, names = trail[-1]
        name = next(names, None)
        if name is None:
            trail.pop()
            continue
        one, two, at = before.children.get(name), after.children.get(name), path + b"/" + name
        status = _status(one, two)
        if status:
            yield status, at
        inner_one, inner_two = one or NOTHING, two or NOTHING
        if inner_one.children or inner_two.children:
            inner = iter(sorted(inner_one.children.keys() | inner_two.children.keys()))
            trail.append((at, inner_one, inner_two, inner))


def tree_digest(root: Entry) -> bytes:
    """Equal for equal trees: names, attributes, content and link groups."""
    digest = hashlib.sha256()
    numbers: dict[int, int] = {}
    trail = [iter([(b"/", root)])]
    while trail:
        step = next(trail[-1], None)
        if step is None:
            digest.update(b"up")
            trail.pop()
            continue
        name, entry = step
        group = numbers.setdefault(id(entry), len(numbers))
        digest.update(repr((name, group, entry.attributes(), entry.rdev, entry.target, entry.size)).encode())
        for offset, data in entry.segments:
            digest.update(repr((offset, len(data))).encode())
            digest.update(data)
        if stat.S_ISDIR(entry.mode):
            trail.append(iter(sorted(entry.children.items())))
    return digest.digest()


def forget_ways(present: Entry, wanted: Entry, kept: Rules) -> None:
    """Take directories out of ``present`` that ``wanted`` lacks and that stand only because they lead to kept paths."""
    for name, inner in kept.items():
        child = present.children.get(name)
        if child is None or not inner:
            continue
        forget_ways(child, wanted.children.get(name, NOTHING), inner)
        if name not in wanted.children and not child.children:
            del present.children[name]


def contents(root: Entry) -> Iterator[bytes]:
    """Every piece of data in the tree, in no order."""
    waiting = [root]
    while waiting:
        for child in waiting.pop().children.values():
            yield from (data for _, data in child.segments)
            if child.children:
                waiting.append(child)


NOTHING = Entry(0, 0, 0, 0)
"""Stands for what is not there."""


def _status(one: Entry | None, two: Entry | None) -> str | None:
    if one is None or two is None:
        return "A" if one is None else "D"
    if stat.S_IFMT(one.mode) != stat.S_IFMT(two.mode):
        return "T"
    if one.content() != two.content() and one.data() != two.data():
        return "M"
    if one.rdev != two.rdev or one.target != two.target:
        return "M"
    if stat.S_ISDIR(one.mode):
        owner = (one.mode, one.uid, one.gid, one.xattrs) != (two.mode, two.uid, two.gid, two.xattrs)
        return "m" if owner else None
    return "m" if one.attributes() != two.attributes() else None
