"""Fingerprint of a directory tree that shares no code with the product: one line an entry.

Type, mode, owner, size, device, link target, content hash, extended attributes (overlayfs' own left out), inode flags
(those of ``chattr`` SiadAD), hardlink groups and the modification time in nanoseconds. Works at any depth; reads
whatever root can read. Run as a program on a path too.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import os
import stat
import sys
from collections.abc import Iterable

ENGINE_OWNED = (b"/proc", b"/sys", b"/dev", b"/etc/hosts", b"/etc/hostname", b"/etc/resolv.conf", b"/.dockerenv")


def walk(root: str, leave_out: Iterable[bytes] = ENGINE_OWNED) -> list[str]:
    """The lines of the tree at ``root``, in path order."""
    left = frozenset(leave_out)
    groups: dict[tuple[int, int], bytes] = {}
    lines: list[str] = []
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    _directory(top, b"", left, groups, lines)
    return lines


def _directory(
    top: int, path: bytes, left: frozenset[bytes], groups: dict[tuple[int, int], bytes], lines: list[str]
) -> None:
    pending: list[tuple[int, bytes, list[str]]] = [(top, path, sorted(os.listdir(top), reverse=True))]
    while pending:
        fd, at, names = pending[-1]
        if not names:
            pending.pop()
            os.close(fd)
            continue
        name = names.pop()
        full = at + b"/" + os.fsencode(name)
        if full in left:
            continue
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        lines.append(_line(fd, name, full, found, groups))
        if stat.S_ISDIR(found.st_mode):
            child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            pending.append((child, full, sorted(os.listdir(child), reverse=True)))


def _line(fd: int, name: str, full: bytes, found: os.stat_result, groups: dict[tuple[int, int], bytes]) -> str:
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=fd)
    try:
        proc = f"/proc/self/fd/{handle}"
        attributes = [
            (key, os.getxattr(proc, key))
            for key in sorted(os.listxattr(proc))
            if not key.startswith("trusted.overlay.")
        ]
        body, flags = "", 0
        if stat.S_ISREG(found.st_mode):
            digest = hashlib.sha256()
            with open(proc, "rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
                flags = inode_flags(file.fileno())
            body = digest.hexdigest()
        elif stat.S_ISLNK(found.st_mode):
            body = repr(os.readlink(name, dir_fd=fd))
        elif stat.S_ISDIR(found.st_mode):
            directory = os.open(proc, os.O_RDONLY | os.O_DIRECTORY)
            flags = inode_flags(directory)
            os.close(directory)
        group = b""
        if not stat.S_ISDIR(found.st_mode) and found.st_nlink > 1:
            group = groups.setdefault((found.st_dev, found.st_ino), full)
        size = found.st_size if stat.S_ISREG(found.st_mode) else 0
        device = found.st_rdev if stat.S_IFMT(found.st_mode) in (stat.S_IFCHR, stat.S_IFBLK) else 0
    finally:
        os.close(handle)
    return (
        f"{full!r} {found.st_mode:o} {found.st_uid}:{found.st_gid} {found.st_mtime_ns} {size} {device} "
        f"{group!r} {body} {attributes} {flags:x}"
    )


def inode_flags(descriptor: int) -> int:
    """Sync, immutable, append only, no dump, no access times, synchronous directory; 0 where there are none."""
    word = array.array("I", [0, 0])
    try:
        fcntl.ioctl(descriptor, 0x80086601, word)
    except OSError:
        return 0
    return word[0] & 0x100F8


if __name__ == "__main__":
    print("\n".join(walk(sys.argv[1])))
