"""Files that a process can write to are found by its descriptors, however it hides them."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from snapshot_drivers.overlay.held import open_for_writing

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
elif how == "read only":
    os.close(file)
    file = os.open(path, os.O_RDONLY)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("how", "told"), [("open", True), ("read only", False), ("sent", None), ("waiting", None)], ids=str
)
def test_a_file_that_is_open_for_writing_is_known_however_it_is_held(
    tmp_path: Path, how: str, told: bool | None
) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with path.open("rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        words = [sys.executable, "-c", HOLDER, str(path), how]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            try:
                assert holder.stdout is not None
                assert holder.stdout.readline() == b"ready\n"
                found = open_for_writing([holder.pid])
            finally:
                holder.kill()
    expected = {True: {os.fsencode(path)}, False: set(), None: None}[told]
    assert found == expected


def test_a_socket_that_carries_nothing_hides_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert open_for_writing([os.getpid()]) is not None
