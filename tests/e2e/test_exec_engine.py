"""What the engine does to a command is never the command's result."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.container import Container
from orchestrator.engine import Engine
from orchestrator.launcher import ExecResult
from snapshot_drivers.errors import ContainerNotRunning, EngineError

pytestmark = pytest.mark.engine

MakeContainer = Callable[..., Container]


@pytest.fixture
def box(container: MakeContainer) -> Container:
    return container()


def text(result: ExecResult) -> str:
    return result.output.decode()


def wait_until(true: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class TestTheEngine:
    def test_a_dead_container_is_an_error_and_no_result(self, box: Container) -> None:
        box.kill()
        with pytest.raises(ContainerNotRunning):
            box.exec("true")

    def test_a_container_that_dies_under_a_command_is_an_error(self, box: Container) -> None:
        threading.Timer(0.5, box.kill).start()
        with pytest.raises(EngineError):
            box.exec("sleep 30")

    def test_a_paused_container_is_an_error_that_names_the_cause(self, box: Container) -> None:
        subprocess.run(["docker", "pause", box.name], check=True, capture_output=True)
        assert box.paused()
        with pytest.raises(ContainerNotRunning, match="paused"):
            box.exec("true")
        subprocess.run(["docker", "unpause", box.name], check=True, capture_output=True)
        assert box.exec("true").exit_code == 0

    def test_an_unknown_user_is_an_error_that_names_it(self, box: Container) -> None:
        with pytest.raises(EngineError, match="nosuchuser"):
            box.exec("true", user="nosuchuser")

    def test_an_engine_that_goes_away_under_a_command_is_an_error(self, box: Container, tmp_path: Path) -> None:
        with proxy(tmp_path / "engine.sock") as cut:
            beside = Container.attach(Engine.connect(f"unix://{tmp_path}/engine.sock"), box.config)
            assert text(beside.exec("echo through the proxy")) == "through the proxy\n"
            threading.Timer(0.5, cut).start()
            with pytest.raises(EngineError):
                beside.exec("sleep 3")
            with pytest.raises(EngineError, match="doctor"):
                beside.exec("true")

    def test_calls_at_the_same_time_do_not_disturb_each_other(self, box: Container) -> None:
        results: dict[int, str] = {}

        def call(number: int) -> None:
            results[number] = text(box.exec(f"echo {number}; sleep 0.2; echo {number}"))

        threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {number: f"{number}\n{number}\n" for number in range(8)}


@contextmanager
def proxy(path: Path) -> Iterator[Callable[[], None]]:
    """A socket that leads to the engine until the function given is called."""
    open_sockets: list[socket.socket] = []

    def copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            engine = socket.socket(socket.AF_UNIX)
            engine.connect("/var/run/docker.sock")
            open_sockets.extend((client, engine))
            threading.Thread(target=copy, args=(client, engine), daemon=True).start()
            threading.Thread(target=copy, args=(engine, client), daemon=True).start()

    def cut() -> None:
        path.unlink(missing_ok=True)
        with listener:
            listener.shutdown(socket.SHUT_RDWR)
        for one in open_sockets:
            with one:
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        threading.Thread(target=accept, daemon=True).start()
        yield cut
