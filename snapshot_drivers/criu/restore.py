"""After the files: the tree comes back, stands still, is compared, and only then goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from snapshot_drivers import cgroups
from snapshot_drivers.base import RestoreReport, Staged, Target
from snapshot_drivers.criu import rpc
from snapshot_drivers.criu.capture import namespaces
from snapshot_drivers.criu.compare import compare
from snapshot_drivers.criu.enclosure import Enclosures
from snapshot_drivers.criu.gateway import Call, CriuError, Gateway, Place
from snapshot_drivers.criu.images import most_bytes, write_images
from snapshot_drivers.criu.options import patience_s, restore_options
from snapshot_drivers.criu.tcp import destroy_outside
from snapshot_drivers.criu.trees import Running, look, members
from snapshot_drivers.criu.work_directory import work_directory
from snapshot_drivers.errors import RestoreError
from snapshot_drivers.freezer import freezer_hierarchy
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import StoredProcesses

_ROOM: Final = 100
"""Pid numbers between those that come back and CRIU's own."""
_CONNECTIONS: Final = "tcp-stream-*.img"
"""Each is of an established one."""


class StagedProcesses:
    """A staged restore of files, with processes to follow (see ``base.Staged``)."""

    def __init__(
        self,
        files: Staged,
        processes: StoredProcesses,
        *,
        gateway: Gateway,
        enclosures: Enclosures,
        content: ContentStore,
        directory: Path,
        launcher: Path,
        tcp: str,
        keep_clock: bool,
        timeout_s: float,
    ) -> None:
        """Reads and checks every image. Raises: StoreDamaged, UnsupportedHost, RestoreError: the disk is full."""
        gateway.check()
        self.snapshot = files.snapshot
        self._files = files
        self._gateway = gateway
        self._enclosures = enclosures
        self._launcher = launcher
        self._tcp = tcp
        self._timeout_s = timeout_s
        self._processes = processes
        self._content = content
        self._directory = directory
        self._keep_clock = keep_clock
        known: dict[str, Any] = json.loads(processes.facts)
        self._numbers: list[int] = known["numbers"]
        self._facts: dict[str, dict[str, Any]] = known["processes"]
        self._staged = ExitStack()
        self._work: Path | None = None
        self._stage()

    def _stage(self) -> None:
        """Every image is in ``_work``."""
        with ExitStack() as stack:
            try:
                work = stack.enter_context(work_directory(self._directory, most_bytes(self._processes)))
                write_images(self._processes, work, self._content.read, keep_clock=self._keep_clock)
            except OSError as error:
                raise RestoreError(f"cannot stage the processes of {self.snapshot.snapshot_id}: {error}") from error
            self._work, self._staged = work, stack.pop_all()

    def _unstage(self) -> None:
        self._work = None
        self._staged.close()

    def apply(self, *, verify: str = "difference") -> RestoreReport:
        """See ``base.Staged.apply``."""
        began = time.perf_counter()
        report = self._files.apply(verify=verify)
        if self._work is None:
            self._stage()
        assert self._work is not None
        try:
            self._bring_back(report.target, self._work)
        except (CriuError, OSError) as error:
            kill_all(report.target)
            raise RestoreError(f"the processes of {self.snapshot.snapshot_id} did not come back: {error}") from error
        except RestoreError:
            kill_all(report.target)
            raise
        self._unstage()
        return replace(report, restore_ms=1e3 * (time.perf_counter() - began))

    def discard(self) -> None:
        """See ``base.Staged.discard``."""
        self._files.discard()
        self._unstage()

    def _bring_back(self, target: Target, work: Path) -> None:
        assert target.init_pid is not None
        highest = max(self._numbers)
        with ExitStack() as stack:
            place = Place(
                namespaces(target, stack),
                groups=_groups(target, stack),
                enter_pid=highest + _ROOM,
                leave_pid=highest,
            )
            options = restore_options(tcp=self._tcp)
            stack.enter_context(cgroups.quick_moves(freezer_hierarchy()))
            resumed = stack.enter_context(ExitStack())
            call = stack.enter_context(self._gateway.call(rpc.Kind.RESTORE, options, work, place))
            memory_bytes = sum(path.stat().st_size for path in work.iterdir())
            call.wait("pre-resume", patience_s(self._timeout_s, memory_bytes))
            try:
                tree = self._now(target, call)
                compare(tree, self._facts, target.init_pid)
                if self._tcp == "keep" and any(work.glob(_CONNECTIONS)):
                    destroy_outside(target.init_pid, target.container_id)
            except (RestoreError, OSError):
                kill_all(target)  # before CRIU lets go of it
                raise
            # Until CRIU is gone they stand still: they could end it before it has said that it is done.
            enclosure = self._enclosures.of(target, "tree")
            resumed.enter_context(enclosure.closed(lambda: tree.tree, wait=False, stay=True))
            call.go_on()
            call.wait(None, self._timeout_s)

    def _now(self, target: Target, call: Call) -> Running:
        """What runs, less CRIU itself: the helper's own children that are none of the tree."""
        running = look(target, self._launcher)
        everything = [*running.tree, *running.foreign]
        ours = call.children()
        return Running(
            tuple(one for one in everything if not (one.pid in ours and str(one.inner) not in self._facts)), ()
        )


def kill_all(target: Target) -> None:
    """Nothing runs in the container but PID 1."""
    for pid in members(target):
        if pid == target.init_pid:
            continue
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                if pid in members(target):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


def _groups(target: Target, stack: ExitStack) -> list[int]:
    """By which a process that writes 0 becomes a member of the container's cgroup in every hierarchy.

    In version 1 as a single thread, which waits for nothing: CRIU has no other one yet.
    """
    found = []
    for hierarchy in cgroups.hierarchies():
        directory = cgroups.container_directory(hierarchy, target.freeze_group, target.container_id)
        if directory is not None:
            name = "tasks" if hierarchy.version == 1 else "cgroup.procs"
            found.append(os.open(directory / name, os.O_WRONLY | os.O_CLOEXEC))
            stack.callback(os.close, found[-1])
    return found
