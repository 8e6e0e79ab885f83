"""State that others lose: every case comes from a public bug report about a tool that does this job."""

from __future__ import annotations

import os
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_drivers.base import CoverageState, StateKind
from snapshot_drivers.errors import RestoreRefused
from tests.contract.overlay_subject import OverlaySubject, assert_ci_has_engine, is_engine_there, overlay_subject


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OverlaySubject]:
    if not is_engine_there():
        assert_ci_has_engine()
        pytest.skip("no engine with the base image answers (deploy/setup brings one)")
    with overlay_subject(tmp_path_factory.mktemp("overlay")) as made:
        made.pristine = made.capture()
        yield made


@pytest.fixture(autouse=True)
def clean(subject: OverlaySubject) -> None:
    subject.restore(subject.pristine, verify="difference")


def test_a_directory_deleted_and_made_again_keeps_the_images_children_hidden(subject: OverlaySubject) -> None:
    assert subject.sh("find /usr/share/perl5 -type f | wc -l").strip() != "0"
    subject.sh("rm -r /usr/share/perl5; mkdir -p /usr/share/perl5/Debconf")
    before = subject.tree()
    snapshot = subject.capture()
    subject.sh("echo later > /usr/share/perl5/x; rm -r /usr/share/perl5")
    for _ in range(2):
        subject.restore(snapshot)
        assert subject.sh("find /usr/share/perl5").split() == ["/usr/share/perl5", "/usr/share/perl5/Debconf"]
        assert subject.tree() == before
    changes = {change.path for change in subject.driver.diff(None, snapshot.snapshot_id) if change.status == "D"}
    assert any(path.startswith("/usr/share/perl5/") for path in changes), "the hidden files are named as deleted"


def test_acls_attributes_capabilities_and_setuid_bits_come_back(subject: OverlaySubject) -> None:
    subject.sh("cp /bin/true /w/bin1; echo a > /w/f; echo s > /w/s; chown 1000:1000 /w/s; chmod 6755 /w/s; mkdir /w/d")
    root = subject.root
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, perm, uid)
        for tag, perm, uid in (
            (1, 6, 0xFFFFFFFF),
            (2, 6, 1000),
            (4, 4, 0xFFFFFFFF),
            (16, 6, 0xFFFFFFFF),
            (32, 4, 0xFFFFFFFF),
        )
    )
    os.setxattr(f"{root}/w/f", "user.k", b"v\0\xff")
    os.setxattr(f"{root}/w/f", "system.posix_acl_access", acl)
    os.setxattr(f"{root}/w/d", "system.posix_acl_default", acl)
    os.setxattr(f"{root}/w/bin1", "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
    before = subject.tree()
    snapshot = subject.capture()
    subject.sh("rm -r /w; mkdir /w")
    subject.restore(snapshot)
    assert subject.tree() == before
    assert os.getxattr(f"{subject.root}/w/f", "system.posix_acl_access") == acl
    assert not [name for name in os.listxattr(f"{subject.root}/w/f") if name.startswith("trusted.overlay")]


def test_sockets_fifos_and_device_nodes_keep_their_type(subject: OverlaySubject) -> None:
    subject.python("s = socket.socket(socket.AF_UNIX); s.bind('/w/s.sock'); os.mkfifo('/w/p')")
    os.mknod(f"{subject.root}/w/n", 0o20600, os.makedev(1, 3))
    before = subject.tree()
    snapshot = subject.capture()
    subject.sh("rm /w/s.sock /w/p /w/n")
    subject.restore(snapshot)
    assert subject.tree() == before
    assert subject.sh("stat -c %F /w/s.sock /w/p /w/n").splitlines() == ["socket", "fifo", "character special file"]


def test_two_hundred_checkpoints_have_no_layer_wall(subject: OverlaySubject) -> None:
    made = {}
    for number in range(1, 201):
        subject.sh(f"echo {number} > /n")
        made[number] = subject.capture(made.get(number - 1))
    for number in (1, 60, 124, 125, 200):
        subject.restore(made[number], verify="difference")
        assert subject.sh("cat /n").strip() == str(number)


def test_a_restored_container_does_not_show_what_the_kernel_had_cached(subject: OverlaySubject) -> None:
    subject.sh("echo v1 > /z; mkdir /wd; echo A > /wd/f")
    snapshot = subject.capture()
    subject.sh("echo v2 > /z; cat /z; echo B > /wd/f; echo n > /new; ls -l /")
    subject.restore(snapshot, verify="difference")
    assert subject.sh("cat /z /wd/f; ls /new 2>&1; touch /wd/g && ls /wd").split()[:2] == ["v1", "A"]
    assert subject.sh("ls /wd").split() == ["f", "g"]
    assert "No such file" in subject.sh("ls /new 2>&1 || true")


def test_volumes_tmpfs_shared_memory_and_the_engines_etc_files_go_back(subject: OverlaySubject) -> None:
    places = ("/vol/f", "/tm/f", "/dev/shm/f", "/dev/f", "/w/f")
    for place in places:
        subject.sh(f"echo 1 > {place}")
    subject.sh("echo '9.9.9.9 one' >> /etc/hosts; echo box > /etc/hostname; mkdir /tm/d; ln /tm/f /tm/d/hard")
    snapshot, before = subject.capture(), subject.tree()
    for place in places:
        subject.sh(f"echo 2 > {place}; echo x > {place}.more")
    subject.sh("rm /dev/stderr; mkdir /dev/notes; echo remember > /dev/notes/me")
    subject.sh("echo '8.8.8.8 note-to-self' >> /etc/hosts; chmod 600 /etc/hostname; rm -r /tm/d")
    subject.restore(snapshot)
    for place in places:
        assert subject.sh(f"cat {place}").strip() == "1"
    assert "note-to-self" not in subject.sh("cat /etc/hosts")
    assert "9.9.9.9 one" in subject.sh("cat /etc/hosts")
    assert subject.tree() == before
    kinds = {(item.kind, item.path): item.state for item in snapshot.coverage.items}
    for kind, path in (("volume", "/vol"), ("tmpfs", "/tm"), ("tmpfs", "/dev/shm"), ("etc", "/etc/hosts")):
        assert kinds[(StateKind(kind), path)] is CoverageState.CAPTURED


def test_a_mapped_write_that_moves_no_timestamp_is_captured(subject: OverlaySubject) -> None:
    subject.sh("head -c 8192 /dev/zero | tr '\\0' a > /w/m; cp /w/m /vol/m")
    code = (
        "import mmap, time, os\n"
        "maps = [mmap.mmap(os.open(p, os.O_RDWR), 8192) for p in ('/w/m', '/vol/m')]\n"
        "for m in maps: m[0:1] = b'b'\n"
        "while not os.path.exists('/tm/go'): time.sleep(0.01)\n"
        "for m in maps: m[1:2] = b'c'\n"
        "open('/tm/done', 'w').close()\n"
        "time.sleep(100)"
    )
    subject.spawn(f'exec setsid python3 -c "{code}" >/dev/null 2>&1 </dev/null')
    time.sleep(0.3)
    first = subject.capture()
    subject.sh("touch /tm/go; until test -e /tm/done; do sleep 0.02; done")
    second = subject.capture(first)
    for snapshot, wanted in ((first, "baaa"), (second, "bcaa"), (first, "baaa")):
        subject.restore(snapshot)
        assert subject.sh("head -c 4 /w/m; head -c 4 /vol/m") == wanted * 2


def test_a_database_with_a_write_ahead_log_is_whole_after_a_restore(subject: OverlaySubject) -> None:
    script = (
        "import sqlite3, time, os\n"
        "c = sqlite3.connect('/w/db', isolation_level=None)\n"
        "c.execute('pragma journal_mode=wal'); c.execute('pragma wal_autocheckpoint=0')\n"
        "c.execute('create table t(x)')\n"
        "def add(n):\n"
        "    for i in range(n): c.execute('insert into t values(1)')\n"
        "add(100); open('/tm/ready', 'w').close()\n"
        "while not os.path.exists('/tm/go'): time.sleep(0.01)\n"
        "add(300); c.execute('pragma wal_checkpoint(truncate)'); add(50)\n"
        "open('/tm/done', 'w').close(); time.sleep(100)\n"
    )
    subject.sh(f"cat > /w/p.py <<'END'\n{script}END")
    subject.spawn("exec setsid python3 /w/p.py >/w/log 2>&1 </dev/null")
    subject.sh("until test -e /tm/ready; do sleep 0.02; done")
    snapshot = subject.capture()
    subject.sh("touch /tm/go; until test -e /tm/done; do sleep 0.02; done")
    for _ in range(2):
        subject.restore(snapshot)
        check = "import sqlite3; c = sqlite3.connect('/w/db'); print(*c.execute('select count(*) from t').fetchone(), "
        assert subject.sh(f"python3 -c \"{check}*c.execute('pragma integrity_check').fetchone())\"").split() == [
            "100",
            "ok",
        ]


def test_processes_do_not_outlive_a_restore_of_files_and_are_named(subject: OverlaySubject) -> None:
    subject.spawn("exec setsid python3 -m http.server 8000 >/dev/null 2>&1 </dev/null")
    snapshot = subject.capture()
    named = [item for item in snapshot.coverage.items if item.kind is StateKind.PROCESS]
    assert any("http.server" in item.path and item.state is CoverageState.EXCLUDED for item in named)
    subject.spawn("exec setsid sh -c 'while :; do date >> /tick; sleep 0.05; done' >/dev/null 2>&1 </dev/null")
    subject.restore(snapshot, verify="difference")
    time.sleep(0.3)
    assert subject.sh("ls /tick 2>/dev/null | wc -l").strip() == "0"
    subject.python(
        "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('127.0.0.1', 8000))"
    )


def test_a_stopped_container_is_captured_by_its_files_and_says_so(subject: OverlaySubject) -> None:
    subject.sh("echo 1 > /w/f; echo 1 > /dev/shm/f")
    subject.kill()
    snapshot = subject.capture()
    missing = {item.path for item in snapshot.coverage.items if item.state is CoverageState.MISSING}
    assert missing == {"/dev", "/dev/shm", "/tm"}
    assert not snapshot.coverage.complete
    subject.start()
    subject.sh("echo 2 > /w/f")
    subject.restore(subject.pristine)


def test_a_tool_call_during_a_capture_waits_and_a_paused_container_stays_paused(subject: OverlaySubject) -> None:
    subject.sh("head -c 400M /dev/zero | tr '\\0' x > /blob")
    done = threading.Event()
    results: list[tuple[int, bytes]] = []

    def call() -> None:
        while not done.is_set():
            results.append(subject.container.exec_run(["echo", "hi"]))

    caller = threading.Thread(target=call)
    caller.start()
    subject.capture()
    done.set()
    caller.join()
    assert results
    assert set(results) == {(0, b"hi\n")}
    subject.container.pause()
    subject.capture()
    subject.container.reload()
    assert subject.container.status == "paused"
    subject.container.unpause()


def test_a_shell_edit_anywhere_is_taken_back_and_the_host_is_untouched(subject: OverlaySubject) -> None:
    subject.sh(
        "mkdir -p /w/out; cd /w; printf 'out/\\n.env\\n' > .gitignore; echo 1 > .env; echo 1 > out/old; echo 1 > t"
    )
    snapshot, before = subject.capture(), subject.tree()
    subject.sh(
        "cd /w; echo 2 > t; echo 2 > .env; echo x >> /etc/motd; echo x > /usr/local/bin/t; mkdir -p /opt/x; rm out/old"
    )
    subject.sh(
        "dpkg --purge --force-all procps >/dev/null 2>&1; echo x > out/new; echo 'passwd: nothing' > /etc/nsswitch.conf"
    )
    subject.restore(snapshot)
    assert subject.tree() == before


def test_a_mount_whose_way_became_a_link_is_not_restored_onto(subject: OverlaySubject) -> None:
    subject.sh("mkdir /w/x; echo 1 > /w/x/f")
    snapshot = subject.capture()
    forged = subject.driver._manifests.read(snapshot.snapshot_id)  # type: ignore[attr-defined]
    subject.kill()
    (subject.upper / "vol").rename(subject.upper / "vol-moved")
    (subject.upper / "vol").symlink_to("/etc")
    bad = subject.capture()
    (subject.upper / "vol").unlink()
    (subject.upper / "vol-moved").rename(subject.upper / "vol")
    subject.start()
    assert forged.snapshot == snapshot
    with pytest.raises(RestoreRefused, match="vol"):
        subject.driver.stage(subject.target(), bad.snapshot_id, subject.options)


def test_a_chain_of_captures_and_restores_loses_nothing(subject: OverlaySubject) -> None:
    subject.sh("touch /f1")
    a = subject.capture()
    subject.restore(a, verify="difference")
    subject.sh("touch /f2")
    b = subject.capture(a)
    subject.restore(b, verify="difference")
    subject.sh("touch /f3")
    d = subject.capture(b)
    for snapshot, names in ((d, ["/f1", "/f2", "/f3"]), (b, ["/f1", "/f2"]), (a, ["/f1"])):
        subject.restore(snapshot, verify="difference")
        assert subject.sh("ls /f?").split() == names


def test_fifty_small_changes_beside_a_large_file_cost_their_own_size(subject: OverlaySubject) -> None:
    subject.sh("head -c 200M /dev/urandom > /big")
    previous = subject.capture()
    stored = 0
    for number in range(20):
        subject.sh(
            f"head -c 1024 /dev/urandom > /w/small; printf {number} | dd of=/big bs=1 seek=1000000 conv=notrunc 2>&1"
        )
        previous = subject.capture(previous)
        stored += previous.stored_bytes
    assert stored < 20 * (2 << 20)


def test_no_helper_socket_or_descriptor_is_left_behind(subject: OverlaySubject) -> None:
    def state() -> tuple[int, int]:
        children = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout.split()
        return len(os.listdir("/proc/self/fd")), len(children)

    subject.restore(subject.capture(), verify="difference")
    before = state()
    for _ in range(5):
        subject.restore(subject.capture(), verify="difference")
    after = state()
    assert after[0] <= before[0] + 8  # packs stay open for reading, a bounded number of them
    assert after[1] == before[1]
    assert not list(Path(subject.upper.parent).glob(".orchestrator*"))
