"""Files that a process can write to, and files that it leases, are found by its descriptors, however it hides them."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from snapshot_drivers import beneath
from snapshot_drivers.leases import Inode
from snapshot_drivers.overlay.held import Descriptors, Held

HOLDER = """
import array, fcntl, os, socket, sys, threading
path, how = sys.argv[1:]
file = os.open(path, os.O_RDWR)
if how == "sent":
    ours, theirs = socket.socketpair()
    ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))])
    os.close(file)
elif how == "waiting":
    threading.Thread(target=fcntl.flock, args=(file, fcntl.LOCK_EX), daemon=True).start()
    __import__("time").sleep(0.3)
    os.close(file)
elif how == "leased":
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
elif how == "read only":
    os.close(file)
    file = os.open(path, os.O_RDONLY)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(path: Path, how: str) -> Iterator[int]:
    words = [sys.executable, "-c", HOLDER, str(path), how]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("x")
    return path


@pytest.mark.parametrize(("how", "told"), [("open", True), ("read only", False), ("leased", True)], ids=str)
def test_a_file_that_is_open_for_writing_is_known(path: Path, how: str, told: bool) -> None:
    with holder(path, how) as pid:
        found = Descriptors.of([pid])
    assert found.is_all
    assert found.writable == ({os.fsencode(path)} if told else set())


def test_a_file_on_its_way_through_a_socket_is_not_known_and_that_is(path: Path) -> None:
    with holder(path, "sent") as pid:
        assert not Descriptors.of([pid]).is_all
        with beneath.closing(os.open(path.parent, os.O_RDONLY)) as root:
            assert Held([pid]).open_inodes(str(path.parent), root) is None


def test_a_call_that_waits_lets_go_of_a_closed_file_when_its_process_stands_still(path: Path) -> None:
    with path.open("rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        with holder(path, "waiting") as pid:
            assert f" {pid} " in Path("/proc/locks").read_text()
            os.kill(pid, signal.SIGSTOP)
            deadline = time.monotonic() + 10
            while f" {pid} " in Path("/proc/locks").read_text():
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_a_lease_is_known_by_its_descriptor_without_the_kernels_table(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_table(_pids: object) -> dict[Inode, int | None]:
        raise AssertionError("reading it takes a grace period of the kernel's")

    monkeypatch.setattr("snapshot_drivers.overlay.held.write_leases", no_table)
    with holder(path, "leased") as pid:
        inode = Inode.of(path.stat())
        assert Held([pid]).leases(others=False) == {inode: pid}
        assert Held([pid], stand_still=False).leases(others=False) == {inode: None}
    with holder(path, "open") as pid:
        assert not Held([pid]).leases(others=False)


@pytest.mark.parametrize(("how", "others"), [("leased", True), ("sent", False)])
def test_the_kernels_table_is_asked_where_descriptors_do_not_tell_all(path: Path, how: str, others: bool) -> None:
    """A lease of a process that is not among those looked at is known all the same."""
    other = path.with_name("other")
    other.write_text("x")
    with holder(other, "leased") as lessor, holder(path, how) as pid:
        assert Held([pid]).leases(others=others)[Inode.of(other.stat())] is None
        assert Held([pid, lessor]).leases(others=others)[Inode.of(other.stat())] == lessor


def test_a_socket_that_carries_nothing_hides_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert Descriptors.of([os.getpid()]).is_all
