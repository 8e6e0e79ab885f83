"""Hold the launcher's tree in CRIU's hands while the files are looked at, then let it go and store its memory."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from snapshot_drivers.base import Coverage, CoverageItem, CoverageState, StateKind, Target
from snapshot_drivers.criu import rpc
from snapshot_drivers.criu.gateway import Call, CriuError, Gateway, Place, dump_options
from snapshot_drivers.criu.images import sealed, store_images
from snapshot_drivers.criu.trees import Process, Running, facts, look, status_of
from snapshot_drivers.errors import CaptureError
from snapshot_drivers.namespaces import ContainerProcess
from snapshot_drivers.overlay.capture import Companion
from snapshot_drivers.store.manifest import Manifest, StoredProcesses

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


class HeldTree(Companion):
    """The launcher's tree stands still, its memory read, until ``store`` lets it go."""

    def __init__(
        self, call: Call, work: Path, running: Running, timeout_s: float, began: float, data_dir: Path
    ) -> None:
        self._call = call
        self._work = work
        self._running = running
        self._timeout_s = timeout_s
        self._began = began
        self._data_dir = data_dir
        self._held_at = time.perf_counter()
        self._held_ms = 0.0
        self._processes: StoredProcesses | None = None
        own = {running.tree[0].status["NSsid"].split()[-1], running.tree[0].status["NSpgid"].split()[-1]}
        # The launcher's session is that of a process that ended; it gets another one with each restore.
        numbers = [number for one in running.tree for number in one.numbers() if str(number) not in own]
        known = {str(one.inner): facts(one) for one in running.tree}
        self._facts = json.dumps({"numbers": numbers, "processes": known})

    def store(self, put: Callable[[bytes], bytes]) -> list[CoverageItem]:
        """See ``Companion``. Raises: CaptureError: CRIU died while it held the tree."""
        self._call.go_on()
        try:
            self._call.wait(None, self._timeout_s)
        except CriuError as error:
            raise CaptureError(f"CRIU failed while the files were read: {error}") from error
        self._held_ms = 1e3 * (time.perf_counter() - self._held_at)
        self._processes = store_images(self._work, put, self._facts)
        return [item(one, CoverageState.CAPTURED) for one in self._running.tree[1:]]

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
    gateway: Gateway, target: Target, running: Running, work: Path, stack: ExitStack, *, tcp: str, timeout_s: float
) -> Call:
    """The tree stands still and its images are in ``work``; it goes on with ``stack``'s end at the latest.

    Raises: CriuError: it was not taken; it runs, and the message names the ones that were found changed.
    """
    stopped = {one.pid for one in running.tree if one.status.get("State", "").startswith("T")}
    place = Place(namespaces(target, stack))
    options = dump_options(running.tree[0].inner, tcp=tcp, timeout_s=timeout_s)
    call = stack.enter_context(gateway.call(rpc.Kind.DUMP, options, work, place))
    try:
        call.wait("post-dump", timeout_s)
    except CriuError as error:
        suspect = _let_go(running, stopped)
        raise CriuError(f"{error}{f'; suspect afterwards: {suspect}' if suspect else ''}") from error
    return call


def unheld(target: Target, launcher: Path) -> Process | None:
    """A process of the container that is not in CRIU's hands although the tree is; ``None``: all are."""
    now = look(target, launcher)
    free = (one for one in (*now.tree, *now.foreign) if one.status.get("TracerPid", "0") == "0")
    return next((one for one in free if not one.shown.startswith("criu")), None)


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
        if status.get("State", "").startswith("T") and one.pid not in stopped:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(one.pid)
                try:
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)
                finally:
                    os.close(descriptor)
    return "; ".join(suspect)
