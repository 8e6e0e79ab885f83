"""The freezer beside a working engine: no exec suffers, nothing stays frozen, whoever dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_drivers import cgroups
from snapshot_drivers.freezer import Freezer
from tests.e2e.plain_container import REPOSITORY, PlainContainer, plain_container

pytestmark = pytest.mark.engine

FREEZER = """
import sys
from snapshot_drivers.freezer import Freezer
freezer = Freezer(sys.argv[1])
print("ready", flush=True)
while True:
    with freezer.frozen() as freeze:
        pass
"""


@pytest.fixture(scope="module")
def container() -> Iterator[PlainContainer]:
    with plain_container("freeze") as made:
        made.leave_running("while :; do echo; sleep 0.01; done >/dev/null")
        yield made


@pytest.fixture
def freezer(container: PlainContainer) -> Iterator[Freezer]:
    with Freezer(container.group) as made:
        yield made


def children() -> set[int]:
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def wait_thawed(group: str, limit_s: float) -> float:
    began = time.monotonic()
    freezer = Freezer(group)
    while freezer.is_frozen() and time.monotonic() - began < limit_s:
        time.sleep(0.005)
    assert not freezer.is_frozen(), f"still frozen after {limit_s} s"
    return time.monotonic() - began


def test_every_process_stands_still_inside_and_runs_on_after(container: PlainContainer, freezer: Freezer) -> None:
    assert container.init_pid in freezer.pids()
    with freezer.frozen() as freeze:
        assert freeze.complete, freeze.reason
        assert freezer.is_frozen()
    assert freeze.held
    assert 0 < freeze.frozen_ms < 1000
    assert not freezer.is_frozen()
    container.must("true")


def test_a_group_that_is_not_there_is_told_and_not_an_error() -> None:
    with Freezer("/orchestrator/pchk-none") as freezer:
        with freezer.frozen() as freeze:
            assert not freeze.complete
        assert "No such file" in str(freeze.reason)
        assert not freeze.held
        assert freezer.pids() == []
        freezer.thaw()
    assert Freezer.thaw_group("/orchestrator/pchk-none") is False


def test_an_error_inside_the_block_thaws(container: PlainContainer, freezer: Freezer) -> None:
    with pytest.raises(KeyboardInterrupt), freezer.frozen() as freeze:
        raise KeyboardInterrupt
    assert not freeze.held
    assert not freezer.is_frozen()


def test_a_container_that_its_user_paused_stays_paused(container: PlainContainer, freezer: Freezer) -> None:
    container.handle.pause()
    try:
        with freezer.frozen() as freeze:
            assert freeze.complete
        container.handle.reload()
        assert container.handle.status == "paused"
        assert Freezer.thaw_group(container.group) is False
    finally:
        container.handle.unpause()
    container.must("true")


def test_the_watchdog_thaws_after_its_deadline_and_the_freeze_says_so(freezer: Freezer) -> None:
    for deadline_s in (3.0, 1.0):
        began = time.monotonic()
        with freezer.frozen(deadline_s=deadline_s) as freeze:
            assert freeze.complete
            while freezer.is_frozen() and time.monotonic() < began + 60:
                time.sleep(0.01)
            assert deadline_s - 0.1 < time.monotonic() - began < 60
        assert freeze.complete
        assert not freeze.held
    with freezer.frozen(deadline_s=60) as freeze:
        time.sleep(1.5)
    assert freeze.held


def test_a_dead_watchdog_is_replaced_and_none_is_left(container: PlainContainer) -> None:
    before = children()
    with Freezer(container.group) as freezer:
        for _ in range(2):
            with freezer.frozen() as freeze:
                assert freeze.complete
            (watchdog,) = children() - before
            os.kill(watchdog, signal.SIGKILL)
            time.sleep(0.05)
        with freezer.frozen() as freeze:
            assert freeze.complete
            (watchdog,) = children() - before
            os.kill(watchdog, signal.SIGTERM)  # refused: only the end of the pipe ends it
        assert freeze.held
    assert children() == before


def test_the_watchdog_inherits_neither_environment_nor_descriptors(container: PlainContainer, freezer: Freezer) -> None:
    os.environ["PCHK_CANARY"] = "secret"
    before = children()
    with freezer.frozen():
        (watchdog,) = children() - before
        assert b"CANARY" not in Path(f"/proc/{watchdog}/environ").read_bytes()
        assert os.getsid(watchdog) == watchdog
        links = [os.readlink(f"/proc/{watchdog}/fd/{fd}") for fd in os.listdir(f"/proc/{watchdog}/fd")]
        assert sorted(link.split(":")[0] for link in links) == ["/dev/null", "/dev/null", "pipe"]


def test_what_a_dead_owner_froze_is_thawed_by_the_next_command(container: PlainContainer, freezer: Freezer) -> None:
    freezer._switch.write(freezer._switch.frozen_word)
    try:
        assert Freezer.thaw_group(container.group) is True
    finally:
        freezer.thaw()
    assert not freezer.is_frozen()
    container.must("true")


def test_nothing_stays_frozen_when_the_owner_is_killed_at_any_point(container: PlainContainer) -> None:
    slowest, caught = 0.0, 0
    for _ in range(20):
        child = subprocess.Popen(
            [sys.executable, "-c", FREEZER, container.group],
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(random.uniform(0.0, 0.12))
        child.kill()
        child.wait()
        child.stdout.close()
        caught += Freezer(container.group).is_frozen()
        slowest = max(slowest, wait_thawed(container.group, 5.5))
    print(f"\nkilled 20 times, {caught} seen frozen, slowest thaw {slowest * 1e3:.0f} ms")
    container.must("true")


def test_two_exec_loops_beside_200_freezes_all_succeed(container: PlainContainer, freezer: Freezer) -> None:
    stop = threading.Event()
    codes: list[int] = []

    def loop() -> None:
        while not stop.is_set():
            ended = subprocess.run(["docker", "exec", container.name, "true"], capture_output=True)
            codes.append(ended.returncode)
            if ended.returncode:
                print(ended.stdout, ended.stderr)

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    lasted, incomplete = [], 0
    try:
        for _ in range(200):
            began = time.monotonic()
            with freezer.frozen() as freeze:
                incomplete += not freeze.complete
            lasted.append((time.monotonic() - began) * 1e3)
            time.sleep(0.02)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    lasted.sort()
    print(
        f"\n{len(codes)} execs; freezes: median {lasted[100]:.1f} ms, longest {lasted[-1]:.0f}, incomplete {incomplete}"
    )
    assert set(codes) == {0}
    assert lasted[-1] < 1000
    assert incomplete <= 10
    assert not freezer.is_frozen()


def test_kill_reaches_all_of_the_group_and_nobody_else() -> None:
    with plain_container("kill") as container, Freezer(container.group) as freezer:
        container.leave_running("for i in 1 2 3 4 5; do sleep 1000 & done; while :; do sleep 0.001; done")
        time.sleep(0.3)
        bystander = subprocess.Popen(["sleep", "1000"])
        try:
            with freezer.frozen() as freeze:
                assert freeze.complete
                assert freezer.kill_all() >= 7
            until = time.monotonic() + 5
            while freezer.pids() and time.monotonic() < until:
                time.sleep(0.01)
            assert freezer.pids() == []
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()


def v2_tree() -> cgroups.Hierarchy:
    for tree in cgroups.hierarchies():
        if tree.version == 2:
            return tree
    pytest.skip("cgroup version 2 is not mounted")


def test_version_2_freezes_and_kills_too() -> None:
    """Where both versions are mounted, version 1 freezes; so version 2 is tried on a cgroup of its own."""
    tree = v2_tree()
    directory = tree.mount_point / "pchk-v2"
    (directory / "child").mkdir(parents=True)
    process = subprocess.Popen(["sleep", "1000"])
    try:
        (directory / "child" / "cgroup.procs").write_text(str(process.pid))
        with Freezer("/pchk-v2", hierarchy=tree) as freezer:
            with freezer.frozen() as freeze:
                assert freeze.complete, freeze.reason
                assert freezer.is_frozen()
            assert freeze.held
            assert not freezer.is_frozen()
            assert freezer.pids() == [process.pid]
            with freezer.frozen():
                assert freezer.kill_all() <= 1
            assert process.wait(5) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
        (directory / "child").rmdir()
        directory.rmdir()
