"""Processes go back with the files: what programs see, what a hostile container can do, what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.container import Container
from orchestrator.data_dir import DataDir
from snapshot_drivers.base import CaptureOptions, CoverageState, RestoreReport, Snapshot, StateKind
from snapshot_drivers.criu.driver import CriuDriver
from snapshot_drivers.criu.gateway import DEFAULT_PREFIX
from snapshot_drivers.errors import CaptureError, RestoreError, RestoreRefused

OPTIONS = CaptureOptions()
pytestmark = pytest.mark.skipif(
    not (DEFAULT_PREFIX / "join.so").exists(), reason="needs the CRIU that deploy/criu brings"
)


class Rewindable:
    """A container with the driver over it."""

    def __init__(self, container: Container, driver: CriuDriver, data_dir: DataDir) -> None:
        self.container = container
        self.driver = driver
        self.data_dir = data_dir

    def sh(self, command: str) -> str:
        result = self.container.exec(command)
        assert result.exit_code == 0, result.output
        return result.output.decode().strip()

    def start(self, program: str, *, name: str = "p") -> None:
        """A Python program runs in the background, with its output in ``/w/<name>.log``."""
        self.sh(f"mkdir -p /w; cat > /w/{name}.py <<'END'\n{program}\nEND")
        self.sh(f"cd /w; setsid python3 {name}.py >/w/{name}.log 2>&1 </dev/null &")
        self.wait(f"test -e /w/{name}.ready")

    def wait(self, command: str, timeout_s: float = 10.0) -> None:
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
        snapshot = self.capture()
        found = processes(snapshot)
        assert found and all(state is CoverageState.CAPTURED for state, _ in found), found
        return snapshot


def processes(snapshot: Snapshot) -> list[tuple[CoverageState, str | None]]:
    return [(item.state, item.reason) for item in snapshot.coverage.items if item.kind is StateKind.PROCESS]


@pytest.fixture
def make(container: Callable[..., Container], data_dir: DataDir) -> Iterator[Callable[..., Rewindable]]:
    drivers: list[CriuDriver] = []

    def one(**options: object) -> Rewindable:
        drivers.append(CriuDriver(data_dir.store, **options))  # type: ignore[arg-type]
        return Rewindable(container(), drivers[-1], data_dir)

    yield one
    for driver in drivers:
        driver.close()


READY = "open(__file__[:-3] + '.ready', 'w').close()\n"
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
ASK = "python3 -c \"import socket; print(socket.create_connection(('127.0.0.1', 8000), 5).recv(999).decode())\""

PROGRAMS = {
    "threads": (
        SERVE + "import threading, time\ncount = 0\nlock = threading.Lock()\n"
        "def work():\n    while True: time.sleep(0.01)\n"
        "[threading.Thread(target=work, daemon=True).start() for _ in range(5)]\n"
        "def answer():\n    global count; count += 1; open('/w/state', 'w').write(str(count)); "
        "return count\nserve(answer)"
    ),
    "asyncio": (
        "import asyncio\ncount = 0\nasync def on(reader, writer):\n    global count; count += 1\n"
        "    open('/w/state', 'w').write(str(count))\n    writer.write(str(count).encode()); writer.close()\n"
        "async def main():\n    server = await asyncio.start_server(on, '127.0.0.1', 8000)\n"
        f"    {READY}    await server.serve_forever()\nasyncio.run(main())"
    ),
    "unlinked 3 MB file": (
        SERVE + "file = open('/w/gone', 'w+b'); file.write(b'x' * 3_000_000); file.flush(); os.unlink('/w/gone')\n"
        "count = 0\ndef answer():\n    global count; count += 1; open('/w/state', 'w').write(str(count))\n"
        "    file.seek(0); assert len(file.read()) == 3_000_000; return count\nserve(answer)"
    ),
    "memfd, eventfd, epoll": (
        SERVE + "import select\nmemory = os.memfd_create('m'); os.write(memory, b'secret')\nevent = os.eventfd(3)\n"
        "poll = select.epoll(); poll.register(event, select.EPOLLIN)\ncount = 0\n"
        "def answer():\n    global count; count += 1; open('/w/state', 'w').write(str(count))\n"
        "    assert os.pread(memory, 9, 0) == b'secret' and poll.poll(0)[0][0] == event; return count\nserve(answer)"
    ),
    "System V": (
        SERVE + "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\n"
        "segment = libc.shmget(0x77, 4096, 0o1600); place = libc.shmat(segment, None, 0)\n"
        "semaphore = libc.semget(0x78, 1, 0o1600); libc.semctl(semaphore, 0, 16, 5)\n"
        "word = ctypes.c_int.from_address(place)\n"
        "def answer():\n    word.value += 1; open('/w/state', 'w').write(str(word.value))\n"
        "    assert libc.semctl(semaphore, 0, 12) == 5; return word.value\nserve(answer)"
    ),
    "SQLite writer": (
        SERVE + "import sqlite3\nbase = sqlite3.connect('/w/base'); base.execute('pragma journal_mode=wal')\n"
        "base.execute('create table t(x)'); base.commit(); count = 0\n"
        "def answer():\n    global count; count += 1; open('/w/state', 'w').write(str(count))\n"
        "    base.execute('insert into t values (1)')\n"
        "    assert base.execute('select count(*) from t').fetchone() == (count,); return count\nserve(answer)"
    ),
    "TCP pair inside": (
        SERVE + "import threading\nlistener = socket.create_server(('127.0.0.1', 9000))\n"
        "one = socket.create_connection(('127.0.0.1', 9000)); two, _ = listener.accept(); count = 0\n"
        "def answer():\n    global count; count += 1; open('/w/state', 'w').write(str(count))\n"
        "    one.sendall(b'x%d' % count); assert two.recv(99) == b'x%d' % count; return count\nserve(answer)"
    ),
    "stopped child": (
        SERVE + "import signal, time\nchild = os.fork()\nif not child:\n    time.sleep(1000)\n"
        "os.kill(child, signal.SIGSTOP)\ncount = 0\n"
        "def answer():\n    global count; count += 1; open('/w/state', 'w').write(str(count))\n"
        "    assert open(f'/proc/{child}/stat').read().split()[2] == 'T'; return count\nserve(answer)"
    ),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_memory_and_files_of_a_program_go_back_together_three_times(make: Callable[..., Rewindable], kind: str) -> None:
    place = make()
    place.start(PROGRAMS[kind])
    for turn in range(1, 4):
        assert place.sh(ASK) == str(turn)
        place.sh(f"setsid sleep 10{turn} >/dev/null 2>&1 </dev/null &")
        snapshot = place.taken()
        place.sh(ASK)
        place.sh("rm -r /w/*; echo broken > /w/state; pkill sleep")
        place.restore(snapshot)
        assert place.sh("cat /w/state") == str(turn)
        assert place.sh(f"pgrep -c -f '^sleep 10{turn}$'") == "1"


def test_a_watch_on_overlayfs_is_missing_with_the_reason_and_the_program_goes_on(
    make: Callable[..., Rewindable],
) -> None:
    place = make()
    place.start(
        SERVE + "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "watch = libc.inotify_init1(2048); assert libc.inotify_add_watch(watch, b'/w', 0x100) > 0\n"
        "serve(lambda: 'here')"
    )
    state, reason = processes(place.capture())[0]
    assert state is CoverageState.MISSING and "inotify" in (reason or "")
    assert place.sh(ASK) == "'here'"


def test_a_shell_loop_with_a_pipeline_and_an_orphan_go_on(make: Callable[..., Rewindable]) -> None:
    place = make()
    place.sh(
        "mkdir /w; nohup sh -c 'while :; do echo x; sleep 0.05; done | cat >> /w/out' >/dev/null 2>&1 </dev/null &"
    )
    place.sh("(nohup sleep 5555 >/dev/null 2>&1 </dev/null &)")
    place.wait("test -s /w/out")
    snapshot = place.taken()
    stored = len(b"".join(place.driver.read_file(snapshot.snapshot_id, "/w/out") or ()))
    place.sh("pkill sleep; pkill cat; rm -r /w")
    place.restore(snapshot)
    place.wait(f"test $(stat -c %s /w/out) -gt {stored + 4}")
    assert place.sh("pgrep -f 'sleep 5555'")


def test_a_container_that_sets_traps_gets_none_of_them_run(make: Callable[..., Rewindable]) -> None:
    place = make()
    place.start(PROGRAMS["TCP pair inside"])
    place.sh(
        "printf '#!/bin/sh\\necho trap >> /trapped\\n' > /usr/local/sbin/iptables; cd /usr/local/sbin;"
        "chmod +x iptables;"
        "cp iptables nft; cp iptables ip6tables; cp iptables sh; mkdir -p /etc/criu /root/.criu /usr/lib/criu;"
        "echo action-script /usr/local/sbin/iptables | tee /etc/criu/default.conf > /root/.criu/default.conf;"
        "cp iptables /usr/lib/criu/x.so; echo rubbish > /run/criu.kdat; rm /usr/local/sbin/sh"
    )
    place.sh("cp /usr/local/sbin/iptables /usr/local/sbin/sh; echo /nowhere.so > /etc/ld.so.preload")
    place.container.exec(["/bin/rm", "-f", "/trapped"])
    before = place.sh("stat -c %Y.%y /tmp /run 2>/dev/null")
    snapshot = place.taken()
    place.restore(snapshot)
    assert place.container.exec(["/bin/cat", "/trapped"]).exit_code == 1
    assert before == place.sh("stat -c %Y.%y /tmp /run 2>/dev/null")
    assert not Path("/trapped").exists()


def test_edited_images_and_manifests_are_refused(make: Callable[..., Rewindable]) -> None:
    place = make()
    place.start(PROGRAMS["threads"])
    snapshot = place.taken()
    path = place.data_dir.store / "manifests" / f"{snapshot.snapshot_id}.json"
    whole = path.read_text()
    edited = json.loads(whole)
    edited["processes"]["images"] = [one for one in edited["processes"]["images"] if one["name"] != "seccomp.img"]
    path.write_text(json.dumps(edited))
    if edited != json.loads(whole):
        with pytest.raises(RestoreRefused, match="seal"):
            place.restore(snapshot)
    path.write_text(whole.replace("CapEff", "CapEfg"))
    with pytest.raises(RestoreRefused, match="seal"):
        place.restore(snapshot)
    path.write_text(whole)
    assert place.sh(ASK) == "1"
    place.restore(snapshot)
    assert place.sh(ASK) == "1"


def test_a_tree_that_comes_back_with_other_rights_does_not_go_on(
    make: Callable[..., Rewindable], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make()
    place.start(PROGRAMS["threads"])
    real = CriuDriver.capture
    snapshot = real(place.driver, place.container.target(), None, OPTIONS)
    staged = place.driver.stage(place.container.target(), snapshot.snapshot_id, OPTIONS)
    for facts in staged._facts.values():  # type: ignore[attr-defined]
        facts["CapEff"] = ["0000000000000000"]
    with pytest.raises(RestoreError, match="CapEff"):
        staged.apply()
    staged.discard()
    time.sleep(0.1)
    assert place.container.exec("pgrep python3").exit_code == 1


def test_another_users_process_is_missing_with_the_reason_or_comes_back(make: Callable[..., Rewindable]) -> None:
    place = make()
    place.container.exec("setsid sleep 4321 >/dev/null 2>&1 </dev/null &", user="1000")
    state, reason = processes(place.capture())[0]
    assert state is CoverageState.CAPTURED or "CAP_SYS_RESOURCE" in (reason or "")
    assert place.sh("pgrep -f 'sleep 4321'")


def test_a_process_of_docker_exec_is_named_and_require_all_fails(
    make: Callable[..., Rewindable], engine: object
) -> None:
    import docker

    place = make(require="all")
    docker.from_env().containers.get(place.container.container_id).exec_run(["sleep", "4444"], detach=True, user="0")
    time.sleep(0.2)
    with pytest.raises(CaptureError, match="4444"):
        place.capture()


def test_nothing_below_the_launcher_costs_no_dump(make: Callable[..., Rewindable]) -> None:
    place = make()
    place.sh("echo 1 > /one")
    snapshot = place.capture()
    assert snapshot.driver == "criu" and not processes(snapshot)
