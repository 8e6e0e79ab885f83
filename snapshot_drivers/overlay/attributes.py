"""Owner, extended attributes, mode, times and flags of entries in a tree, set in an order in which none undoes another.

Owner, extended attributes, mode, times: a chown clears setuid bits and file capabilities. Inode flags come last, when
an entry stands in its place with all its names: an immutable file can be neither renamed nor linked.
"""

from __future__ import annotations

import errno
import os
import stat

from snapshot_drivers import beneath
from snapshot_drivers.inode_flags import write_flags
from snapshot_drivers.overlay.entry import ROOT_ONLY_XATTRS
from snapshot_drivers.tree import Node


def set_attributes(directory_fd: int, name: bytes, node: Node) -> None:
    """Owner, extended attributes, mode and times of an entry that is no directory are as wanted."""
    with beneath.closing(beneath.look(directory_fd, name)) as looked:
        os.chown(name, node.uid, node.gid, dir_fd=directory_fd, follow_symlinks=False)
        handle = f"/proc/self/fd/{looked}"
        _set_xattrs(handle, node)
        if not stat.S_ISLNK(node.mode):
            os.chmod(handle, stat.S_IMODE(node.mode))  # noqa: PTH101 the path is a descriptor's
    os.utime(name, ns=(node.mtime_ns, node.mtime_ns), dir_fd=directory_fd, follow_symlinks=False)


def set_flags(directory_fd: int, node: Node, *, is_new: bool = True) -> None:
    """The inode flags of an entry that is no directory are as wanted; ``is_new``: it has none yet."""
    if node.is_regular and (node.flags or not is_new):
        with (
            beneath.closing(beneath.look(directory_fd, node.name)) as looked,
            beneath.closing(beneath.open_regular(looked)) as file,
        ):
            write_flags(file, node.flags)


def set_directory_attributes(descriptor: int, node: Node, *, root: bool) -> None:
    """All attributes of a directory are as wanted, its flags too: from now on they count."""
    os.fchown(descriptor, node.uid, node.gid)
    _set_xattrs(descriptor, node, keep=ROOT_ONLY_XATTRS if root else frozenset())
    os.fchmod(descriptor, stat.S_IMODE(node.mode))
    os.utime(descriptor, ns=(node.mtime_ns, node.mtime_ns))
    write_flags(descriptor, node.flags)


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
