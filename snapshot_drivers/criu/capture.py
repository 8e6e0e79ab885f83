"""Hold the launcher's tree in CRIU's hands while the files are looked at, then let it go and store its memory."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snapshot_drivers.base import Coverage, CoverageItem, CoverageState, StateKind, Target
from snapshot_drivers.criu import rpc
from snapshot_drivers.criu.enclosure import Enclosure
from snapshot_drivers.criu.gateway import Call, CriuError, Gateway, Place
from snapshot_drivers.criu.images import sealed, store_images
from snapshot_drivers.criu.options import dump_options, patience_s
from snapshot_drivers.criu.trees import Process, Running, facts, status_of
from snapshot_drivers.criu.watches import places
from snapshot_drivers.errors import CaptureError
from snapshot_drivers.namespaces import ContainerProcess
from snapshot_drivers.overlay.capture import Companion
from snapshot_drivers.store.manifest import Manifest, StoredProcesses

FOREIGN: Final = "the launcher did not start it (docker exec?)"
_PARASITE: Final = "CRIUMFD"
"""Names the memory of the code that CRIU puts into a process for the time of a dump."""
_JOINED: Final = ("pid", "net", "uts", "mnt")


def namespaces(target: Target, stack: ExitStack) -> dict[str, int]:
    """Descriptors of the container's namespaces that a CRIU joins; closed with ``stack``.

    Raises: ContainerNotRunning, EngineError.
    """
    assert target.init_pid is not None
    process = ContainerProcess(target.init_pid, target.container_id, stack)
    found = {kind: process.namespace(kind, stack) for kind in _JOINED}
    if str(Path(f"/proc/{target.init_pid}/ns/cgroup").readlink()) != str(Path("/proc/self/ns/cgroup").readlink()):
        found["cgroup"] = process.namespace("cgroup", stack)
    return found


def item(process: Process, state: CoverageState, reason: str | None = None) -> CoverageItem:
    """The coverage's word on one process."""
    return CoverageItem(kind=StateKind.PROCESS, path=process.label, state=state, reason=reason)


class FilesOnly(Companion):
    """Nothing was held: the coverage says of each process why."""

    def __init__(self, missing: list[CoverageItem], began: float) -> None:
        self._missing = missing
        self._began = began

    def store(self, put: Callable[[bytes], bytes]) -> list[CoverageItem]:  # noqa: ARG002 the contract's
        """See ``Companion``."""
        return self._missing

    def seal(self, manifest: Manifest) -> Manifest:
        """See ``Companion``."""
        elapsed = 1e3 * (time.perf_counter() - self._began)
        snapshot = manifest.snapshot.model_copy(update={"driver": "criu", "capture_ms": elapsed})
        return manifest.model_copy(update={"snapshot": snapshot})


@dataclass(frozen=True)
class Held:
    """A tree in CRIU's hands."""

    call: Call
    running: Running
    beside: list[CoverageItem]
    """The word on what is no part of it."""
    holding: ExitStack
    """Closed, everything runs on."""
    since: float
    """When it began to stand still, by ``time.perf_counter``."""


class HeldTree(Companion):
    """The launcher's tree stands still, its memory read, until ``store`` lets it go."""

    def __init__(self, held: Held, work: Path, *, timeout_s: float, began: float, data_dir: Path) -> None:
        """``work`` holds the images. ``began``: when the capture did."""
        self._held = held
        self._work = work
        self._timeout_s = timeout_s
        self._began = began
        self._data_dir = data_dir
        self._held_ms = 0.0
        self._processes: StoredProcesses | None = None
        running = held.running
        own = {running.tree[0].status["NSsid"].split()[-1], running.tree[0].status["NSpgid"].split()[-1]}
        # The launcher's session is that of a process that ended; it gets another one with each restore.
        numbers = [number for one in running.tree for number in one.numbers() if str(number) not in own]
        known = {str(one.inner): facts(one) for one in running.tree}
        self._facts = json.dumps({"numbers": numbers, "processes": known})

    def store(self, put: Callable[[bytes], bytes]) -> list[CoverageItem]:
        """See ``Companion``. Raises: CaptureError: CRIU died while it held the tree."""
        self._held.call.go_on()
        try:
            self._held.call.wait(None, self._timeout_s)
        except CriuError as error:
            raise CaptureError(f"CRIU failed while the files were read: {error}") from error
        self._held.holding.close()
        self._held_ms = 1e3 * (time.perf_counter() - self._held.since)
        self._processes = store_images(self._work, put, self._facts)
        return [*(item(one, CoverageState.CAPTURED) for one in self._held.running.tree[1:]), *self._held.beside]

    def seal(self, manifest: Manifest) -> Manifest:
        """See ``Companion``."""
        snapshot = manifest.snapshot.model_copy(
            update={
                "driver": "criu",
                "capture_ms": 1e3 * (time.perf_counter() - self._began),
                "frozen_ms": self._held_ms,
                "coverage": Coverage.of(list(manifest.snapshot.coverage.items)),
            }
        )
        return sealed(manifest.model_copy(update={"snapshot": snapshot, "processes": self._processes}), self._data_dir)


def hold(
    gateway: Gateway, place: Place, running: Running, work: Path, holding: ExitStack, *, tcp: str, timeout_s: float
) -> Call:
    """The tree is in CRIU's hands and its images are in ``work``; it goes on with the end of ``holding`` at the latest.

    Raises: CriuError: it was not taken; it runs, and the message names the ones that were found changed.
    """
    stopped = {one.pid for one in running.tree if one.is_stopped}
    options = dump_options(running.tree[0].inner, tcp=tcp, timeout_s=timeout_s, watched=places(running))
    call = holding.enter_context(gateway.call(rpc.Kind.DUMP, options, work, place))
    memory_bytes = sum(one.memory_bytes for one in running.tree)
    try:
        call.wait("post-dump", patience_s(timeout_s, memory_bytes))
    except CriuError as error:
        suspect = _let_go(running, stopped)
        raise CriuError(f"{error}{f'; suspect afterwards: {suspect}' if suspect else ''}") from error
    return call


def unheld(now: Running, aside: Enclosure | None) -> Process | None:
    """A process of the container that runs although the tree is in CRIU's hands; ``None``: none does."""
    free = (one for one in (*now.tree, *now.foreign) if one.status.get("TracerPid", "0") == "0")
    return next((one for one in free if not (aside and aside.holds(one.pid))), None)


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")
    except OSError:
        return ""


def _let_go(running: Running, stopped: set[int]) -> str:
    """After a failed dump: nothing of the tree is traced or stopped by us; names what is not as it was."""
    suspect = []
    deadline = time.monotonic() + 1.0
    for one in running.tree:
        status = status_of(one.pid)
        while status is not None and status.get("TracerPid", "0") != "0" and time.monotonic() < deadline:
            time.sleep(0.005)
            status = status_of(one.pid)
        if status is None:
            suspect.append(f"{one.label} has ended")
            continue
        if status.get("TracerPid", "0") != "0":
            suspect.append(f"{one.label} is still traced")
        if _PARASITE in _maps(one.pid):
            suspect.append(f"{one.label} still has CRIU's code mapped")
        if status.get("State", "").startswith("T") and one.pid not in stopped:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(one.pid)
                try:
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)
                finally:
                    os.close(descriptor)
    return "; ".join(suspect)
