"""A second engine with its checkpoint feature on, in namespaces of its own; gone with the block."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.series import docker
from snapshot_drivers.criu.gateway import Gateway

_START_S = 30.0


def criu_program(directory: Path) -> Path:
    """A program ``criu`` in ``directory`` that runs the one of ``deploy/criu``, for whoever looks for one in PATH."""
    gateway = Gateway()
    gateway.check()
    program = directory / "criu"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(gateway.plain_command())} "$@"\n')
    program.chmod(0o755)
    return program


@contextmanager
def experimental_engine(image: str) -> Iterator[str]:
    """Path of the socket of an engine that has ``image``."""
    with tempfile.TemporaryDirectory(prefix="bench-engine-", dir="/var/tmp") as name:
        place = Path(name)
        criu_program(place)
        socket = f"{name}/engine.sock"
        script = f"""
            mount --make-rprivate /
            mount -t tmpfs none /run
            ip link set lo up
            exec dockerd --experimental --data-root {name}/data --exec-root /run/docker --pidfile /run/docker.pid \
                --host unix://{socket} --iptables=false --ip6tables=false --bridge=none"""
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(
                ["unshare", "--mount", "--net", "sh", "-ec", script],
                env={**os.environ, "PATH": f"{name}:{os.environ['PATH']}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            _wait(socket, process, place / "log")
            with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saved:
                load = ["docker", "--host", f"unix://{socket}", "load", "--quiet"]
                subprocess.run(load, stdin=saved.stdout, stdout=subprocess.DEVNULL, check=True)
            yield socket
        finally:
            with suppress(subprocess.CalledProcessError):
                for container in docker("ps", "-aq", host=socket).split():
                    docker("rm", "-f", container, host=socket)
            process.terminate()
            process.wait(_START_S)


def _wait(socket: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with suppress(subprocess.CalledProcessError):
            docker("version", host=socket)
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the second engine does not start: {log.read_text(errors='replace')[-500:]}")
        time.sleep(0.2)
