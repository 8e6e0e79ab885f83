"""Runs a command of the image beside a container: pristine tools, the live tree read-only at ``/target``.

The other side is ``images/enter/probe.c``, which says what the view is made of. What a command in it should know:

- ``/target`` is read-only, nothing in it can be executed, and **no symbolic link in it is followed**: a link would be
  the agent's word on which file is judged. ``"$(target-path /etc/alternatives/editor)"`` is its real path.
- ``127.0.0.1`` is the container's. The agent can read what is sent over it, and a watch on its files tells it which of
  them are opened.
- A tool that takes orders from the files it reads (``git``, ``make``, ``python3`` started below ``/target``) takes the
  agent's. So does ``sh /target/script``.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snapshot_drivers import cgroups
from snapshot_drivers.base import Target
from snapshot_drivers.cgroups import Hierarchy
from snapshot_drivers.crash_points import reached
from snapshot_drivers.errors import ContainerNotRunning, EngineError, UnsupportedHost
from snapshot_drivers.namespaces import ContainerProcess, sealed_file, start

SCRIPT_BYTES: Final = 128 * 1024 - 1
"""The longest script: the kernel's limit on one argument (MAX_ARG_STRLEN), less its end."""
_GRACE_S: Final = 15.0
_LOOK_S: Final = 0.1
_CHUNK: Final = 64 * 1024
_STATUS_BYTES: Final = 4096
_JOINED: Final = frozenset({"devices", "pids", "memory", "cpu", "cpuacct", "cpuset", "blkio", "hugetlb"})
"""Version 1. Not the freezer: a frozen process does not die at the time limit."""
_NEEDED: Final = frozenset({"devices", "pids", "memory"})


@dataclass(frozen=True)
class Outcome:
    """How a command in the view ended."""

    exit_code: int | None
    """As shells give it (128 + signal); ``None`` where the time limit ended it."""
    output: bytes
    """stdout and stderr, interleaved, the first ``output_limit_bytes``."""
    truncated_bytes: int
    timed_out: bool
    duration_ms: float


def run_in_view(
    target: Target,
    script: str,
    *,
    layers: Sequence[Path],
    helper: Path | None = None,
    timeout_s: float = 60.0,
    output_limit_bytes: int = 64 * 1024,
    give_up: Callable[[], bool] = lambda: False,
) -> Outcome:
    """``sh -c script`` has run on the image's ``layers`` (topmost first) and everything that it started is gone.

    ``give_up`` is asked ten times a second; once it holds, the script is ended as at its time limit.

    Raises: ContainerNotRunning, UnsupportedHost, EngineError: our machinery failed, which says nothing of the script.
        ValueError: the script cannot be an argument (too long, or NUL in it).
    """
    text = script.encode("utf-8", "surrogateescape")
    if b"\0" in text or len(text) > SCRIPT_BYTES:
        raise ValueError(f"a probe's script is at most {SCRIPT_BYTES} bytes, without NUL")
    if target.init_pid is None:
        raise ContainerNotRunning(f"container {target.container_id[:12]} does not run; start it and try again")
    began = time.monotonic()
    with ExitStack() as stack:
        process = ContainerProcess(target.init_pid, target.container_id, stack)
        namespaces = [process.namespace(kind, stack) for kind in ("mnt", "net")]
        groups = _group_files(target, stack)
        process.check()
        status, told = os.pipe2(os.O_CLOEXEC)
        stack.callback(os.close, status)
        with open(told, "wb", buffering=0) as status_end:  # noqa: PTH123 a descriptor
            child = stack.enter_context(
                start(
                    "probe",
                    [*namespaces, sealed_file(text, stack), status_end.fileno(), *groups],
                    [str(max(1, min(round(timeout_s * 1e3), 2**31 - 1))), *map(str, layers)],
                    helper=helper,
                    stderr=subprocess.STDOUT,
                )
            )
        reached("in-check")
        reader = _Reader(child, status, output_limit_bytes)
        given_up = not reader.read(time.monotonic() + timeout_s + _GRACE_S, give_up)
        code, timed_out = (None, True) if given_up else _verdict(reader.status.decode(errors="replace").strip())
    return Outcome(code, bytes(reader.output), reader.dropped_bytes, timed_out, (time.monotonic() - began) * 1e3)


def _group_files(target: Target, stack: ExitStack) -> list[int]:
    """The ``cgroup.procs`` files that a process joins to be under the container's limits and device rules."""
    found: list[int] = []
    joined: set[str] = set()
    trees = cgroups.hierarchies()
    pure_v2 = all(tree.version == 2 for tree in trees)
    for tree in trees:
        if not (pure_v2 or tree.controllers & _JOINED) or "freezer" in tree.controllers:
            continue
        directory = cgroups.container_directory(tree, target.freeze_group, target.container_id)
        if directory is not None:
            descriptor = os.open(directory / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            found.append(descriptor)
            joined |= _NEEDED if pure_v2 else tree.controllers
    if not joined >= _NEEDED & _offered(trees) or not found:
        raise UnsupportedHost(
            f"no cgroup of container {target.container_id[:12]} below {target.freeze_group}: a check would run without "
            "the container's limits; run `orchestrator doctor`"
        )
    return found


def _offered(trees: Sequence[Hierarchy]) -> frozenset[str]:
    return frozenset[str]().union(*(tree.controllers for tree in trees)) | {"devices"}


def _verdict(status: str) -> tuple[int | None, bool]:
    word, _, rest = status.partition(" ")
    if word == "exit" and rest.isdigit():
        return int(rest), False
    if word == "signal" and rest.isdigit():
        return 128 + int(rest), False
    if status == "timeout":
        return None, True
    raise EngineError(f"the check could not be run: {rest if word == 'error' else 'its helper ended without a word'}")


class _Reader:
    """Reads the output and the status of a probe until both have ended, and keeps a bounded part."""

    def __init__(self, child: subprocess.Popen[bytes], status_fd: int, output_limit_bytes: int) -> None:
        assert child.stdout is not None
        self._ends = {child.stdout.fileno(): self._take_output, status_fd: self._take_status}
        self._limit_bytes = output_limit_bytes
        self.output = bytearray()
        self.status = bytearray()
        self.dropped_bytes = 0

    def _take_output(self, data: bytes) -> None:
        kept = data[: self._limit_bytes - len(self.output)]
        self.output += kept
        self.dropped_bytes += len(data) - len(kept)

    def _take_status(self, data: bytes) -> None:
        self.status += data[: _STATUS_BYTES - len(self.status)]

    def read(self, until: float, give_up: Callable[[], bool]) -> bool:
        """Both ends are closed; false: before that, ``give_up`` held.

        Raises: EngineError: not by ``until`` (monotonic); processes of the check hang in the kernel.
        """
        with selectors.DefaultSelector() as selector:
            for descriptor in self._ends:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(0.0, min(_LOOK_S, until - time.monotonic())))
                if give_up():
                    return False
                if not ready and time.monotonic() >= until:
                    raise EngineError("a check's processes did not end at its time limit; the host hangs on some file")
                for key, _ in ready:
                    data = os.read(key.fd, _CHUNK)
                    if data:
                        self._ends[key.fd](data)
                    else:
                        selector.unregister(key.fd)
        return True
