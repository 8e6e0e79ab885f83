"""What a container may do to a tree, one random operation at a time, faster than the file system's clock ticks."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from snapshot_drivers import beneath
from snapshot_drivers.inode_flags import write_flags

NAMES = (b"a", b"b", b"keep", b"in", b"cache", b"v", b"x", b"\xff\xfe", b"n\nl ")
TARGETS = (b"nowhere", b"/etc/passwd", b"..", b"a" * 300)
IS_ROOT = os.geteuid() == 0


def below(root: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Every entry with its path from the root on, in a fixed order."""
    for directory, directories, files in os.walk(root):
        directories.sort()
        for name in sorted(directories + files):
            path = directory + b"/" + name
            yield path[len(root) :], os.lstat(path)


class Living:
    """A tree that is changed."""

    def __init__(self, root: Path, aside: Path) -> None:
        """``aside``: a directory of the same file system, outside of the tree."""
        self.root = os.fsencode(root)
        self.place = aside
        self.moment = 0

    def paths(self, *, of: Callable[[int], bool] = lambda mode: True) -> list[bytes]:
        return [self.root + path for path, found in below(self.root) if of(found.st_mode)]

    def place_for(self, number: int) -> bytes:
        directories = [self.root, *self.paths(of=stat.S_ISDIR)]
        directory = directories[number % len(directories)]
        if directory.count(b"/") - self.root.count(b"/") > 4:
            directory = self.root
        return directory + b"/" + NAMES[number // 7 % len(NAMES)]

    def change(self, kind: str, one: int, two: int) -> None:
        self.moment += 1
        files = self.paths(of=stat.S_ISREG)
        everything = self.paths()
        with suppress(OSError):  # a name is taken, a directory is moved into itself, nobody reads a fifo
            if kind in ON_PLACE:
                ON_PLACE[kind](self, self.place_for(one), two)
            elif kind in ON_FILE and files:
                ON_FILE[kind](self, files[one % len(files)], two)
            elif kind in ON_ANY and everything:
                ON_ANY[kind](self, everything[one % len(everything)], two)

    def data(self, size: int) -> bytes:
        return (b"%08d" % self.moment * (size // 8 + 1))[:size]

    def unlock(self) -> None:
        """Nothing stands in the way of removing it all."""
        for path in [self.root, *self.paths(of=lambda mode: stat.S_ISREG(mode) or stat.S_ISDIR(mode))]:
            change_flags(self, path, 0)


def write(living: Living, path: bytes, size: int, *, flags: int = os.O_CREAT | os.O_TRUNC, at: int = 0) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags)
    try:
        os.pwrite(descriptor, living.data(size), at)
    finally:
        os.close(descriptor)


def is_movable(living: Living, source: bytes, target: bytes) -> bool:
    return not (target + b"/").startswith(source + b"/") and not (source + b"/").startswith(target + b"/")


def clear(path: bytes) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def rename_over(living: Living, path: bytes, two: int) -> None:
    target = living.place_for(two)
    if is_movable(living, path, target):
        if os.path.lexists(target) and os.path.isdir(path) != os.path.isdir(target):
            clear(target)
        with suppress(OSError):
            os.rename(path, target)


def exchange(living: Living, path: bytes, two: int) -> None:
    """Two entries of any types change places."""
    others = living.paths()
    other = others[two % len(others)]
    if is_movable(living, path, other):
        aside = os.fsencode(living.place / "aside")
        os.rename(path, aside)
        try:
            os.rename(other, path)
        except OSError:
            os.rename(aside, path)
        else:
            os.rename(aside, other)


def hardlink(living: Living, path: bytes, two: int) -> None:
    os.link(path, living.place_for(two), follow_symlinks=False)


def replace_by_copy(living: Living, path: bytes, two: int) -> None:
    copied = os.fsencode(living.place / "copied")
    shutil.copy2(path, copied)
    os.rename(copied, path)


def swap_type(living: Living, path: bytes, two: int) -> None:
    clear(path)
    (os.mkdir, lambda name: write(living, name, two % 999), lambda name: os.symlink(TARGETS[two % 4], name))[two % 3](
        path
    )


def set_times(living: Living, path: bytes, two: int) -> None:
    os.utime(path, ns=(1, (0, 1_000_000_000_000_000_000, 1_700_000_000_123_456_789)[two % 3]), follow_symlinks=False)


def set_attribute(living: Living, path: bytes, two: int) -> None:
    if stat.S_IFMT(os.lstat(path).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
        with suppress(OSError):
            if two % 3:
                os.setxattr(path, (b"user.k", b"user.\xff")[two % 2], living.data(two % 40))
            else:
                os.removexattr(path, b"user.k")


def sparse(living: Living, path: bytes, two: int) -> None:
    os.truncate(path, 3 << 20)
    write(living, path, two % 5000, flags=0, at=(two % 3) << 20)


def change_mode(living: Living, path: bytes, two: int) -> None:
    if not os.path.islink(path):
        os.chmod(path, (0o755, 0o600, 0o4711, 0o1777)[two % 4] | (0 if IS_ROOT else 0o700))


def change_owner(living: Living, path: bytes, two: int) -> None:
    if IS_ROOT:
        os.chown(path, two % 3, two % 5, follow_symlinks=False)


def change_flags(living: Living, path: bytes, two: int) -> None:
    if IS_ROOT and stat.S_IFMT(os.lstat(path).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
        with beneath.closing(os.open(path, os.O_RDONLY)) as descriptor:
            write_flags(descriptor, (0, 0x10, 0x20, 0xC0, 0)[two % 5])


Operation = Callable[[Living, bytes, int], object]
ON_PLACE: dict[str, Operation] = {
    "create": lambda living, path, two: write(living, path, two % 3000),
    "directory": lambda living, path, two: os.mkdir(path),
    "link": lambda living, path, two: os.symlink(TARGETS[two % len(TARGETS)], path),
    "fifo": lambda living, path, two: os.mkfifo(path),
}
ON_FILE: dict[str, Operation] = {
    "overwrite": lambda living, path, two: write(living, path, two % 3000, flags=os.O_TRUNC),
    "same size": lambda living, path, two: write(living, path, os.stat(path).st_size % 5000, flags=0),
    "append": lambda living, path, two: write(living, path, two % 300, flags=0, at=os.stat(path).st_size),
    "truncate": lambda living, path, two: os.truncate(path, two % 3000),
    "sparse": sparse,
    "copy": replace_by_copy,
    "hardlink": hardlink,
    "hardlink too": hardlink,
}
ON_ANY: dict[str, Operation] = {
    "rename": rename_over,
    "exchange": exchange,
    "remove": lambda living, path, two: clear(path),
    "mode": change_mode,
    "owner": change_owner,
    "times": set_times,
    "attribute": set_attribute,
    "flags": change_flags,
    "swap": swap_type,
}


def populate(living: Living) -> None:
    """Something of every kind, so that each operation finds what it works on."""
    for path in (b"a/b", b"b", b"keep", b"cache"):
        os.makedirs(living.root + b"/" + path)
    for number, path in enumerate((b"in", b"a/a", b"a/b/a", b"b/a", b"b/x", b"keep/a", b"cache/a")):
        write(living, living.root + b"/" + path, 100 + number)
    os.link(living.root + b"/a/a", living.root + b"/a/b/b")
    os.link(living.root + b"/a/a", living.root + b"/keep/b")
    os.link(living.root + b"/b/a", living.root + b"/b/b")
    os.symlink(b"a", living.root + b"/v")
