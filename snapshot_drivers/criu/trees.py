"""What runs in a container, as the host's kernel tells it: the launcher's tree, and what is none of ours.

Pids here are the host's; ``Process.inner`` is the number in the container. Texts are the container's, so they are cut.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snapshot_drivers import cgroups
from snapshot_drivers.base import Target

NAMESPACES: Final = ("pid", "mnt", "net", "uts", "user", "cgroup")
"""In which a process of the container is what PID 1 is in; ipc is compared within the tree."""
RIGHTS: Final = (
    "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb",
    "NoNewPrivs", "Seccomp", "Seccomp_filters",
)  # fmt: skip
_SHOWN: Final = 200
_NUMBERED: Final = re.compile(r"^(pipe|socket):\[\d+\]$")
_FORKING: Final = frozenset({"kernel_clone", "wait_for_vfork_done", "_do_fork"})
"""Functions of the kernel in which such a process waits."""


@dataclass(frozen=True)
class Process:
    """One process at one moment."""

    pid: int
    inner: int
    parent: int
    status: dict[str, str]
    shown: str
    is_launcher: bool

    @property
    def label(self) -> str:
        """How the coverage names it."""
        return f"pid {self.inner} {self.shown or '(no command line)'}"

    @property
    def is_stopped(self) -> bool:
        """By a signal (SIGSTOP, SIGTSTP)."""
        return self.status.get("State", "").startswith("T")

    @property
    def memory_bytes(self) -> int:
        """What of it is in memory."""
        return int(self.status.get("VmRSS", "0 kB").split()[0]) * 1024

    def numbers(self) -> list[int]:
        """Every number that a restore of it takes in the container's pid namespace."""
        found = [int(self.status[key].split()[-1]) for key in ("NSpid", "NSpgid", "NSsid") if key in self.status]
        with suppress(OSError):
            for task in (path.name for path in Path(f"/proc/{self.pid}/task").iterdir()):
                status = status_of(self.pid, task) or {}
                found.append(int(status.get("NSpid", "0").split()[-1]))
        return found


@dataclass(frozen=True)
class Running:
    """What runs besides PID 1."""

    tree: tuple[Process, ...]
    """The launcher, first, and everything below it; empty: there is no launcher."""
    foreign: tuple[Process, ...]
    """The rest: started by `docker exec` of a person, or orphaned by a dead launcher."""

    @property
    def is_idle(self) -> bool:
        """Nothing runs but the launcher itself."""
        return len(self.tree) <= 1 and not self.foreign


def look(target: Target, launcher: Path) -> Running:
    """The processes of the container now. ``launcher``: the host's file that the launcher was started from."""
    if target.init_pid is None:
        return Running((), ())
    found = {one.pid: one for pid in members(target) if (one := _process(pid, launcher)) is not None}
    server = next(
        (one for one in found.values() if one.is_launcher and one.parent == target.init_pid and "serve" in one.shown),
        None,
    )
    tree = [server] if server else []
    for one in tree:  # grows while it is walked
        tree += [child for child in found.values() if child.parent == one.pid]
    inside = {one.pid for one in tree}
    foreign = (one for one in found.values() if one.pid not in inside and one.pid != target.init_pid)
    return Running(tuple(tree), tuple(foreign))


def settled(target: Target, launcher: Path, *, wait_s: float = 2.0) -> Running:
    """As ``look``, once the launcher's own processes of a call that has just ended are gone, or after ``wait_s``.

    One look is not of one moment: a process whose parent ends meanwhile seems to be nobody's. So two must agree there.
    """
    deadline = time.monotonic() + wait_s
    before: set[int] = set()
    while True:
        running = look(target, launcher)
        foreign = {one.pid for one in running.foreign}
        is_new, before = foreign - before, foreign
        parents = {one.parent for one in running.tree}
        ending = [one for one in running.foreign if one.is_launcher]
        ending += [one for one in running.tree[1:] if one.is_launcher and one.pid not in parents]
        ending += [one for one in (*running.tree, *running.foreign) if "VmSize" not in one.status]  # it is exiting
        if not (ending or is_new) or time.monotonic() > deadline:
            return running
        time.sleep(0.002)


def members(target: Target) -> list[int]:
    """Host pids in the container's cgroup, PID 1 among them."""
    for hierarchy in cgroups.hierarchies():
        directory = cgroups.container_directory(hierarchy, target.freeze_group, target.container_id)
        if directory is not None and target.init_pid in (found := list(cgroups.members(directory))):
            return found
    return []


def facts(process: Process) -> dict[str, object]:
    """What a process must be again before it may go on: rights, descriptors, state. It stands still meanwhile."""
    status = status_of(process.pid) or process.status
    return {
        "shown": process.shown,
        **{name: status.get(name, "").split() for name in RIGHTS},
        "fds": descriptors(process.pid),
    }


def descriptors(pid: int) -> dict[str, str]:
    """Open descriptors and where they lead; numbers of pipes and sockets, which are new after a restore, left out."""
    found = {}
    with suppress(OSError):
        for name in sorted((path.name for path in Path(f"/proc/{pid}/fd").iterdir()), key=int):
            with suppress(OSError):
                link = str(Path(f"/proc/{pid}/fd/{name}").readlink())
                kind = _NUMBERED.match(link)
                found[name] = kind[1] if kind else link.removesuffix(" (deleted)")
    return found


def waits_for_exec(pid: int) -> bool:
    """It has made a child by ``vfork``, which has not executed a program yet: neither can be stopped before that."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text("ascii", "replace") in _FORKING
    return False


def namespace(pid: int, kind: str) -> str:
    """Its identity, as a text."""
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    return ""


def status_of(pid: int, task: str | None = None) -> dict[str, str] | None:
    """The kernel's ``status`` of a process or thread; ``None``: it is gone."""
    place = Path(f"/proc/{pid}/task/{task}/status" if task else f"/proc/{pid}/status")
    try:
        lines = place.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _process(pid: int, launcher: Path) -> Process | None:
    status = status_of(pid)
    if status is None or status.get("State", "Z")[0] in "ZX" or "NSpid" not in status:
        return None
    shown, is_launcher = "", False
    with suppress(OSError):
        shown = Path(f"/proc/{pid}/cmdline").read_bytes()[:_SHOWN].replace(b"\0", b" ").decode("utf-8", "replace")
    with suppress(OSError):
        is_launcher = Path(f"/proc/{pid}/exe").samefile(launcher)
    inner, parent = int(status["NSpid"].split()[-1]), int(status["PPid"])
    return Process(pid, inner, parent, status, " ".join(shown.split()), is_launcher)
