"""Files that a process holds open for writing: it may have written to one through a mapping that is gone again.

A tracker hears of such a write when the file is closed. Until then the descriptor is seen here, unless it is in none
of the process's numbers: on its way through a socket, registered with io_uring, or in a call that waits for a lock.

Source: proc_pid_fd(5), proc_pid_fdinfo(5), proc_locks(5), unix(7) "SCM_RIGHTS".
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from snapshot_drivers import beneath
from snapshot_drivers.overlay.mapped import ANYWHERE, inodes_of, mapped_paths, names_of

_IN_FLIGHT: Final = re.compile(rb"^scm_fds:\s*[1-9]", re.MULTILINE)
_WAITING: Final = re.compile(rb"^\d+: +-> \S+ +\S+ +\S+ +(-?\d+) ", re.MULTILINE)
_MOST: Final = 2000
"""Looking at more descriptors takes longer than a walk of most trees."""


class Held:
    """What the processes of a container could write to without the kernel's telling, at one moment."""

    def __init__(self, pids: Collection[int], earlier: frozenset[bytes] = frozenset()) -> None:
        """``earlier``: what was mapped at the last look. ``pids``: processes that stand still, or none."""
        self._pids = pids
        self.mapped = mapped_paths(pids)
        """Container paths that are mapped now."""
        self._suspect = self.mapped | earlier
        self._open: frozenset[bytes] | None = None
        self._looked = False

    def after_death(self) -> Held:
        """The same when the processes are gone: what they mapped is still to be read again."""
        return Held([], self._suspect)

    def mapped_inodes(self, mount: str, root_fd: int) -> frozenset[int] | None:
        """Those of a tree whose content has to be read again, whatever its times; ``None``: it may be any."""
        return None if ANYWHERE in self._suspect else inodes_of(self._suspect, mount, root_fd)

    def open_inodes(self, mount: str, root_fd: int) -> frozenset[int] | None:
        """Those of a tree whose times have to be looked at; ``None``: it may be any."""
        if not self._looked:
            self._looked = True
            self._open = open_for_writing(self._pids)
        return None if self._open is None else inodes_of(self._open, mount, root_fd)


def open_for_writing(pids: Collection[int]) -> frozenset[bytes] | None:
    """Container paths of the files that these frozen processes can write to; ``None``: it cannot be told."""
    found: set[bytes] = set()
    try:
        # An OFD lock has no process, so its number is -1: it may be one of theirs.
        if any(int(pid) in {*pids, -1} for pid in _WAITING.findall(Path("/proc/locks").read_bytes())):
            return None
        left = _MOST
        for thread in _threads(pids):
            left -= _add_open(thread, found)
            if left < 0:
                return None
    except _CannotTell:
        return None
    except OSError:
        return None
    return None if ANYWHERE in found else frozenset(found)


class _CannotTell(Exception):
    pass


def _threads(pids: Collection[int]) -> Iterator[Path]:
    """Every thread: one may have a table of descriptors of its own."""
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            yield from Path(f"/proc/{pid}/task").iterdir()


def _add_open(thread: Path, found: set[bytes]) -> int:
    """The names of what one thread can write to are in ``found``; answers how many descriptors it has.

    Raises: _CannotTell.
    """
    try:
        table = os.open(thread / "fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    with beneath.closing(table):
        numbers = [entry.name for entry in os.scandir(table)]
        for number in numbers:
            with suppress(FileNotFoundError):
                target = os.fsencode(os.readlink(number, dir_fd=table))
                if target.startswith(b"/"):
                    found |= names_of(thread / "fd" / number)
                elif target.startswith(b"socket:"):
                    if _IN_FLIGHT.search((thread / "fdinfo" / number).read_bytes()):
                        raise _CannotTell
                elif b"io_uring" in target:
                    raise _CannotTell
    return len(numbers)
