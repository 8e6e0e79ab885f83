"""Programs of the distribution come back with memory and files, or are named with the reason.

``ORCHESTRATOR_PROGRAMS=all`` adds those whose packages are large (a JVM, MariaDB, PostgreSQL).
"""

from __future__ import annotations

import pytest

from snapshot_drivers.base import CoverageState
from tests.e2e.criu.programs import ALL, MAKE, NGINX_WORKERS, POSTGRES, PROGRAMS
from tests.e2e.criu.rewindable import Make, Rewindable, processes

heavy = pytest.mark.skipif(not ALL, reason="large packages: ORCHESTRATOR_PROGRAMS=all")


@pytest.fixture
def place(make: Make, programs_image: str) -> Rewindable:
    made = make({"image": programs_image})
    made.sh("mkdir /w")
    return made


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=heavy) if PROGRAMS[name].heavy else name for name in PROGRAMS]
)
def test_a_program_goes_on_with_the_memory_that_fits_its_files_three_times(place: Rewindable, name: str) -> None:
    program = PROGRAMS[name]
    for path, text in program.writes:
        place.write(path, text)
    place.sh(program.start)
    place.wait(program.ready)
    steps = 0
    for turn in range(3):
        steps += 1
        assert place.sh(program.step).split()[-1] == str(steps)
        place.sh(f"setsid sleep 10{turn} >/dev/null 2>&1 </dev/null &")
        snapshot = place.taken()
        place.sh(program.step)
        place.sh("rm -rf /w; mkdir /w; pkill sleep; true")
        place.restore(snapshot)
        assert place.sh(program.file).split()[-1] == str(steps)
        steps += 1
        assert place.sh(program.step).split()[-1] == str(steps)
        assert place.sh(f"pgrep -c -f '^sleep 10{turn}$'") == "1"


def test_make_in_progress_goes_on_and_does_every_step_once(place: Rewindable) -> None:
    place.write("/w/Makefile", MAKE)
    place.sh("cd /w; setsid make -j4 >/w/log 2>&1 </dev/null &")
    for turn in range(3):
        place.wait(f"test $(cat /w/part4 2>/dev/null | wc -l) -gt {30 * turn}")
        snapshot = place.taken()
        place.sh("sleep 0.1; rm -rf /w; pkill make; pkill sleep; true")
        place.restore(snapshot)
    place.wait("test -e /w/done")
    assert place.sh("for n in 1 2 3 4; do seq 300 | cmp - /w/part$n; done") == ""


def test_a_shell_of_a_terminal_that_keeps_dev_tty_open_is_missing_with_the_reason(place: Rewindable) -> None:
    place.sh("tmux -f /dev/null new-session -d -s s dash")
    place.wait("pgrep -x dash")
    place.wait("readlink /proc/$(pgrep -x dash)/fd/10")
    state, reason = processes(place.capture())[0]
    assert state is CoverageState.MISSING and "/dev/tty" in (reason or "")
    assert place.sh("tmux list-windows -t s")


@pytest.mark.parametrize(
    ("start", "ready"),
    [
        pytest.param("nginx -c /w/nginx.conf", "pgrep -u www-data nginx", id="nginx with workers of another uid"),
        pytest.param(POSTGRES, "grep -q 'INSERT 0 1' /w/out", id="PostgreSQL in a transaction", marks=heavy),
    ],
)
def test_a_service_of_another_user_comes_back_or_is_named_with_what_root_lacks_and_goes_on(
    place: Rewindable, start: str, ready: str
) -> None:
    place.write("/w/nginx.conf", NGINX_WORKERS)
    place.sh(start)
    place.wait(ready)
    before = place.sh("pgrep -u www-data,postgres | sort")
    found = processes(place.capture())
    if all(state is CoverageState.CAPTURED for state, _ in found):
        return
    assert found and all(
        state is CoverageState.MISSING and "CAP_SYS_RESOURCE" in (reason or "") for state, reason in found
    )
    assert place.sh("pgrep -u www-data,postgres | sort") == before
