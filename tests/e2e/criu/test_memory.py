"""Memory and files of Python programs go back together; what cannot be taken is named with the reason."""

from __future__ import annotations

import socket

import docker
import pytest

from orchestrator.engine import Engine
from snapshot_drivers.base import CoverageState, StateKind
from snapshot_drivers.errors import CaptureError
from tests.e2e.criu.rewindable import ASK, SERVE, Make, Rewindable, processes

READY = "open(__file__[:-3] + '.ready', 'w').close()\n"
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


def test_a_connection_to_the_outside_ends_with_an_error_and_the_program_goes_on(make: Make) -> None:
    place = make({"network": "bridge"})
    outside = place.sh("awk '$2 == \"00000000\" {print $3}' /proc/net/route")
    address = ".".join(str(byte) for byte in reversed(bytes.fromhex(outside)))
    with socket.create_server((address, 0)) as listener:
        place.start(
            SERVE + f"peer = socket.create_connection(('{address}', {listener.getsockname()[1]}))\n"
            "def answer():\n    peer.sendall(b'x'); return peer.recv(9)\nserve(answer)"
        )
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b"123")
            assert place.sh(ASK) == "b'123'"
            snapshot = place.taken()
            peer.sendall(b"456")
            assert place.sh(ASK) == "b'456'"
            place.restore(snapshot)
            assert "Error" in place.sh(ASK)


def exec_in(place: Rewindable, command: str) -> None:
    """As a person would, past the launcher."""
    client = docker.from_env()
    client.containers.get(place.container.container_id).exec_run(["sh", "-c", command], detach=True, user="0")
    client.close()


@pytest.mark.parametrize("kind", PROGRAMS)
def test_memory_and_files_of_a_program_go_back_together_three_times(make: Make, kind: str) -> None:
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


WATCH = """
import ctypes
libc = ctypes.CDLL(None)
watch = libc.inotify_init1(2048)
assert libc.inotify_add_watch(watch, b"%s", 0x100) > 0
def answer():
    try: return len(os.read(watch, 4096)) // 32
    except BlockingIOError: return 0
serve(answer)
"""


@pytest.mark.parametrize("where", ["/w", "/dev/shm"])
def test_a_watch_tells_of_new_files_after_a_restore(make: Make, where: str) -> None:
    place = make()
    place.start(SERVE + WATCH % where)
    snapshot = place.taken()
    place.restore(snapshot)
    place.sh(ASK)
    place.sh(f"touch {where}/new")
    assert place.sh(ASK) == "1"


def test_a_watch_of_what_is_far_from_the_program_is_missing_with_the_reason_and_goes_on(make: Make) -> None:
    place = make()
    place.start(SERVE + WATCH % "/opt")
    state, reason = processes(place.capture())[0]
    assert state is CoverageState.MISSING and "inotify" in (reason or "")
    place.sh("touch /opt/new")
    assert place.sh(ASK) == "1"


def test_a_program_that_uses_io_uring_is_missing_with_the_reason_and_goes_on(make: Make) -> None:
    place = make()
    place.start(
        SERVE + "import ctypes\nring = ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(120))\n"
        "serve(lambda: ring >= 0)"
    )
    if place.sh(ASK) != "True":
        pytest.skip("the engine's seccomp profile refuses io_uring")
    state, reason = processes(place.capture())[0]
    assert state is CoverageState.MISSING and "io_uring" in (reason or "")
    assert place.sh(ASK) == "True"


def test_a_shell_loop_with_a_pipeline_and_an_orphan_go_on(make: Make) -> None:
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


def test_another_users_process_is_missing_with_the_reason_or_comes_back(make: Make) -> None:
    place = make()
    place.container.exec("setsid sleep 4321 >/dev/null 2>&1 </dev/null &", user="1000")
    state, reason = processes(place.capture())[0]
    assert state is CoverageState.CAPTURED or "CAP_SYS_RESOURCE" in (reason or "")
    assert place.sh("pgrep -f 'sleep 4321'")


def test_a_process_of_docker_exec_is_named_stands_aside_and_the_rest_is_taken(make: Make, engine: Engine) -> None:
    place = make()
    place.start(PROGRAMS["threads"])
    exec_in(place, "sleep 4444 & while :; do echo x >> /w/beside; sleep 0.01; done")
    place.wait("test -s /w/beside")
    snapshot = place.capture()
    states = {item.path: item.state for item in snapshot.coverage.items if item.kind is StateKind.PROCESS}
    named = {path.split(" ", 2)[2][:12]: state for path, state in states.items() if not path.endswith("sleep 0.01")}
    assert named == {
        "python3 p.py": CoverageState.CAPTURED,
        "sh -c sleep ": CoverageState.MISSING,
        "sleep 4444": CoverageState.MISSING,
    }
    assert place.sh(ASK) == "1"
    place.wait("n=$(wc -l < /w/beside); sleep 0.1; test $(wc -l < /w/beside) -gt $n")
    place.restore(snapshot)
    assert place.sh(ASK) == "1"
    assert place.container.exec("pgrep -f '^sleep 4444'").exit_code == 1


def test_require_all_names_a_process_of_docker_exec_and_fails(make: Make, engine: Engine) -> None:
    place = make(require="all")
    exec_in(place, "exec sleep 4444")
    place.wait("pgrep -f '^sleep 4444'")
    with pytest.raises(CaptureError, match="4444"):
        place.capture()


def test_nothing_below_the_launcher_costs_no_dump(make: Make) -> None:
    place = make()
    place.sh("echo 1 > /one")
    snapshot = place.capture()
    assert snapshot.driver == "criu" and not processes(snapshot)
