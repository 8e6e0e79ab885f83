"""The processes of one container as the host sees them, and how those of one command are ended.

What the container says is never believed: a session id from inside only picks among the processes that the kernel lists
in the container's own cgroup, and a signal goes to a descriptor of a process that was checked after it was opened.

Source: pid_namespaces(7) and proc_pid_status(5) (``NSsid``), pidfd_open(2), pidfd_send_signal(2).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from snapshot_drivers.cgroups import container_directory, hierarchies, members
from snapshot_drivers.command_line import command_line
from snapshot_drivers.errors import ContainerNotRunning
from snapshot_drivers.freezer import Freezer

_STATUS: Final = re.compile(
    r"^State:\s+(\w).*^NSpid:(?:\s+\d+)*\s(\d+)$.*^NSsid:(?:\s+\d+)*\s(\d+)$", re.MULTILINE | re.DOTALL
)
_DEAD: Final = frozenset("ZX")
_PAUSE_S: Final = 0.005
_FREEZE_S: Final = 0.5


class Processes:
    """The running processes of one container but its PID 1. Host pids throughout."""

    def __init__(self, group: str, container_id: str, init_pid: int, launcher: Path) -> None:
        """``group``: parent cgroup as given to the engine. ``launcher``: the host's file of the container's launcher.

        Raises: ContainerNotRunning: PID 1 is in no cgroup of that container.
        """
        self._group = group
        self._container_id = container_id
        self._init_pid = init_pid
        self._launcher = launcher
        for hierarchy in hierarchies():
            directory = container_directory(hierarchy, group, container_id)
            if directory is not None and init_pid in members(directory):
                self._directory = directory
                return
        raise ContainerNotRunning(f"container {container_id[:12]} has no running process in cgroup {group}")

    def pids(self) -> list[int]:
        """All of them."""
        return [pid for pid in members(self._directory) if pid != self._init_pid and _session(pid) is not None]

    def commands(self) -> list[str]:
        """Command lines of those besides the launcher's, as a snapshot's coverage names them (foreign text, cut)."""
        found = []
        for pid in self.pids():
            with suppress(OSError):
                found.append(command_line(pid))
        return [command for command in found if not command.startswith("/.orchestrator/")]

    def in_session(self, session: int) -> list[int]:
        """Those of one session, given by its id inside the container."""
        return [pid for pid in self.pids() if _session(pid) == session]

    def others(self, session: int | None = None) -> int:
        """How many there are besides the launcher's and those of ``session``."""
        return sum(_session(pid) != session and not self._is_launcher(pid) for pid in self.pids())

    def kill_session(self, session: int, *, wait_s: float = 10.0) -> bool:
        """No process of that session lives any more; false if some still do after ``wait_s``."""
        deadline = time.monotonic() + wait_s

        def chosen(pid: int) -> bool:
            return _session(pid) == session

        # Held still: else a fork bomb outruns the list of its processes. The first process dies last: with it the
        # launcher ends the call, and then nothing is left that "goes on"; until then it is stopped and forks nothing.
        with Freezer(self._group) as freezer, freezer.frozen(attempts=3, wait_s=_FREEZE_S):
            for pid in self.pids():
                if chosen(pid):
                    self._signal(pid, signal.SIGSTOP if _is_leader(pid) else signal.SIGKILL, chosen)
        self._kill(lambda pid: chosen(pid) and not _is_leader(pid), deadline)
        return self._kill(chosen, deadline)

    def kill_launcher(self, *, wait_s: float = 5.0) -> bool:
        """The launcher's own processes are gone; what they started goes on below PID 1. False: some still live."""
        return self._kill(self._is_launcher, time.monotonic() + wait_s)

    def _kill(self, chosen: Callable[[int], bool], deadline: float) -> bool:
        while True:
            living = [pid for pid in self.pids() if chosen(pid)]
            for pid in living:
                self._signal(pid, signal.SIGKILL, chosen)
            if not living or time.monotonic() > deadline:
                return not living
            time.sleep(_PAUSE_S)

    def _signal(self, pid: int, number: signal.Signals, chosen: Callable[[int], bool]) -> None:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                # The number may have gone to another process before the descriptor was opened; from here it cannot.
                if self._is_member(pid) and chosen(pid):
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)

    def _is_member(self, pid: int) -> bool:
        names = {self._container_id, f"docker-{self._container_id}.scope"}
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        except OSError:
            return False
        return pid != self._init_pid and any(names & set(line.split(":", 2)[2].split("/")) for line in lines)

    def _is_launcher(self, pid: int) -> bool:
        with suppress(OSError):
            return Path(f"/proc/{pid}/exe").samefile(self._launcher)
        return False


def _inner_ids(pid: int) -> tuple[int, int] | None:
    """Pid and session id in the innermost pid namespace; ``None``: gone, or only waits to be reaped."""
    with suppress(OSError):
        match = _STATUS.search(Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="surrogateescape"))
        if match and match[1] not in _DEAD:
            return int(match[2]), int(match[3])
    return None


def _session(pid: int) -> int | None:
    ids = _inner_ids(pid)
    return ids[1] if ids else None


def _is_leader(pid: int) -> bool:
    ids = _inner_ids(pid)
    return ids is not None and ids[0] == ids[1]
