"""A hostile container against the overlay driver: what root in it can do must reach neither the host nor the store.

The environment variable ``HOSTILE_PROFILE=long`` makes the race 60 s long and the swarms ten times larger.
"""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshot_drivers.base import CaptureOptions, CoverageState
from snapshot_drivers.errors import LimitExceeded, RestoreError, SnapshotError
from tests.contract.overlay_subject import OverlaySubject, assert_ci_has_engine, is_engine_there, overlay_subject

IS_LONG = os.environ.get("HOSTILE_PROFILE") == "long"
RACE_S = 60 if IS_LONG else 8
SWARM = 200_000 if IS_LONG else 20_000
MOST_KB = 500 * 1024
CANARY = "canary-of-the-host-7f3a"
DEEP = "os.chdir('{place}')\nfor _ in range({levels}):\n    os.mkdir('{name}'); os.chdir('{name}')\n{last}"


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[OverlaySubject]:
    if not is_engine_there():
        assert_ci_has_engine()
        pytest.skip("no engine with the base image answers (deploy/setup brings one)")
    with overlay_subject(tmp_path) as made:
        yield made


@pytest.fixture
def peak_growth_kb() -> Callable[[], int]:
    """How far the memory of this process has risen since the test began, at its highest: others ran in it before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, proc_pid_clear_refs(5)
    before = _memory_kb("VmRSS")
    return lambda: _memory_kb("VmHWM") - before


def _memory_kb(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def stored(subject: OverlaySubject) -> bytes:
    return b"".join(path.read_bytes() for path in (subject.directory / "store").rglob("*") if path.is_file())


def test_swapping_directories_and_links_during_captures_and_restores_never_leads_to_the_host(
    subject: OverlaySubject, tmp_path: Path
) -> None:
    canary = tmp_path / "host"
    canary.mkdir()
    (canary / "secret").write_text(CANARY)
    before = sorted(os.listdir(canary))
    swapper = (
        "import os\n"
        "for base in ('/w', '/vol', '/tm'):\n"
        "    os.makedirs(base + '/d', exist_ok=True); open(base + '/d/secret', 'w').write('mine')\n"
        f"    os.symlink('{canary}', base + '/l')\n"
        "while True:\n"
        "    for base in ('/w', '/vol', '/tm'):\n"
        "        for old, new in ('dx', 'ld', 'xl'):\n"
        "            os.rename(base + '/' + old, base + '/' + new)"
    )
    volume = subject.client.containers.run(
        "orchestrator-base:latest",
        ["python3", "-c", swapper.replace("('/w', '/vol', '/tm')", "('/vol',)").replace("/vol/", "/vol/other/")],
        name=f"{subject.name}-other",
        detach=True,
        network_mode="none",
        volumes={subject.name: {"bind": "/vol", "mode": "rw"}},
    )
    try:
        subject.sh(f"cat > /swap.py <<'END'\n{swapper}\nEND")
        subject.spawn("exec setsid python3 /swap.py >/dev/null 2>&1 </dev/null")
        first = subject.capture()
        deadline = time.monotonic() + RACE_S
        rounds = 0
        while time.monotonic() < deadline:
            subject.capture(first)
            if rounds % 5 == 0:
                staged = subject.driver.stage(subject.target(), first.snapshot_id, subject.options)
                try:
                    staged.apply()
                except RestoreError:
                    pass  # the other container writes to the volume: refusing is right, following a link is not
                finally:
                    staged.discard()
                if subject.target().init_pid is None:
                    subject.start()
                subject.spawn("exec setsid python3 /swap.py >/dev/null 2>&1 </dev/null")
            rounds += 1
        assert rounds > 2
    finally:
        volume.remove(force=True, v=True)
    assert CANARY.encode() not in stored(subject)
    assert sorted(os.listdir(canary)) == before
    assert (canary / "secret").read_text() == CANARY


def test_twenty_thousand_levels_are_captured_restored_and_removed(
    subject: OverlaySubject, peak_growth_kb: Callable[[], int]
) -> None:
    name = "n" * 200
    subject.python(DEEP.format(place="/w", levels=19_990, name=name, last="open('bottom', 'w').write('here')"))
    began = time.perf_counter()
    snapshot = subject.capture()
    assert time.perf_counter() - began < 30
    assert snapshot.entries > 19_990
    assert snapshot.coverage.complete
    subject.kill()
    subprocess.run(["rm", "-rf", str(subject.upper / "w")], check=True)
    subject.start()
    subject.restore(snapshot, verify="full")
    again = subject.capture(snapshot)
    assert again.root_digest == snapshot.root_digest
    assert peak_growth_kb() < MOST_KB


def test_a_file_of_the_largest_size_and_a_swarm_of_attributes_end_in_a_word(subject: OverlaySubject) -> None:
    subject.sh("truncate -s 16T /w/huge 2>/dev/null || truncate -s 8T /w/huge")
    subject.sh("truncate -s 9223372036854771712 /dev/shm/huge")
    began = time.perf_counter()
    snapshot = subject.capture()
    assert time.perf_counter() - began < 10
    subject.restore(snapshot, verify="difference")
    assert subject.sh("stat -c %s /dev/shm/huge").strip() == "9223372036854771712"
    subject.sh("rm /dev/shm/huge /w/huge; touch /w/x")
    subject.python("for i in range(20): os.setxattr('/w/x', 'user.%d' % i, b'v' * 100)")
    subject.options = CaptureOptions(max_xattr_bytes=1000)
    with pytest.raises(LimitExceeded, match="attributes"):
        subject.capture(snapshot)


def test_a_swarm_of_hardlinks_and_files_stays_within_memory(
    subject: OverlaySubject, peak_growth_kb: Callable[[], int]
) -> None:
    subject.python(
        "open('/w/f', 'w').write('x')\n"
        "for i in range(20000): os.link('/w/f', '/w/l%d' % i)\n"
        "os.mkdir('/w/many')\n"
        f"for i in range({SWARM}): open('/w/many/%d' % i, 'w').close()\n"
        "os.mkdir('/w/marked')\n"
        f"for i in range({SWARM // 10}):\n"
        "    open('/w/marked/%d' % i, 'w').close()\n"
        "    for j in range(10): os.setxattr('/w/marked/%d' % i, 'user.%d' % j, b'%d' % i * 20)\n"
    )
    began = time.perf_counter()
    snapshot = subject.capture()
    assert time.perf_counter() - began < (300 if IS_LONG else 60)
    assert snapshot.coverage.complete
    assert snapshot.stored_bytes < SWARM * 1000
    subject.sh("rm -rf /w/many /w/l1* /w/marked/1*")
    subject.restore(snapshot, verify="full")
    assert subject.sh("stat -c %h /w/f").strip() == "20001"
    assert subject.sh("ls /w/many | wc -l; ls /w/marked | wc -l").split() == [str(SWARM), str(SWARM // 10)]
    assert peak_growth_kb() < MOST_KB * (4 if IS_LONG else 1)


def test_too_deep_a_tree_fails_with_that_word_and_the_container_is_not_left_frozen(subject: OverlaySubject) -> None:
    subject.options = CaptureOptions(max_depth=50)
    subject.python(DEEP.format(place="/w", levels=100, name="d", last=""))
    with pytest.raises(LimitExceeded, match="levels"):
        subject.capture()
    assert subject.sh("echo alive").strip() == "alive"
    assert not list((subject.directory / "store/packs").glob("*"))
    assert not list((subject.directory / "store/manifests").glob("*"))


def test_fifos_devices_and_leases_are_never_waited_for(subject: OverlaySubject) -> None:
    root = subject.root
    subject.sh("mkfifo /w/p /tm/p; mkdir /vol/leased")
    os.mknod(f"{root}/w/block", 0o600 | stat.S_IFBLK, os.makedev(7, 0))
    os.mknod(f"{root}/w/char", 0o600 | stat.S_IFCHR, os.makedev(10, 130))
    holder = (
        "import fcntl, os, time\n"
        "kept = []\n"
        "for i in range(50):\n"
        "    f = os.open('/vol/leased/%d' % i, os.O_CREAT | os.O_RDWR); kept.append(f); os.write(f, b'x')\n"
        "    fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "open('/tm/ready', 'w').close(); time.sleep(60)"
    )
    subject.sh(f"cat > /lease.py <<'END'\n{holder}\nEND")
    subject.spawn("exec setsid python3 /lease.py >/dev/null 2>&1 </dev/null")
    subject.sh("until test -e /tm/ready; do sleep 0.02; done")
    began = time.perf_counter()
    snapshot = subject.capture()
    assert time.perf_counter() - began < 5
    assert [item for item in snapshot.coverage.items if item.state is CoverageState.MISSING] == []
    assert subject.sh("ls /vol/leased | wc -l").strip() == "50"
    subject.sh("rm -r /vol/leased")
    subject.restore(snapshot)
    assert subject.sh("cat /vol/leased/* | wc -c").strip() == "50"


def test_the_store_keeps_neither_inodes_nor_rights_of_the_container(subject: OverlaySubject) -> None:
    subject.sh("cp /bin/true /w/suid; chmod 6755 /w/suid; for i in 1 2 3; do echo $i > /w/f$i; done")
    os.setxattr(f"{subject.root}/w/suid", "user.overlay.opaque", b"y")
    snapshot, before = subject.capture(), subject.tree()
    subject.sh("for f in /w/f1 /w/f2 /w/f3 /w/suid; do echo overwritten > $f; done")
    subject.reopen()
    subject.restore(snapshot)
    assert subject.tree() == before
    for path in (subject.directory / "store").rglob("*"):
        mode = path.lstat().st_mode
        assert stat.S_ISDIR(mode) or stat.S_ISREG(mode)
        assert mode & 0o7077 == 0, f"{path} {mode:o}"


def test_attributes_that_look_like_overlays_own_do_not_fool_the_driver(subject: OverlaySubject) -> None:
    subject.sh("mkdir -p /usr/share/perl5")
    subject.sh("touch /usr/share/perl5/new")
    os.setxattr(f"{subject.root}/usr/share/perl5", "user.overlay.opaque", b"y")
    listed = subject.sh("ls -A /usr/share/perl5")
    snapshot = subject.capture()
    subject.sh("rm -rf /usr/share/perl5")
    subject.restore(snapshot)
    assert subject.sh("ls -A /usr/share/perl5") == listed
    deleted = [change for change in subject.driver.diff(None, snapshot.snapshot_id) if change.status == "D"]
    assert deleted == []


def test_the_agents_root_cannot_touch_the_holder_init(subject: OverlaySubject, tmp_path: Path) -> None:
    source = tmp_path / "attach.c"
    source.write_text(
        "#include <sys/ptrace.h>\n#include <stdio.h>\n#include <errno.h>\n#include <unistd.h>\n"
        "int main(int c, char **v) { char b[64]; if (c > 1 && (setgid(65533) || setuid(65533))) return 1;"
        "long r = ptrace(PTRACE_ATTACH, 1, 0, 0); int e = errno;"
        'printf("%ld %d %ld\\n", r, e, (long)readlink("/proc/1/root", b, 64)); return 0; }\n'
    )
    binary = tmp_path / "attach"
    subprocess.run(["gcc", "-static", "-o", str(binary), str(source)], check=True)
    (subject.upper / "attach").write_bytes(binary.read_bytes())
    (subject.upper / "attach").chmod(0o755)
    subject.restore(subject.capture(), verify="difference")
    for attempt in ("/attach", "/attach as its own user"):
        assert subject.sh(attempt).split() == ["-1", "1", "-1"]
    subject.restore(subject.capture())


def test_a_hidden_mount_of_memory_is_missing_never_replaced_by_something_else(subject: OverlaySubject) -> None:
    subject.sh("echo 1 > /tm/f")
    snapshot = subject.capture()
    subject.restore(snapshot, verify="difference")
    assert subject.sh("cat /tm/f").strip() == "1"
    with pytest.raises(SnapshotError):
        subject.driver.stage(subject.target(), "s-" + "v" * 26, subject.options)
