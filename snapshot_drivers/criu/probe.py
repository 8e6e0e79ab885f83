"""Whether the CRIU of a prefix works on this kernel: a round trip, twice, of what fails where it is too old.

``criu check`` says "Looks good" where every socket fails (CRIU 4.1 on kernel 6.16), so it is not asked. Run as a
program by ``deploy/criu``: ``python -m snapshot_drivers.criu.probe PREFIX``.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from snapshot_drivers.criu import rpc
from snapshot_drivers.criu.gateway import DEFAULT_PREFIX, CriuError, Gateway, Place
from snapshot_drivers.criu.options import dump_options, restore_options
from snapshot_drivers.errors import SnapshotError

_ROUNDS: Final = 2
_TIMEOUT_S: Final = 20.0
_PROGRAM: Final = """
import ctypes, os, signal, socket, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork():
    while True:
        signal.pause()
os.setsid()
for descriptor in range(3):  # of this mount namespace
    os.dup2(os.open("/dev/null", os.O_RDWR), descriptor)
os.closerange(3, 32)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
libc = ctypes.CDLL(None)
key = libc.semget(0, 1, 0o1600)
assert key >= 0 and libc.semctl(key, 0, 16, 7) == 0
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
listener = socket.create_server(("127.0.0.1", 0))
open(sys.argv[1], "w").write(str(listener.getsockname()[1]))
count = 0
while True:
    peer, _ = listener.accept()
    count += 1
    peer.sendall(f"{count} {libc.semctl(key, 0, 12)}".encode())
    peer.close()
"""


def works(prefix: Path = DEFAULT_PREFIX) -> str:
    """CRIU's version, if a round trip passed twice.

    Raises: SnapshotError: it did not, with the reason.
    """
    gateway = Gateway(prefix)
    version = ".".join(map(str, gateway.version()))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        # A pid, mount and ipc namespace of its own, below a process that reaps: what a container is, in short.
        inner = [sys.executable, "-I", "-S", "-c", _PROGRAM, f"{directory}/port"]
        command = [
            shutil.which("unshare") or "unshare",
            "--fork",
            "--pid",
            "--mount-proc",
            "--ipc",
            "--uts",
            "--kill-child",
            *inner,
        ]
        with subprocess.Popen(
            command,
            env={},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                _rounds(gateway, process.pid, directory)
            finally:
                process.kill()
    return version


def _rounds(gateway: Gateway, outer: int, directory: Path) -> None:
    port_file = directory / "port"
    deadline = time.monotonic() + _TIMEOUT_S
    while not port_file.exists() or not port_file.read_text():
        if time.monotonic() > deadline:
            raise CriuError("the process of the round trip does not start")
        time.sleep(0.02)
    port = int(port_file.read_text())
    init = _children(outer)[0]
    for turn in range(1, _ROUNDS + 1):
        _ask(port, turn * 2 - 1)
        tree = _children(init)[0]
        images = directory / f"images{turn}"
        images.mkdir(mode=0o700)
        spaces = {kind: os.open(f"/proc/{init}/ns/{kind}", os.O_RDONLY) for kind in ("pid", "uts", "mnt")}
        try:
            inner = int(Path(f"/proc/{tree}/status").read_text().split("NSpid:")[1].split("\n")[0].split()[-1])
            options = dump_options(inner, tcp="keep", timeout_s=_TIMEOUT_S)
            with gateway.call(rpc.Kind.DUMP, options, images, Place(spaces)) as call:
                call.wait(None, _TIMEOUT_S)
            for pid in _below(init):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while _children(init):
                if time.monotonic() > deadline:
                    raise CriuError("killed processes of the round trip do not go")
                time.sleep(0.005)
            place = Place(spaces, enter_pid=5000, leave_pid=200)
            with gateway.call(rpc.Kind.RESTORE, restore_options(tcp="keep"), images, place) as call:
                call.wait(None, _TIMEOUT_S)
        finally:
            for descriptor in spaces.values():
                os.close(descriptor)
        _ask(port, turn * 2)


def _ask(port: int, wanted: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 5) as peer:
        peer.settimeout(5)
        said = peer.recv(64).decode()
    if said != f"{wanted} 7":
        raise CriuError(f"after a round trip the program says {said!r} instead of {wanted} 7")


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _below(pid: int) -> list[int]:
    found = []
    for child in _children(pid):
        found += [child, *_below(child)]
    return found


if __name__ == "__main__":
    try:
        sys.stdout.write(f"CRIU {works(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_PREFIX)} works\n")
    except (SnapshotError, OSError) as problem:
        sys.exit(f"criu: no round trip: {problem}")
