"""A container with the criu driver over it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from orchestrator.container import Container
from orchestrator.data_dir import DataDir
from snapshot_drivers.base import CaptureOptions, CoverageState, RestoreReport, Snapshot, StateKind
from snapshot_drivers.criu.driver import CriuDriver

OPTIONS = CaptureOptions()

_TRIES = 8


class Rewindable:
    """What the tests do with one."""

    def __init__(self, container: Container, data_dir: DataDir, **options: Any) -> None:
        self.container = container
        self.driver = CriuDriver(data_dir.store, **options)
        self.data_dir = data_dir

    def sh(self, command: str) -> str:
        result = self.container.exec(command)
        assert result.exit_code == 0, result
        return result.output.decode().strip()

    def write(self, path: str, text: str) -> None:
        self.sh(f"mkdir -p $(dirname {path}); cat > {path} <<'END'\n{text}\nEND")

    def start(self, program: str, *, name: str = "p") -> None:
        """A Python program runs in the background, with its output in ``/w/<name>.log``."""
        self.write(f"/w/{name}.py", program)
        self.sh(f"cd /w; setsid python3 {name}.py >/w/{name}.log 2>&1 </dev/null &")
        self.wait(f"test -e /w/{name}.ready")

    def wait(self, command: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.container.exec(command).exit_code:
            assert time.monotonic() < deadline, self.container.exec("tail -n 20 /w/*.log; ps -ef").output.decode()
            time.sleep(0.05)

    def capture(self) -> Snapshot:
        return self.driver.capture(self.container.target(), None, OPTIONS)

    def restore(self, snapshot: Snapshot) -> RestoreReport:
        staged = self.driver.stage(self.container.target(), snapshot.snapshot_id, OPTIONS)
        try:
            return staged.apply()
        finally:
            staged.discard()

    def taken(self) -> Snapshot:
        """A snapshot that holds every process; on a busy machine the freezer may need more than one try."""
        for _ in range(_TRIES):
            snapshot = self.capture()
            found = processes(snapshot)
            if not any("could not be frozen" in (reason or "") for _, reason in found):
                break
        assert found and all(state is CoverageState.CAPTURED for state, _ in found), snapshot.coverage.items
        return snapshot


def processes(snapshot: Snapshot) -> list[tuple[CoverageState, str | None]]:
    """State and reason of each process in the coverage."""
    return [(item.state, item.reason) for item in snapshot.coverage.items if item.kind is StateKind.PROCESS]


Make = Callable[..., Rewindable]
SERVE = """
import socket, socketserver, sys, os
def serve(answer, port=8000):
    listener = socket.create_server(("127.0.0.1", port))
    open(__file__[:-3] + '.ready', 'w').close()
    while True:
        peer, _ = listener.accept()
        try: peer.sendall(repr(answer()).encode())
        except Exception as error: peer.sendall(repr(error).encode())
        peer.close()
"""
"""Begins a Python program that answers each connection with what a function says."""
ASK = "python3 -c \"import socket; print(socket.create_connection(('127.0.0.1', 8000), 5).recv(999).decode())\""
