"""Removing and replacing what a container made, at any depth and whatever flags it has."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from snapshot_drivers import beneath
from snapshot_drivers.inode_flags import HOLDING, read_flags, write_flags


def release(directory_fd: int, name: bytes) -> None:
    """No flag of its inode keeps the entry from being changed, replaced or removed."""
    with beneath.closing(beneath.look(directory_fd, name)) as looked:
        kind = stat.S_IFMT(os.fstat(looked).st_mode)
        if kind == stat.S_IFREG:
            with beneath.closing(beneath.open_regular(looked)) as file:
                release_open(file)
        elif kind == stat.S_IFDIR:
            with beneath.closing(beneath.open_directory(directory_fd, name)) as directory:
                release_open(directory)


def release_open(descriptor: int) -> int:
    """The same of an open file or directory; answers the flags that it had."""
    flags = read_flags(descriptor)
    if flags & HOLDING:
        write_flags(descriptor, flags & ~HOLDING)
    return flags


def remove(directory_fd: int, name: bytes) -> int:
    """``name`` and everything below it is gone; answers how many entries were removed. Any depth, whatever its flags.

    A flag of ``directory_fd`` itself that stands in the way is taken from it.
    """
    beneath.check_name(name)
    if not stat.S_ISDIR(os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_mode):
        _remove_one(os.unlink, directory_fd, name)
        return 1
    removed = 0
    place = beneath.Descent(directory_fd)
    trail: list[tuple[bytes, list[bytes]]] = []
    try:
        descend: bytes | None = name
        while descend is not None or trail:
            if descend is not None:
                place.down(descend)
                gone, full = _empty_out(place.fd)
                removed += gone
                trail.append((descend, full))
            else:
                done, _ = trail.pop()
                place.up()
                _remove_one(os.rmdir, place.fd, done)
                removed += 1
            descend = trail[-1][1].pop() if trail and trail[-1][1] else None
    finally:
        place.close()
    return removed


def _empty_out(directory_fd: int) -> tuple[int, list[bytes]]:
    """Remove all but directories that hold something; answers how many went, and the names of those left."""
    removed = 0
    full: list[bytes] = []
    for name, attributes in beneath.list_directory(directory_fd):
        if stat.S_ISDIR(attributes.st_mode):
            try:
                _remove_one(os.rmdir, directory_fd, name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                full.append(name)
                continue
        else:
            _remove_one(os.unlink, directory_fd, name)
        removed += 1
    return removed, full


def _remove_one(call: Callable[..., None], directory_fd: int, name: bytes) -> None:
    try:
        call(name, dir_fd=directory_fd)
    except PermissionError:
        release_open(directory_fd)
        release(directory_fd, name)
        call(name, dir_fd=directory_fd)
