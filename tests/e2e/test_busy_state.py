"""State that is being changed, or held, while it is captured; and an image of many layers below it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from snapshot_drivers.base import CoverageState, Snapshot, StateKind
from snapshot_drivers.overlay import capture as capture_module
from tests.contract.overlay_subject import (
    IMAGES,
    OverlaySubject,
    assert_ci_has_engine,
    is_engine_there,
    overlay_subject,
)
from tests.e2e.deep_image import deep_image

LAYERS = 121
WRITER = """
import mmap, os, sqlite3, struct
def put(path, number):
    with open(path + '.new', 'w') as file:
        file.write(str(number))
    os.rename(path + '.new', path)
base = sqlite3.connect('/w/db', isolation_level=None)
base.execute('pragma journal_mode=wal')
base.execute('create table t(x)')
with open('/vol/map', 'wb') as file:
    file.truncate(1 << 20)
area = mmap.mmap(os.open('/vol/map', os.O_RDWR), 1 << 20)
number = 0
while True:
    number += 1
    put('/w/a', number)
    put('/vol/b', number)
    put('/tm/c', number)
    put('/dev/shm/d', number)
    base.execute('insert into t values(?)', (number,))
    struct.pack_into('q', area, 8, number)
    struct.pack_into('q', area, 900_000, number)
    if number % 3 == 0:
        open('/tm/ready', 'w').close()
"""
READER = """
import sqlite3, struct
found = [int(open(path).read()) for path in ('/w/a', '/vol/b', '/tm/c', '/dev/shm/d')]
base = sqlite3.connect('/w/db')
assert base.execute('pragma integrity_check').fetchone() == ('ok',)
count, last = base.execute('select count(*), max(x) from t').fetchone()
assert count == last
area = open('/vol/map', 'rb').read()
found += [last, *(struct.unpack_from('q', area, at)[0] for at in (8, 900_000))]
print(*found)
"""


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[OverlaySubject]:
    if not is_engine_there():
        assert_ci_has_engine()
        pytest.skip("no engine with the base image answers (deploy/setup brings one)")
    with overlay_subject(tmp_path) as made:
        yield made


def background(subject: OverlaySubject, program: str) -> None:
    """It runs from a file system that goes back, and has said that it is ready."""
    subject.sh(f"cat > /w/program.py <<'END'\n{program}\nEND")
    subject.spawn("exec setsid python3 /w/program.py >/w/log 2>&1 </dev/null")
    subject.sh(
        "i=0; until test -e /tm/ready; do sleep 0.05; i=$((i + 1)); test $i -lt 1200 || { cat /w/log; exit 1; }; done"
    )


def assert_one_moment(subject: OverlaySubject) -> int:
    """What the writer writes one after the other is there up to one point; answers which."""
    steps = [int(word) for word in subject.sh(f"python3 - <<'END'\n{READER}\nEND").split()]
    assert steps == sorted(steps, reverse=True), steps
    assert steps[0] - steps[-1] <= 1, steps
    return steps[0]


def test_a_capture_is_one_moment_of_all_that_is_being_written(subject: OverlaySubject) -> None:
    background(subject, WRITER)
    taken: list[Snapshot] = []
    for _ in range(6):
        taken.append(subject.capture(taken[-1] if taken else None))
        time.sleep(0.2)
    assert all(snapshot.coverage.complete for snapshot in taken)
    seen: dict[int, int] = {}
    for which in (3, 0, 5, 1, 4, 2, 2):
        subject.restore(taken[which], verify="difference")
        moment = assert_one_moment(subject)
        assert seen.setdefault(which, moment) == moment
    moments = [seen[which] for which in range(6)]
    assert moments == sorted(set(moments)), "the writer was not at work"


@pytest.mark.parametrize("holds_s", [(0.02, 60.0), (0.02, 0.02, 60.0)], ids=["second-short", "none-short"])
def test_a_tree_that_is_let_go_of_while_it_is_read_is_looked_at_again_and_whole(
    subject: OverlaySubject, monkeypatch: pytest.MonkeyPatch, holds_s: tuple[float, ...]
) -> None:
    monkeypatch.setattr(capture_module, "_FREEZES_S", holds_s)
    background(subject, WRITER)
    subject.sh("mkdir /w/many; cd /w/many; for i in $(seq 20); do mkdir $i; (cd $i; seq 500 | xargs touch); done")
    snapshot = subject.capture()
    assert snapshot.coverage.complete
    subject.restore(snapshot)
    assert_one_moment(subject)
    monkeypatch.setattr(capture_module, "_FREEZES_S", (0.001, 0.001))
    background(subject, WRITER.replace("create table t", "create table if not exists t"))
    snapshot = subject.capture(snapshot)
    assert [item.path for item in snapshot.coverage.items if item.state is CoverageState.UNKNOWN] == ["freeze"]


def test_a_file_without_a_name_ends_with_its_process_which_is_named(subject: OverlaySubject) -> None:
    program = (
        "import os, time\n"
        "file = open('/w/gone', 'w'); os.unlink('/w/gone'); file.write('x' * 100000); file.flush()\n"
        "open('/tm/ready', 'w').close(); time.sleep(1000)"
    )
    background(subject, program)
    snapshot, before = subject.capture(), subject.tree()
    named = [item for item in snapshot.coverage.items if item.kind is StateKind.PROCESS]
    assert any("program.py" in item.path and item.state is CoverageState.EXCLUDED for item in named)
    subject.sh("echo x > /w/gone")
    subject.restore(snapshot)
    assert subject.tree() == before


def test_files_that_may_not_be_changed_are_state_and_no_obstacle(subject: OverlaySubject) -> None:
    places = ("/w", "/vol", "/tm")
    for place in places:
        subject.sh(f"mkdir {place}/d; echo 1 > {place}/d/f; echo 1 > {place}/log")
        flag(subject, "+i", f"{place}/d/f", f"{place}/d")
        flag(subject, "+a", f"{place}/log")
    snapshot, before = subject.capture(), subject.tree()
    volume = subject.sh("cat /vol/d/f /vol/log")
    for place in places:
        flag(subject, "-ia", f"{place}/d/f", f"{place}/d", f"{place}/log")
        subject.sh(f"echo 2 > {place}/d/f; rm {place}/log; mkdir {place}/log; echo x > {place}/log/note")
        flag(subject, "+i", f"{place}/d/f", f"{place}/log/note", f"{place}/log")
    for _ in range(2):
        subject.restore(snapshot)
        assert subject.tree() == before
        assert subject.sh("cat /vol/d/f /vol/log") == volume
        for place in places:
            assert subject.sh(f"(echo 2 > {place}/d/f; rm -rf {place}/d) 2>/dev/null; cat {place}/d/f").strip() == "1"
            assert subject.sh(f"echo 2 >> {place}/log; (echo 3 > {place}/log) 2>/dev/null; cat {place}/log") == "1\n2\n"
    subject.restore(subject.capture(), verify="difference")


def flag(subject: OverlaySubject, change: str, *paths: str) -> None:
    """As a task with the right to would; the subject's container has none."""
    subprocess.run(["chattr", change, *(subject.root + path for path in paths)], check=True)


def test_a_holder_of_leases_is_captured_and_keeps_them(subject: OverlaySubject) -> None:
    program = (
        "import fcntl, os, time\n"
        "os.mkdir('/vol/leased'); kept = []\n"
        "for number in range(50):\n"
        "    file = os.open('/vol/leased/%d' % number, os.O_CREAT | os.O_RDWR); kept.append(file)\n"
        "    os.write(file, b'%d' % number); fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "open('/tm/ready', 'w').close()\n"
        "while not os.path.exists('/tm/ask'): time.sleep(0.01)\n"
        "held = sum(fcntl.fcntl(file, fcntl.F_GETLEASE) == fcntl.F_WRLCK for file in kept)\n"
        "open('/tm/answer', 'w').write(str(held)); time.sleep(1000)"
    )
    background(subject, program)
    began = time.perf_counter()
    snapshot = subject.capture()
    assert time.perf_counter() - began < 20, "a lease is waited for during 45 s"
    assert snapshot.coverage.complete
    subject.sh("touch /tm/ask; until test -s /tm/answer; do sleep 0.02; done")
    assert subject.sh("cat /tm/answer") == "50"
    subject.restore(snapshot)
    assert subject.sh("cat /vol/leased/*; ls /tm") == "".join(sorted(map(str, range(50)), key=str)) + "ready\n"


def test_an_image_of_more_layers_than_a_page_names_goes_back(tmp_path: Path) -> None:
    if not is_engine_there():
        assert_ci_has_engine()
        pytest.skip("no engine with the base image answers (deploy/setup brings one)")
    client = docker.from_env()
    with deep_image(client, IMAGES[0], LAYERS) as image, overlay_subject(tmp_path, image) as subject:
        assert len(subject.target().layer_ids) > LAYERS
        pristine = subject.capture()
        subject.sh("rm -r /layers; mkdir /layers; echo mine > /layers/1; echo changed > /newest; rm /layers/1")
        snapshot, before = subject.capture(pristine), subject.tree()
        subject.restore(pristine)
        assert subject.sh("ls /layers | wc -l; cat /newest /layers/77").split() == [str(LAYERS), str(LAYERS), "77"]
        subject.restore(snapshot)
        assert subject.tree() == before
        assert b"".join(subject.driver.read_file(pristine.snapshot_id, "/layers/5") or ()) == b"5\n"
        deleted = [change for change in subject.driver.diff(None, snapshot.snapshot_id) if change.status == "D"]
        assert len(deleted) == LAYERS
        subject.kill()
        assert subject.capture(snapshot).root_digest
        subject.start()
    client.close()
