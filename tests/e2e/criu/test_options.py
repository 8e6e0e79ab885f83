"""The driver's options, and declared daemons whose memory could not be taken."""

from __future__ import annotations

import time

import pytest

from tests.e2e.case_cli import Cli
from tests.e2e.criu.rewindable import ASK, SERVE, Make

CLOCK = SERVE + "import time\nserve(time.monotonic)"
PAIR = (
    SERVE + "listener = socket.create_server(('127.0.0.1', 9000))\n"
    "one = socket.create_connection(('127.0.0.1', 9000)); two, _ = listener.accept(); sent = 0\n"
    "def answer():\n    one.sendall(b'x'); return two.recv(9)\nserve(answer)"
)


@pytest.mark.parametrize("clock", ["preserve", "host"])
def test_the_monotonic_clock_of_a_restored_program_goes_on_or_is_the_hosts(make: Make, clock: str) -> None:
    place = make(clock=clock)
    place.start(CLOCK)
    now = time.monotonic()
    assert float(place.sh(ASK)) >= now
    snapshot = place.taken()
    time.sleep(2)
    place.restore(snapshot)
    before = time.monotonic()
    said = float(place.sh(ASK))
    assert said >= before if clock == "host" else said <= time.monotonic() - 2


def test_connections_inside_are_closed_where_the_task_says_so(make: Make) -> None:
    place = make(tcp="close")
    place.start(PAIR)
    assert place.sh(ASK) == "b'x'"
    snapshot = place.taken()
    place.restore(snapshot)
    assert "Error" in place.sh(ASK)


COUNTER = """
import ctypes, itertools, socket
libc = ctypes.CDLL(None)
%s
listener = socket.create_server(("127.0.0.1", 8000))
for count in itertools.count(1):
    listener.accept()[0].sendall(str(count).encode())
"""
FAR_WATCH = "assert libc.inotify_add_watch(libc.inotify_init(), b'/opt', 0x100) > 0"


@pytest.mark.parametrize("can_be_taken", [True, False])
def test_a_daemon_goes_on_or_is_started_by_its_command_where_its_memory_could_not_be_taken(
    cli: Cli, make: Make, can_be_taken: bool
) -> None:
    program = COUNTER % ("" if can_be_taken else FAR_WATCH)
    run = cli.manual(
        setup=[f"cat > /counter.py <<'END'\n{program}\nEND"],
        daemons=[{"name": "counter", "start": "exec python3 /counter.py", "ready": "grep -q :1F40 /proc/net/tcp"}],
        snapshots={"driver": "criu", "options": {} if can_be_taken else {"require": "any"}},
    )
    assert [cli.sh(run, ASK).strip() for _ in range(2)] == ["1", "2"]
    point = cli.checkpoint(run)
    cli.sh(run, ASK)
    restored = cli.json("restore", run, str(point), *([] if can_be_taken else ["--accept-partial"]))
    assert any("counter.py" in one for one in restored["processes"]["restored"]), restored
    assert cli.sh(run, ASK).strip() == ("3" if can_be_taken else "1")


def test_a_daemon_whose_memory_cannot_be_taken_fails_the_checkpoint_unless_the_task_forgoes_it(cli: Cli) -> None:
    run = cli.manual(
        setup=[f"cat > /counter.py <<'END'\n{COUNTER % ''}\nEND"],
        daemons=[{"name": "counter", "start": "exec python3 /counter.py", "ready": "grep -q :1F40 /proc/net/tcp"}],
        snapshots={"driver": "criu"},
    )
    point = cli.checkpoint(run)
    cli.sh(
        run,
        f"cat > /far.py <<'END'\nimport ctypes, time\nlibc = ctypes.CDLL(None)\n{FAR_WATCH}\n"
        "open('/watches', 'w').close()\ntime.sleep(1e6)\nEND\n"
        "setsid python3 /far.py >/dev/null 2>&1 </dev/null & while [ ! -e /watches ]; do sleep 0.05; done",
    )
    _, said = cli("checkpoint", run, code=None)
    assert "cannot be taken" in said and "require: tree" in said
    cli.json("restore", run, str(point))  # though it still runs
    assert cli.sh(run, "pgrep -f '^python3 /far' || echo none").strip() == "none"
    assert cli.sh(run, ASK).strip() == "1"
