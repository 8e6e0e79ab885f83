"""The commit driver and its engine: over the network, without an image, and beyond the last layer."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from snapshot_drivers.base import StateKind
from snapshot_drivers.commit.driver import CommitDriver
from snapshot_drivers.errors import StoreDamaged, UnsupportedHost
from tests.contract.commit_subject import CommitSubject
from tests.contract.overlay_subject import assert_ci_has_engine, is_engine_there
from tests.e2e.case_cli import docker

pytestmark = pytest.mark.engine


@contextmanager
def over_tcp() -> Iterator[str]:
    """Address under which the engine's socket is reached over TCP."""
    socket_path = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_serve, args=(server, socket_path), daemon=True).start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def _serve(server: socket.socket, socket_path: str) -> None:
    with suppress(OSError):
        while True:
            near, _ = server.accept()
            far = socket.socket(socket.AF_UNIX)
            far.connect(socket_path)
            for one, two in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(one, two), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[CommitSubject]:
    if not is_engine_there():
        assert_ci_has_engine()
        pytest.skip("no engine with the base image answers (deploy/setup brings one)")
    with over_tcp() as address:
        subject = CommitSubject(tmp_path, engine=address)
        subject.driver.close()
        subject.options_of_driver["most_layers"] = len(subject.layer_ids) + 2
        subject.reopen()
        try:
            yield subject
        finally:
            subject.close()


def test_a_container_is_taken_back_through_a_remote_engine_and_what_runs_is_named(subject: CommitSubject) -> None:
    subject.sh("echo 1 > /w/f; ln -s f /w/l; mkdir -p /w/d")
    subject.spawn("sleep 1234 < /dev/null > /dev/null 2>&1 &")
    snapshot, before = subject.capture(), subject.tree()
    named = [item.path for item in snapshot.coverage.items if item.kind is StateKind.PROCESS]
    assert any(path.endswith("sleep 1234") for path in named)
    subject.sh("rm -r /w")
    subject.restore(snapshot)
    assert subject.tree() == before
    read = subject.driver.read_file(snapshot.snapshot_id, "/w/f")
    assert read is not None
    assert b"".join(read) == b"1\n"


def test_an_image_that_somebody_removed_is_named_before_the_container_is_touched(subject: CommitSubject) -> None:
    subject.sh("echo 1 > /w/f")
    snapshot = subject.capture()
    docker("rmi", f"orchestrator-snapshot:{snapshot.snapshot_id}")
    subject.sh("echo 2 > /w/f")
    with pytest.raises(StoreDamaged, match="lost the image"):
        subject.restore(snapshot)
    assert subject.sh("cat /w/f") == "2\n"
    assert subject.driver.verify([snapshot.snapshot_id])[snapshot.snapshot_id]


def test_no_engine_there_is_said_with_its_address(tmp_path: Path) -> None:
    driver = CommitDriver(tmp_path, engine="unix:///nonexistent/docker.sock")
    with pytest.raises(UnsupportedHost, match=r"/nonexistent/docker\.sock"):
        driver._engine.image("any")


def test_a_container_is_restored_more_often_than_its_image_may_have_layers(subject: CommitSubject) -> None:
    subject.sh("mkdir -p /w/keep; echo gone > /w/gone; rm -r /etc/apt; echo a > /w/a; ln /w/a /w/b; mkfifo /w/p")
    for turn in range(4):
        subject.sh(f"echo {turn} > /w/turn{turn}; rm -f /w/gone; if [ -e /etc/apt ]; then rm -r /etc/apt; fi")
        subject.sh(f"mkdir /etc/apt; touch /etc/apt/{turn}; rm /w/a; echo a{turn} > /w/a; chown {turn}:7 /w/b")
        snapshot, before = subject.capture(), subject.tree()
        subject.sh("rm -r /w /etc/apt")
        subject.restore(snapshot)
        assert subject.tree() == before
        assert subject.sh("ls -A /etc/apt").split() == [str(turn)]
    layers = docker("inspect", "--format", "{{len .RootFS.Layers}}", str(subject.container.attrs["Image"]))
    assert int(layers) <= subject.options_of_driver["most_layers"]
    assert [change.path for change in subject.driver.diff(None, snapshot.snapshot_id) if "turn" in change.path] == [
        f"/w/turn{turn}" for turn in range(4)
    ]
