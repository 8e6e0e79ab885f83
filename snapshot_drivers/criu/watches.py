"""Where CRIU is to look for what a tree's inotify watches watch.

A watch names an inode, not a path. CRIU asks the file system for the path, which overlayfs does not tell; then it looks
for the inode number in directories that it is given. Programs watch what they work in (a development server its
sources, ``tail -f`` a file that it reads), so those are given: working directories, and directories of open files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from snapshot_drivers.criu.trees import Process, Running

_INOTIFY: Final = "anon_inode:inotify"
_NEVER: Final = tuple(map(PurePosixPath, ("/proc", "/sys", "/dev")))
_MOST: Final = 32


def places(running: Running) -> tuple[str, ...]:
    """Directories of the container to look in, none below another; none if nothing is watched."""
    found = {place for one in running.tree for place in _of(one)}
    kept: list[PurePosixPath] = []
    for place in sorted(found, key=lambda path: len(path.parts)):
        if not any(place.is_relative_to(other) for other in (*kept, *_NEVER)):
            kept.append(place)
    return tuple(map(str, kept[:_MOST]))


def _of(one: Process) -> Iterator[PurePosixPath]:
    links = []
    with suppress(OSError):
        for path in Path(f"/proc/{one.pid}/fd").iterdir():
            with suppress(OSError):
                links.append(str(path.readlink()))
    if _INOTIFY not in links:
        return
    opened = [PurePosixPath(link) for link in links if link.startswith("/")]
    with suppress(OSError):
        opened.append(PurePosixPath(Path(f"/proc/{one.pid}/cwd").readlink()) / "x")
    yield from (path.parent for path in opened if len(path.parts) > 2)
