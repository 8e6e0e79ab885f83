"""New entries of one tree, made ready beside it and put in their places.

The *staging* directory stands on the tree's own file system, outside of the tree (inside, under a name that nobody can
know before, for a tmpfs or a declared bind). Files staged before the container is touched turn a full disk or a damaged
object into an error while nothing has happened yet.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Self

from snapshot_drivers import beneath
from snapshot_drivers.inode_flags import HOLDING, write_flags
from snapshot_drivers.overlay.attributes import set_attributes, set_flags
from snapshot_drivers.overlay.plan import DirectoryPlan, wanted_files
from snapshot_drivers.removal import release_open, remove
from snapshot_drivers.tree import Get, Node

STAGING_PREFIX: Final = b".orchestrator-restore-"
_PAGE: Final = 4096
_ZERO_PAGE: Final = bytes(_PAGE)


class Staging:
    """Files of one tree made ready beside it."""

    def __init__(self, place_fd: int, get: Get, *, ours: bool = False) -> None:
        """Makes the staging directory in ``place_fd``, which is closed at the end.

        ``ours``: the container cannot write there, so what a dead owner left under such a name is cleared.
        """
        self.name: Final = STAGING_PREFIX + secrets.token_hex(8).encode()
        self._place_fd = place_fd
        self._get = get
        self._ready: dict[Hashable, list[bytes]] = {}
        self._links: dict[bytes, bytes] = {}
        self._flagged: dict[bytes, int] = {}
        self._count = 0
        self._fd = -1
        try:
            if ours:
                _clear(place_fd)
            with _as_it_was(place_fd):
                os.mkdir(self.name, 0o700, dir_fd=place_fd)
            self._fd = beneath.open_directory(place_fd, self.name)
            write_flags(self._fd, 0)  # a new entry inherits some
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The staging directory is gone. Repeatable."""
        if self._place_fd < 0:
            return
        place_fd, self._place_fd = self._place_fd, -1
        try:
            if self._fd >= 0:
                os.close(self._fd)
            with suppress(FileNotFoundError), _as_it_was(place_fd):
                remove(place_fd, self.name)
        finally:
            os.close(place_fd)

    def prepare(self, plan: DirectoryPlan) -> int:
        """Every regular file of the plan lies ready, read from the store and checked; answers the bytes written.

        Raises: StoreDamaged, OSError (disk full).
        """
        written = 0
        linked: set[bytes] = set()
        for node in wanted_files(plan):
            if node.is_regular and node.link not in linked:
                if node.link is not None:
                    linked.add(node.link)
                self._ready.setdefault(_key(node), []).append(self._make(node))
                written += sum(segment.length for segment in node.segments)
        return written

    def start_over(self) -> None:
        """What was put before may have been written to since: its inodes are not linked to again."""
        self._links.clear()
        self._flagged.clear()

    def finish(self) -> None:
        """All names of the hardlinked files have been put: they get their flags, which allow no further one."""
        while self._flagged:
            link, flags = self._flagged.popitem()
            name = self._links.pop(link)
            with (
                beneath.closing(beneath.look(self._fd, name)) as looked,
                beneath.closing(beneath.open_regular(looked)) as file,
            ):
                os.unlink(name, dir_fd=self._fd)
                write_flags(file, flags)

    def put(self, directory_fd: int, node: Node) -> None:
        """The entry stands in the directory, with content and attributes, whatever non-directory was there before."""
        if node.link is not None:
            self._put_link(directory_fd, node)
        elif node.is_regular:
            os.rename(self._take(node), node.name, src_dir_fd=self._fd, dst_dir_fd=directory_fd)
            set_flags(directory_fd, node)
        else:
            with suppress(FileNotFoundError):
                os.unlink(node.name, dir_fd=directory_fd)
            _make_special(directory_fd, node.name, node)

    def _put_link(self, directory_fd: int, node: Node) -> None:
        assert node.link is not None
        first = self._links.get(node.link)
        if first is None:
            if node.is_regular:
                first = self._take(node)
            else:
                first = self._new_name()
                _make_special(self._fd, first, node)
            self._links[node.link] = first
            if node.flags:
                self._flagged[node.link] = node.flags
        with suppress(FileNotFoundError):
            os.unlink(node.name, dir_fd=directory_fd)
        os.link(first, node.name, src_dir_fd=self._fd, dst_dir_fd=directory_fd, follow_symlinks=False)

    def _take(self, node: Node) -> bytes:
        ready = self._ready.get(_key(node))
        return ready.pop() if ready else self._make(node)

    def _make(self, node: Node) -> bytes:
        name = self._new_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self._fd)
        try:
            for segment in node.segments:
                _write_sparse(descriptor, self._get(segment.digest), segment.offset)
            os.ftruncate(descriptor, node.size)
        finally:
            os.close(descriptor)
        set_attributes(self._fd, name, node)
        return name

    def _new_name(self) -> bytes:
        self._count += 1
        return b"%d" % self._count


@contextmanager
def _as_it_was(directory_fd: int) -> Iterator[None]:
    """An entry may come or go, whatever the directory's flags; it does not show by its times that one did."""
    found = os.fstat(directory_fd)
    flags = release_open(directory_fd)
    try:
        yield
        os.utime(directory_fd, ns=(found.st_atime_ns, found.st_mtime_ns))
    finally:
        if flags & HOLDING:
            write_flags(directory_fd, flags)


def _clear(place_fd: int) -> None:
    for name, _ in beneath.list_directory(place_fd):
        if name.startswith(STAGING_PREFIX):
            remove(place_fd, name)


def _key(node: Node) -> Hashable:
    return node.content(), node.attributes()


def _write_sparse(descriptor: int, data: bytes, offset: int) -> None:
    """Write the pages that are not all zero, runs of them at once."""
    view = memoryview(data)
    start = None
    for page in range(0, len(data), _PAGE):
        empty = data[page : page + _PAGE] == _ZERO_PAGE[: len(data) - page]
        if not empty and start is None:
            start = page
        elif empty and start is not None:
            beneath.write(descriptor, view[start:page], offset + start)
            start = None
    if start is not None:
        beneath.write(descriptor, view[start:], offset + start)


def _make_special(directory_fd: int, name: bytes, node: Node) -> None:
    if stat.S_ISLNK(node.mode):
        os.symlink(node.target, name, dir_fd=directory_fd)
    else:
        os.mknod(name, stat.S_IFMT(node.mode) | 0o600, node.rdev, dir_fd=directory_fd)
    set_attributes(directory_fd, name, node)
