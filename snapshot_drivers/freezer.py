"""Holds every process of a run still for a moment, and lets go whatever happens to the one who froze them.

The *parent* cgroup of the run is frozen, never the container's own: a container that its user paused (the engine writes
into the child) stays paused, and the engine's execs wait instead of failing. A watchdog process is armed before each
freeze; it thaws when this process dies or the freeze lasts longer than its deadline.

Order, which must hold: arm, freeze, work, thaw, disarm. Thaw before a kill: version 1 delivers SIGKILL only then.

Source: the kernel's ``cgroup-v1/freezer-subsystem.rst`` and ``cgroup-v2.rst`` ("Core Interface Files").
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snapshot_drivers import cgroups
from snapshot_drivers.cgroups import Hierarchy
from snapshot_drivers.errors import UnsupportedHost

DEADLINE_S: Final = 5.0
"""How long a freeze lasts unless its owner asks for more."""
_POLL_S: Final = 0.0001
_BACK_OFF_S: Final = 0.02
_CLOSE_S: Final = 3.0
_KILL_PASSES: Final = 100
_WATCHDOG: Final = Path(__file__).with_name("watchdog.py")


@dataclass
class Freeze:
    """One attempt to hold a group still; the last three fields are final once the ``with`` block is left."""

    complete: bool = False
    """Every process of the group stands still. False: the work inside the block goes on beside running ones."""
    reason: str | None = None
    """Why it is not complete."""
    held: bool = False
    """Complete, and still so at the end of the block (the watchdog thaws at the deadline)."""
    frozen_ms: float = 0.0
    """From the order to freeze until the thaw, of the last try."""
    tries: int = 0


@dataclass(frozen=True)
class _Switch:
    """The files of one cgroup that freeze it and tell its state."""

    state_file: Path
    frozen_word: str
    thawed_word: str
    status_file: Path
    frozen_line: str
    wish_file: Path

    def write(self, word: str) -> None:
        with self.state_file.open("r+b", buffering=0) as file:  # never made: a group that is gone is ENOENT
            file.write(word.encode("ascii"))

    def thaw(self) -> None:
        """Thawed, or gone together with its processes."""
        with suppress(FileNotFoundError):
            try:
                self.write(self.thawed_word)
            except OSError:
                if self.state_file.exists():
                    raise

    def is_frozen(self) -> bool:
        # Version 1 moves FREEZING to FROZEN only while the file is read.
        with suppress(OSError):
            return self.frozen_line in self.status_file.read_text(encoding="ascii").splitlines()
        return False

    def is_ordered(self) -> bool:
        """True if this cgroup itself was told to freeze, complete or not, whatever an ancestor was told."""
        with suppress(OSError):
            return self.wish_file.read_text(encoding="ascii").strip() == "1"
        return False


def _switch_v1(directory: Path) -> _Switch:
    state = directory / "freezer.state"
    return _Switch(state, "FROZEN", "THAWED", state, "FROZEN", directory / "freezer.self_freezing")


def _switch_v2(directory: Path) -> _Switch:
    order = directory / "cgroup.freeze"
    return _Switch(order, "1", "0", directory / "cgroup.events", "frozen 1", order)


class Freezer:
    """Freezes, lists and kills one group. Used from one thread at a time; ``close`` it, or use it in a ``with``."""

    def __init__(self, group: str, *, hierarchy: Hierarchy | None = None) -> None:
        """``group``: the parent cgroup as given to the engine. ``hierarchy``: the tree to use where there are several.

        Raises: UnsupportedHost: no cgroup freezer is mounted.
        """
        self._hierarchy = hierarchy or freezer_hierarchy()
        self._directory = self._hierarchy.directory(group)
        self._switch = (_switch_v1 if self._hierarchy.version == 1 else _switch_v2)(self._directory)
        self._watchdog = _Watchdog(self._switch)

    def __enter__(self) -> Freezer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def frozen(self, *, attempts: int = 5, wait_s: float = 0.05, deadline_s: float = DEADLINE_S) -> Iterator[Freeze]:
        """The group stands still inside the block, if ``complete`` says so, and runs on after it or the deadline.

        Each try waits ``wait_s`` at most, then thaws and backs off, so that no process is held for long by one that
        cannot be frozen. Never entered while an exec is being set up (the caller holds the container's exec lock).

        Raises: OSError: the group could not be thawed at the end; the watchdog goes on trying.
        """
        freeze = Freeze()
        ordered_at = time.monotonic()
        try:
            while freeze.tries < attempts and not freeze.complete:
                if freeze.tries:
                    time.sleep(_BACK_OFF_S * 2 ** (freeze.tries - 1))
                freeze.tries += 1
                ordered_at = time.monotonic()
                self._try(freeze, wait_s, deadline_s)
            yield freeze
            freeze.held = freeze.complete and self.is_frozen()
        finally:
            self.thaw()
            lasted_s = time.monotonic() - ordered_at
            freeze.frozen_ms = (
                (lasted_s if freeze.held else min(lasted_s, deadline_s)) * 1e3 if freeze.complete else 0.0
            )
            self._watchdog.disarm()

    def _try(self, freeze: Freeze, wait_s: float, deadline_s: float) -> None:
        try:
            self._watchdog.arm(deadline_s)
            self._switch.write(self._switch.frozen_word)
            if self._wait_frozen(wait_s):
                freeze.complete, freeze.reason = True, None
                return
            freeze.reason = f"not all of its processes could be frozen within {wait_s * 1e3:.0f} ms"
        except OSError as error:
            freeze.reason = f"cannot freeze {self._directory}: {error.strerror}"
        self.thaw()

    def _wait_frozen(self, wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        while not self._switch.is_frozen():
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)
        return True

    def thaw(self) -> None:
        """The group is not frozen by us; its frozen children stay as they are. Repeatable, with no group too.

        Raises: OSError.
        """
        self._switch.thaw()

    def is_frozen(self) -> bool:
        """True if every process of the group stands still (an ancestor's freeze counts)."""
        return self._switch.is_frozen()

    def pids(self) -> list[int]:
        """Host pids of every process in the group and below."""
        return list(cgroups.members(self._directory))

    def kill_all(self) -> int:
        """Every process of the group has been sent SIGKILL, those that were forked meanwhile too; answers how many.

        Frozen ones of version 1 die when the caller thaws. Nobody outside of the group can be hit: each is held by a
        pidfd before it is looked up once more.
        """
        with suppress(OSError):  # version 2, kernel 5.14: one order for all, in no race with forks
            (self._directory / "cgroup.kill").write_text("1", encoding="ascii")
        killed: set[int] = set()
        for _ in range(_KILL_PASSES):
            fresh = set(self.pids()) - killed
            if not fresh:
                break
            self._kill(fresh)
            killed |= fresh
        return len(killed)

    def _kill(self, pids: set[int]) -> None:
        held: dict[int, int] = {}
        try:
            for pid in pids:
                with suppress(ProcessLookupError):
                    held[pid] = os.pidfd_open(pid)
            for pid in held.keys() & set(self.pids()):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(held[pid], signal.SIGKILL)
        finally:
            for descriptor in held.values():
                os.close(descriptor)

    def close(self) -> None:
        """Nothing is frozen by us and the watchdog is gone. Repeatable."""
        try:
            if self._watchdog.armed:
                self.thaw()
        finally:
            self._watchdog.close()

    @classmethod
    def thaw_group(cls, group: str) -> bool:
        """What a dead owner froze runs again; answers whether there was such a freeze.

        Raises: UnsupportedHost, OSError.
        """
        freezer = cls(group)
        was = freezer._switch.is_ordered()
        if was:
            freezer.thaw()
        return was


def freezer_hierarchy() -> Hierarchy:
    """The tree of control groups in which processes are frozen on this host. Raises: UnsupportedHost."""
    trees = cgroups.hierarchies()
    for tree in trees:
        if tree.version == 1 and "freezer" in tree.controllers:
            return tree
    for tree in trees:
        if tree.version == 2:
            return tree
    raise UnsupportedHost("no cgroup freezer is mounted on this host; mount cgroup version 2 on /sys/fs/cgroup")


class _Watchdog:
    """Our end of the watchdog process: started at the first freeze, kept for the next, started again if it died."""

    def __init__(self, switch: _Switch) -> None:
        self._switch = switch
        self._process: subprocess.Popen[bytes] | None = None
        self.armed = False

    def arm(self, deadline_s: float) -> None:
        """The watchdog will thaw, after so long at the latest.

        Raises: OSError: it cannot be started.
        """
        for last in (False, True):
            process = self._running()
            try:
                _order(process, b"%.3f\n" % deadline_s)
            except BrokenPipeError:  # died since it was looked at
                process.wait()
                if last:
                    raise
            else:
                self.armed = True
                return

    def disarm(self) -> None:
        """The watchdog leaves the group alone. Only called when it is thawed."""
        self.armed = False
        if self._process is not None:
            with suppress(BrokenPipeError):
                _order(self._process, b"\n")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            switch = self._switch
            words = [str(switch.state_file), switch.frozen_word, switch.thawed_word]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WATCHDOG), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={},
                cwd="/",
                start_new_session=True,  # Ctrl-C must not end it before its owner
            )
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        self.armed = False
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _order(process: subprocess.Popen[bytes], word: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(word)
