"""Carry out a plan on a tree: every write goes through descriptors, no link is followed, no file is changed in place.

New files are made in a *staging* directory on the tree's own file system, outside of the tree (inside, under a name
that nobody can know before, for a tmpfs or a declared bind), and renamed in. Files staged before the container is
touched turn a full disk or a damaged object into an error while nothing has happened yet. Metadata goes owner, extended
attributes, mode, times: a chown clears setuid bits and file capabilities.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Self

from snapshot_drivers import beneath
from snapshot_drivers.overlay.entry import ROOT_ONLY_XATTRS
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.overlay.plan import DirectoryPlan, wanted_files
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
        self._count = 0
        self._fd = -1
        try:
            if ours:
                _clear(place_fd)
            with _same_times(place_fd):
                os.mkdir(self.name, 0o700, dir_fd=place_fd)
            self._fd = beneath.open_directory(place_fd, self.name)
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
            with suppress(FileNotFoundError), _same_times(place_fd):
                beneath.remove(place_fd, self.name)
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

    def put(self, directory_fd: int, node: Node) -> None:
        """The entry stands in the directory, with content and attributes, whatever non-directory was there before."""
        if node.link is not None:
            self._put_link(directory_fd, node)
        elif node.is_regular:
            os.rename(self._take(node), node.name, src_dir_fd=self._fd, dst_dir_fd=directory_fd)
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
def _same_times(directory_fd: int) -> Iterator[None]:
    """The directory does not show by its times that an entry came or went."""
    found = os.fstat(directory_fd)
    yield
    os.utime(directory_fd, ns=(found.st_atime_ns, found.st_mtime_ns))


def _clear(place_fd: int) -> None:
    for name, _ in beneath.list_directory(place_fd):
        if name.startswith(STAGING_PREFIX):
            beneath.remove(place_fd, name)


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


def set_attributes(directory_fd: int, name: bytes, node: Node) -> None:
    """Owner, extended attributes, mode and times of an entry that is no directory are as wanted."""
    with beneath.closing(beneath.look(directory_fd, name)) as looked:
        os.chown(name, node.uid, node.gid, dir_fd=directory_fd, follow_symlinks=False)
        handle = f"/proc/self/fd/{looked}"
        _set_xattrs(handle, node)
        if not stat.S_ISLNK(node.mode):
            os.chmod(handle, stat.S_IMODE(node.mode))  # noqa: PTH101 the path is a descriptor's
    os.utime(name, ns=(node.mtime_ns, node.mtime_ns), dir_fd=directory_fd, follow_symlinks=False)


def _set_directory_attributes(descriptor: int, node: Node, *, root: bool) -> None:
    os.fchown(descriptor, node.uid, node.gid)
    _set_xattrs(descriptor, node, keep=ROOT_ONLY_XATTRS if root else frozenset())
    os.fchmod(descriptor, stat.S_IMODE(node.mode))
    os.utime(descriptor, ns=(node.mtime_ns, node.mtime_ns))


def _set_xattrs(handle: int | str, node: Node, keep: frozenset[str] = frozenset()) -> None:
    try:
        present = set(os.listxattr(handle))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP and not node.xattrs:
            return
        raise
    for name in present - {name for name, _ in node.xattrs} - keep:
        os.removexattr(handle, name)
    for name, value in node.xattrs:
        if name not in present or os.getxattr(handle, name) != value:
            os.setxattr(handle, name, value)


def apply_plan(plan: DirectoryPlan, root_fd: int, staging: Staging) -> int:
    """The tree at ``root_fd`` is as the plan wants it; answers how many entries were touched.

    Raises: OSError, StoreDamaged: the tree is in between.
    """
    if plan.is_empty:
        return 0
    staging.start_over()
    touched = 0
    place = beneath.Descent(root_fd)
    trail: list[tuple[DirectoryPlan, list[DirectoryPlan]]] = []
    following: DirectoryPlan | None = plan
    try:
        while following is not None or trail:
            if following is not None:
                if trail:
                    place.down(following.node.name)
                touched += _apply_here(following, place.fd, staging)
                trail.append((following, list(reversed(following.below))))
            else:
                done, _ = trail.pop()
                _set_directory_attributes(place.fd, done.node, root=not trail)
                touched += 1
                if trail:
                    place.up()
            following = trail[-1][1].pop() if trail and trail[-1][1] else None
    finally:
        place.close()
    return touched


def remove_paths(root_fd: int, paths: PathSet) -> int:
    """The paths of the tree are gone; answers how many entries were removed."""
    removed = 0
    for parts in paths.members():
        place = beneath.Descent(root_fd)
        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                for part in parts[:-1]:
                    place.down(part)
                removed += beneath.remove(place.fd, parts[-1])
            finally:
                place.close()
    return removed


def _apply_here(plan: DirectoryPlan, directory_fd: int, staging: Staging) -> int:
    touched = 0
    for name in plan.remove:
        touched += beneath.remove(directory_fd, name)
    for node in plan.put:
        staging.put(directory_fd, node)
    for node in plan.adjust:
        set_attributes(directory_fd, node.name, node)
    for below in plan.below:
        if below.create:
            os.mkdir(below.node.name, 0o700, dir_fd=directory_fd)
    return touched + len(plan.put) + len(plan.adjust)
