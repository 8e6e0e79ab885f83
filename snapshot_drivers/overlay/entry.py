"""Read one entry that a container controls: attributes, link target, device, content."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Final

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions
from snapshot_drivers.errors import LimitExceeded
from snapshot_drivers.inode_flags import read_flags
from snapshot_drivers.leases import Leases, opened
from snapshot_drivers.tree import Node, Put, Segment, Xattrs

BLOCK_BYTES: Final = 1 << 18
_ZERO: Final = bytes(BLOCK_BYTES)
_READ_TRIES: Final = 3
# Made by the kernel for one upper directory; they neither belong to the state nor fit another directory.
ROOT_ONLY_XATTRS: Final = frozenset({"trusted.overlay.uuid", "trusted.overlay.origin"})


def node_of(name: bytes, found: os.stat_result) -> Node:
    """The entry as far as ``stat`` tells; only a regular file has a size."""
    node = Node(name, found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns)
    node.ino = found.st_ino
    node.ctime_ns = found.st_ctime_ns
    node.size = found.st_size if stat.S_ISREG(found.st_mode) else 0
    return node


class EntryReader:
    """Reads entries of one tree, and counts what it reads against the limits."""

    def __init__(self, put: Put, options: CaptureOptions, leases: Leases) -> None:
        """``put`` stores (or only hashes) blocks of content."""
        self._put = put
        self._options = options
        self._leases = leases
        self._content_bytes = 0

    def read(self, directory_fd: int, name: bytes, listed: os.stat_result) -> tuple[Node, str]:
        """Everything about one entry that is no directory, and why it could not be read (empty: it was).

        Raises: FileNotFoundError: it is gone, no other OSError; LimitExceeded.
        """
        node = node_of(name, listed)
        try:
            with beneath.closing(beneath.look(directory_fd, name)) as looked:
                found = os.fstat(looked)
                if stat.S_ISDIR(found.st_mode):
                    raise OSError(errno.EISDIR, "it became a directory meanwhile")
                node = node_of(name, found)
                node.xattrs = self.xattrs(looked, name, looked=True)
                if stat.S_ISLNK(found.st_mode):
                    node.target = os.readlink(b"", dir_fd=looked)
                elif stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
                    node.rdev = found.st_rdev
                elif stat.S_ISREG(found.st_mode):
                    self._read_content(looked, node)
        except FileNotFoundError:
            raise
        except OSError as error:
            node.unreadable = True
            return node, f"cannot be read: {error.strerror}"
        return node, "was written to while it was read, every time" if node.unreadable else ""

    def xattrs(self, descriptor: int, name: bytes, *, looked: bool) -> Xattrs:
        """All that belong to the state; ``name`` is empty for the root of a tree. ``looked``: an ``O_PATH`` descriptor.

        Raises: OSError, LimitExceeded.
        """
        found = beneath.read_xattrs(descriptor, looked=looked)
        if not name:
            found = tuple(pair for pair in found if pair[0] not in ROOT_ONLY_XATTRS)
        most = self._options.max_xattr_bytes
        if found and sum(len(key) + len(value) for key, value in found) > most:
            raise LimitExceeded(f"{os.fsdecode(name)!r} has more than {most} bytes of attributes (max_xattr_bytes)")
        return found

    def _read_content(self, looked: int, node: Node) -> None:
        with opened(looked, self._leases) as file:
            for _ in range(_READ_TRIES):
                before = os.fstat(file)
                node.size, node.ctime_ns, node.mtime_ns = before.st_size, before.st_ctime_ns, before.st_mtime_ns
                node.flags = read_flags(file)
                with suppress(EOFError):
                    node.segments = self._segments(file, before.st_size)
                    after = os.fstat(file)
                    if (after.st_size, after.st_ctime_ns) == (before.st_size, before.st_ctime_ns):
                        return
        node.unreadable = True

    def _segments(self, file: int, size: int) -> tuple[Segment, ...]:
        """The blocks of a file that are not all zero.

        Whole aligned blocks whatever the layout on the disk, so that equal content has equal segments.

        Raises: EOFError: the file is shorter than that.
        """
        segments: list[Segment] = []
        position = 0
        while position < size:
            if size > BLOCK_BYTES:
                try:
                    position = os.lseek(file, position, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:  # only a hole follows
                        break
                    raise
                position -= position % BLOCK_BYTES
            length = min(BLOCK_BYTES, size - position)
            self._count(length)
            data = beneath.read(file, length, position)
            if len(data) < length:
                raise EOFError
            if data != _ZERO[:length]:
                segments.append(Segment(position, length, self._put(data)))
            position += BLOCK_BYTES
        return tuple(segments)

    def _count(self, size: int) -> None:
        self._content_bytes += size
        if self._content_bytes > self._options.max_content_bytes:
            raise LimitExceeded(f"more than {self._options.max_content_bytes} changed bytes (max_content_bytes)")
