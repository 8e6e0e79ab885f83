"""Writes a tree of `memory_tree` into a directory: only what differs, hard links aside."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from snapshot_drivers.base import CaptureOptions
from snapshot_drivers.beneath import Descent, closing, look
from snapshot_drivers.memory_tree import NOTHING, Entry, Reader, Rules
from snapshot_drivers.removal import remove


def write_tree(root_fd: int, root: Entry, kept: Rules) -> int:
    """The directory holds ``root`` and, untouched, what stands at the ``kept`` paths; answers the entries touched.

    What is right already keeps its inode, hard links aside.

    Raises: OSError. LimitExceeded: what stands there is too large to be compared.
    """
    names_left = _names(root)
    touched, right = _clear(root_fd, root, kept, names_left)
    links: dict[int, int] = {}
    place = Descent(root_fd)
    trail: list[tuple[Entry, Iterator[tuple[bytes, Entry]]]] = [(root, iter(root.children.items()))]
    try:
        while trail:
            entry, children = trail[-1]
            step = next(children, None)
            if step is None:
                trail.pop()
                _set_attributes(f"/proc/self/fd/{place.fd}", entry)
                if trail:
                    place.up()
                continue
            name, child = step
            if stat.S_ISDIR(child.mode):
                if id(child) not in right:
                    os.mkdir(name, 0o700, dir_fd=place.fd)
                    touched += 1
                place.down(name)
                trail.append((child, iter(child.children.items())))
                continue
            if id(child) in right:
                continue
            touched += 1
            if id(child) in links:
                os.link(f"/proc/self/fd/{links[id(child)]}", name, dst_dir_fd=place.fd, follow_symlinks=True)
            else:
                _make(place.fd, name, child)
                if names_left[id(child)] > 1:
                    links[id(child)] = look(place.fd, name)
            names_left[id(child)] -= 1
            if not names_left[id(child)] and id(child) in links:
                os.close(links.pop(id(child)))
    finally:
        place.close()
        for descriptor in links.values():
            os.close(descriptor)
    return touched


def _clear(root_fd: int, wanted: Entry, kept: Rules, names: Counter[int]) -> tuple[int, set[int]]:
    """What stands in the way of ``wanted`` is gone: how many entries, and the wanted ones that are in place already.

    A directory is in place when it is one; its attributes are set later in any case.
    """
    unlimited = CaptureOptions(max_entries=2**62, max_depth=2**31, max_content_bytes=2**62, max_xattr_bytes=2**31)
    present = Reader(unlimited).read(root_fd, kept)
    names_present = _names(present)
    removed, right = 0, set[int]()
    place = Descent(root_fd)
    trail: list[tuple[Entry, Rules | None, Iterator[tuple[bytes, Entry]]]]
    trail = [(wanted, kept, iter(present.children.items()))]
    try:
        while trail:
            parent, ruled, children = trail[-1]
            step = next(children, None)
            if step is None:
                trail.pop()
                if trail:
                    place.up()
                continue
            name, child = step
            other = parent.children.get(name)
            inner = (ruled or {}).get(name)
            if stat.S_ISDIR(child.mode) and (inner or (other is not None and stat.S_ISDIR(other.mode))):
                if other is not None:
                    right.add(id(other))
                place.down(name)
                trail.append((other or NOTHING, inner, iter(child.children.items())))
            elif other is not None and _is_equal(child, other) and names[id(other)] == names_present[id(child)] == 1:
                right.add(id(other))
            else:
                removed += remove(place.fd, name)
    finally:
        place.close()
    return removed, right


def _is_equal(one: Entry, two: Entry) -> bool:
    return one.attributes() == two.attributes() and one.content() == two.content() and not stat.S_ISDIR(one.mode)


def _make(directory_fd: int, name: bytes, entry: Entry) -> None:
    """A new entry that is no directory, with all of its attributes."""
    kind = stat.S_IFMT(entry.mode)
    if kind == stat.S_IFLNK:
        os.symlink(entry.target, name, dir_fd=directory_fd)
    elif kind == stat.S_IFREG:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing(os.open(name, flags, 0o600, dir_fd=directory_fd)) as descriptor:
            os.truncate(descriptor, entry.size)
            for offset, data in entry.segments:
                os.pwrite(descriptor, data, offset)
    else:
        os.mknod(name, kind | 0o600, entry.rdev, dir_fd=directory_fd)
    if kind == stat.S_IFLNK:
        os.chown(name, entry.uid, entry.gid, dir_fd=directory_fd, follow_symlinks=False)
        for attribute, value in entry.xattrs:
            os.setxattr(b"/proc/self/fd/%d/%s" % (directory_fd, name), attribute, value, follow_symlinks=False)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=directory_fd, follow_symlinks=False)
        return
    with closing(look(directory_fd, name)) as looked:
        _set_attributes(f"/proc/self/fd/{looked}", entry)


def _set_attributes(handle: str, entry: Entry) -> None:
    """Owner, extended attributes, mode, time, in this order: each of them would undo one that came before it."""
    wanted = dict(entry.xattrs)
    found, present = Path(handle).stat(), {name: os.getxattr(handle, name) for name in os.listxattr(handle)}
    if (found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns, present) == (*entry.attributes()[:4], wanted):
        return
    os.chown(handle, entry.uid, entry.gid)
    for name in present.keys() - wanted.keys():
        os.removexattr(handle, name)
    for name, value in entry.xattrs:
        os.setxattr(handle, name, value)
    Path(handle).chmod(stat.S_IMODE(entry.mode))
    os.utime(handle, ns=(entry.mtime_ns, entry.mtime_ns))


def _names(root: Entry) -> Counter[int]:
    """Under how many names each inode stands."""
    found: Counter[int] = Counter()
    waiting = [root]
    while waiting:
        for child in waiting.pop().children.values():
            found[id(child)] += 1
            if child.children:
                waiting.append(child)
    return found
