"""A second engine beside the machine's: own data root, socket and network, to be killed and started again by tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UP_S = 60.0


class OwnEngine:
    """A ``dockerd`` in a network namespace of its own, so that it touches neither bridge nor rules of the first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = f"unix://{directory}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """It answers."""
        command = [
            "unshare", "--net", "--", "dockerd", "--host", self.address, "--data-root", str(self.directory / "data"),
            "--exec-root", str(self.directory / "exec"), "--pidfile", str(self.directory / "pid"), "--iptables=false",
        ]  # fmt: skip
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + _UP_S
        while self("version", check=False) == "":
            ended = self._process.poll() is not None or time.monotonic() > deadline
            assert not ended, (self.directory / "log").read_text(errors="replace")[-3000:]
            time.sleep(0.2)

    def end(self, number: signal.Signals) -> None:
        """``SIGTERM``: it has shut down in order. ``SIGKILL``: it is dead, and its containerd with it."""
        assert self._process is not None
        containerd = self.directory / "exec" / "containerd" / "containerd.pid"
        if number == signal.SIGKILL and containerd.exists():
            os.kill(int(containerd.read_text()), number)
        self._process.send_signal(number)
        self._process.wait(_UP_S)

    def __call__(self, *arguments: str, check: bool = True) -> str:
        """What the client says; nothing where it fails and need not be checked."""
        client = subprocess.run(["docker", "--host", self.address, *arguments], capture_output=True, text=True)
        assert client.returncode == 0 or not check, client.stderr
        return client.stdout if client.returncode == 0 else ""

    def take_image(self, name: str) -> None:
        """It has the first engine's image of that name."""
        with subprocess.Popen(["docker", "save", name], stdout=subprocess.PIPE) as saving:
            subprocess.run(
                ["docker", "--host", self.address, "load"], stdin=saving.stdout, check=True, capture_output=True
            )
        assert saving.returncode == 0


@contextmanager
def own_engine(*images: str) -> Iterator[OwnEngine]:
    """Runs while the block does, with these images; afterwards nothing of it is left."""
    # A short path: those of the sockets below it may have 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="engine-", dir="/var/tmp"))
    engine = OwnEngine(directory)
    try:
        engine.start()
        for image in images:
            engine.take_image(image)
        yield engine
        for container in engine("ps", "-aq").split():
            engine("rm", "-f", container)
    finally:
        engine.end(signal.SIGTERM)
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            if (place := line.split()[4]).startswith(f"{directory}/"):
                subprocess.run(["umount", "-l", place], check=False)
        shutil.rmtree(directory)
