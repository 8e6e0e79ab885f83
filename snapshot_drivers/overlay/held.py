"""Files that a process holds open: it may have written to one through a mapping that is gone again, or lease it.

A tracker hears of such a write when the file is closed. Until then the descriptor is seen here, unless it is in none
of the process's numbers: on its way through a socket, or registered with io_uring. A call that waits, say for a lock,
holds the file of a number that was closed meanwhile only until its process stands still: that ends the call.

Source: proc_pid_fd(5), proc_pid_fdinfo(5), unix(7) "SCM_RIGHTS"; the kernel's ``freezing-of-tasks.rst``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from snapshot_drivers import beneath
from snapshot_drivers.leases import Inode, Leases, leased_through, write_leases
from snapshot_drivers.overlay.mapped import (
    ANYWHERE,
    Maps,
    inodes_of,
    mapped_files,
    mapped_paths,
    may_hide,
    memory_maps,
    names_of,
    privately_mapped_paths,
)

_IN_FLIGHT: Final = re.compile(rb"^scm_fds:\s*[1-9]", re.MULTILINE)
_MOST: Final = 2000
"""Looking at more descriptors takes longer than a walk of most trees."""
_LONGEST_S: Final = 0.05
"""A descriptor may have a hundred thousand locks, each of them a line."""


@dataclass
class Descriptors:
    """What the numbers of some processes say."""

    writable: set[bytes] = field(default_factory=set)
    """Container paths of the files that are open for writing."""
    leased: dict[Inode, int] = field(default_factory=dict)
    """Files under a write lease, each with its holder."""
    is_all: bool = True
    """None of them may hold a file besides."""

    @classmethod
    def of(cls, pids: Collection[int]) -> Descriptors:
        """Of all of these processes, as long as that is worth it."""
        found = cls()
        left, until = _MOST, time.monotonic() + _LONGEST_S
        try:
            for pid, thread in _threads(pids):
                left -= found._add(pid, thread)
                found.is_all = found.is_all and left >= 0 and time.monotonic() <= until
                if not found.is_all:
                    break
        except OSError:
            found.is_all = False
        return found

    def _add(self, pid: int, thread: str) -> int:
        """One thread's are in; answers how many it has."""
        try:
            table = os.open(f"{thread}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            return 0
        with beneath.closing(table):
            numbers = os.listdir(table)
            for number in numbers:
                with suppress(FileNotFoundError):
                    target = os.readlink(number, dir_fd=table)
                    if target.startswith("/"):
                        self._add_file(pid, thread, number)
                    elif target.startswith("socket:"):
                        if _IN_FLIGHT.search(_read(f"{thread}/fdinfo/{number}")):
                            self.is_all = False
                    elif "io_uring" in target:
                        self.is_all = False
        return len(numbers)

    def _add_file(self, pid: int, thread: str, number: str) -> None:
        """Nothing asks the file itself: it may lie on a file system that does not answer."""
        self.writable |= names_of(f"{thread}/fd/{number}")
        inode = leased_through(_read(f"{thread}/fdinfo/{number}"))
        if inode is not None:
            self.leased[inode] = pid


class KnownLeases(Mapping[Inode, int | None]):
    """Those that descriptors tell of. For a file that is mapped, whose number may be gone, the kernel is asked."""

    def __init__(self, known: dict[Inode, int | None], maps: Maps, pids: Collection[int]) -> None:
        """``pids``: those that can lend a file."""
        self._known = known
        self._maps = maps
        self._pids = pids
        self._mapped: frozenset[Inode] | None = None

    def __contains__(self, inode: object) -> bool:
        if self._mapped is None:
            self._mapped = mapped_files(self._maps)
        if inode in self._mapped and inode not in self._known:
            self._known = {**write_leases(self._pids), **self._known}
            self._mapped = frozenset()
        return inode in self._known

    def __getitem__(self, inode: Inode) -> int | None:
        return self._known[inode]

    def __iter__(self) -> Iterator[Inode]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Held:
    """What the processes of a container hold at one moment: what they could write to without the kernel's telling."""

    def __init__(
        self, pids: Collection[int], earlier: frozenset[bytes] = frozenset(), *, stand_still: bool = True
    ) -> None:
        """``earlier``: what was mapped at the last look. ``stand_still``: they do, so each can lend a file."""
        self._pids = pids if stand_still else ()
        self._maps = memory_maps(pids)
        self.mapped = mapped_paths(self._maps)
        """Container paths that are mapped now."""
        self._suspect = self.mapped | earlier
        self._open = Descriptors.of(pids)
        self._open.is_all = self._open.is_all and not may_hide(self._maps)
        self._writable: frozenset[bytes] | None = None
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
            private = privately_mapped_paths(self._maps) if self._open.is_all else None
            self._writable = None if private is None else private | self._open.writable
        if self._writable is None or ANYWHERE in self._writable:
            return None
        return inodes_of(self._writable, mount, root_fd)

    def leases(self, *, others: bool) -> Leases:
        """Files that must not be opened; ``others``: processes besides these may hold a lease on one of the files."""
        if others or not self._open.is_all:
            return write_leases(self._pids)
        known = {inode: pid if pid in self._pids else None for inode, pid in self._open.leased.items()}
        return KnownLeases(known, self._maps, self._pids)


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _threads(pids: Collection[int]) -> Iterator[tuple[int, str]]:
    """The directory of every thread, with its process: one may have a table of descriptors of its own."""
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                yield pid, f"/proc/{pid}/task/{thread}"
