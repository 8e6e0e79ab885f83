"""The image below a container, as a merged read-only tree: what the container would see if it had changed nothing.

And which part of it an entry of the upper directory lets through: overlayfs says so in extended attributes.
Source: the kernel's ``overlayfs.rst``, "redirect_dir" and "metacopy".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final

from snapshot_drivers import beneath
from snapshot_drivers.tree import Xattrs

# The container may set user.overlay.* itself; on a mount without `userxattr` the kernel does not read that.
_OPAQUE: Final = ("trusted.overlay.opaque", b"y")
_REDIRECT: Final = "trusted.overlay.redirect"
_METACOPY: Final = "trusted.overlay.metacopy"

Parts = tuple[bytes, ...]
"""A path as its components, from the root."""


def is_opaque(xattrs: Xattrs) -> bool:
    """True for a directory that hides what the layers below have there."""
    return _OPAQUE in xattrs


def is_metacopy(xattrs: Xattrs) -> bool:
    """True for a file whose content is still the image's: only its attributes were changed."""
    return any(name == _METACOPY for name, _ in xattrs)


def image_parts(xattrs: Xattrs, name: bytes, above: Parts | None) -> Parts | None:
    """Where in the image stands what shows through an entry of the upper directory; ``None``: nothing does.

    ``above``: the same of the directory that it is in. What was renamed keeps its old place in mind.
    """
    if is_opaque(xattrs):
        return None
    place = dict(xattrs).get(_REDIRECT, name)
    parts = tuple(place.strip(b"/").split(b"/"))
    if {b"", b".", b".."} & set(parts):
        return None
    if place.startswith(b"/"):
        return parts
    return None if above is None else (*above, *parts)


class Image:
    """The image's layers, topmost first; without layers it is empty. Look-ups are remembered, a directory at a time."""

    def __init__(self, lower_dirs: tuple[str, ...]) -> None:
        self._layers = [Path(path) for path in lower_dirs]
        self.entries = lru_cache(maxsize=256)(self._entries)
        """Attributes of the entries of one directory by name; empty where the image has no such directory."""

    def find(self, parts: Parts) -> os.stat_result | None:
        """Attributes of an entry of the image, ``None`` where it has none."""
        return self.entries(parts[:-1]).get(parts[-1])

    def open_file(self, parts: Parts) -> int | None:
        """A descriptor of a regular file of the image, the caller's to close; ``None`` where it has none."""
        found = self.find(parts)
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        for layer in self._layers:
            with _directory(layer, parts[:-1]) as (descriptor, _):
                if descriptor is not None:
                    try:
                        with beneath.closing(beneath.look(descriptor, parts[-1])) as looked:
                            return beneath.open_regular(looked)
                    except OSError:
                        continue
        return None

    def _entries(self, parts: Parts) -> dict[bytes, os.stat_result]:
        merged: dict[bytes, os.stat_result] = {}
        for layer in self._layers:
            with _directory(layer, parts) as (descriptor, final):
                if descriptor is not None:
                    for name, found in beneath.list_directory(descriptor):
                        merged.setdefault(name, found)
            if final:
                break
        return {name: found for name, found in merged.items() if not _is_whiteout(found)}


@contextmanager
def _directory(layer: Path, parts: Parts) -> Iterator[tuple[int | None, bool]]:
    """One layer's directory at a path (``None``: it has none), and whether lower layers are hidden there."""
    top = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    place = beneath.Descent(top)
    try:
        yield _descend(place, parts)
    finally:
        place.close()
        os.close(top)


def _descend(place: beneath.Descent, parts: Parts) -> tuple[int | None, bool]:
    hidden = False
    for part in parts:
        try:
            found = os.stat(part, dir_fd=place.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None, hidden
        if not stat.S_ISDIR(found.st_mode):
            return None, True  # a whiteout, or something else than a directory
        place.down(part)
        hidden = hidden or is_opaque(beneath.read_xattrs(place.fd, looked=False))
    return place.fd, hidden


def _is_whiteout(found: os.stat_result) -> bool:
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0
