"""A snapshot's root filesystem as one layer of an image: a tar stream of what differs from the layers below it.

Overlayfs' signs become those of image layers: a whiteout is an empty file ``.wh.<name>``, an opaque directory holds
``.wh..wh..opq``. Times keep their nanoseconds and names their bytes, in extended headers.

Source: the OCI image specification, "Image Layer Filesystem Changeset"; pax(1).
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from snapshot_drivers.errors import RestoreRefused
from snapshot_drivers.overlay.image import is_opaque
from snapshot_drivers.overlay.portable import Meaning, meaning_of
from snapshot_drivers.tree import Get, Node, children_of, decode_root

_WHITEOUT: Final = b".wh."
_OPAQUE: Final = b".wh..wh..opq"
_MOST_PATH_BYTES: Final = 4095
_OVERLAY: Final = "trusted.overlay."
_TYPES: Final = {
    stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE, stat.S_IFBLK: tarfile.BLKTYPE, stat.S_IFIFO: tarfile.FIFOTYPE,
}  # fmt: skip


@dataclass
class _Open:
    """A directory whose entries are being written."""

    path: bytes
    names: list[Node]


@dataclass
class ImageLayer:
    """The layer of one stored tree."""

    root: bytes
    """Digest of the root filesystem's tree."""
    get: Get
    left_out: list[str] = field(default_factory=list)
    """After ``pieces``: paths that no layer can hold, with the reason."""
    _links: dict[bytes, bytes] = field(default_factory=dict)

    def pieces(self) -> Iterator[bytes]:
        """The tar stream. Without recursion: directories may be nested as deep as a container likes.

        Raises: StoreDamaged. RestoreRefused: an entry takes its content from the layers of this host.
        """
        way = [_Open(b"", self._entries(decode_root(self.root, self.get)))]
        while way:
            directory = way[-1]
            if not directory.names:
                way.pop()
                continue
            node = directory.names.pop()
            path = directory.path + node.name
            reason = self._why_not(path, node)
            if reason is not None:
                self.left_out.append(f"/{os.fsdecode(path)}: {reason}")
                continue
            if node.is_whiteout:
                yield from self._empty(directory.path + _WHITEOUT + node.name, node)
                continue
            yield from self._member(path, node)
            if node.is_directory:
                if is_opaque(node.xattrs):
                    yield from self._empty(path + b"/" + _OPAQUE, node)
                way.append(_Open(path + b"/", self._entries(node)))
        yield bytes(2 * tarfile.BLOCKSIZE)

    def _entries(self, directory: Node) -> list[Node]:
        found = children_of(directory, self.get)
        return [found[name] for name in sorted(found, reverse=True)]

    def _why_not(self, path: bytes, node: Node) -> str | None:
        for name, value in node.xattrs:
            if meaning_of(name, value) is Meaning.BOUND:
                raise RestoreRefused(
                    f"/{os.fsdecode(path)} carries {name}: its content lies in the layers of this host (overlayfs with "
                    "redirect_dir or metacopy), which an image cannot say"
                )
        if node.unreadable:
            return "the snapshot does not hold it"
        if stat.S_ISSOCK(node.mode):
            return "a socket is nothing without the process that listens on it"
        if node.name.startswith(_WHITEOUT):
            return "in a layer of an image that name is the sign of a deleted entry"
        if len(path) > _MOST_PATH_BYTES:
            return "no engine takes a path of that length"
        return None

    def _empty(self, path: bytes, node: Node) -> Iterator[bytes]:
        member = tarfile.TarInfo(_text(path))
        member.mtime = node.mtime_ns // 10**9
        yield _header(member)

    def _member(self, path: bytes, node: Node) -> Iterator[bytes]:
        member = tarfile.TarInfo(_text(path))
        member.type = _TYPES[stat.S_IFMT(node.mode)]
        member.mode, member.uid, member.gid = stat.S_IMODE(node.mode), node.uid, node.gid
        seconds, rest = divmod(node.mtime_ns, 10**9)
        member.mtime = seconds
        extended = {f"SCHILY.xattr.{key}": _text(value) for key, value in node.xattrs if not key.startswith(_OVERLAY)}
        if rest or seconds < 0:
            extended["mtime"] = _decimal(node.mtime_ns)
        member.pax_headers = extended
        first = self._links.setdefault(node.link, path) if node.link is not None else path
        if first != path:
            member.type, member.linkname = tarfile.LNKTYPE, _text(first)
            yield _header(member)
            return
        member.linkname = _text(node.target)
        member.devmajor, member.devminor = os.major(node.rdev), os.minor(node.rdev)
        member.size = node.size if node.is_regular else 0
        yield _header(member)
        if node.is_regular:
            yield from content(node, self.get)
            yield bytes(-node.size % tarfile.BLOCKSIZE)


def content(node: Node, get: Get) -> Iterator[bytes]:
    """The content of a regular file, holes as zeros.

    Raises: StoreDamaged.
    """
    position = 0
    for segment in node.segments:
        yield from _zeros(segment.offset - position)
        yield get(segment.digest)
        position = segment.offset + segment.length
    yield from _zeros(node.size - position)


def apparent_bytes(root: bytes, get: Get) -> int:
    """What the files of a tree hold, holes included: about the size of its layer."""
    total = 0
    seen: set[bytes] = set()
    way = [decode_root(root, get)]
    while way:
        for node in children_of(way.pop(), get).values():
            if node.is_directory:
                way.append(node)
            elif node.link is None or node.link not in seen:
                total += node.size
                if node.link is not None:
                    seen.add(node.link)
    return total


def _zeros(count: int) -> Iterator[bytes]:
    while count > 0:
        yield bytes(min(count, 1 << 20))
        count -= 1 << 20


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _header(member: tarfile.TarInfo) -> bytes:
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _decimal(nanoseconds: int) -> str:
    sign, (seconds, rest) = ("-" if nanoseconds < 0 else ""), divmod(abs(nanoseconds), 10**9)
    return f"{sign}{seconds}.{rest:09}"
