"""A hidden check beside a hostile container: it is neither read, nor forged, nor helped to more rights, nor felt."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from orchestrator.checks import CheckResult
from snapshot_drivers.freezer import Freezer
from snapshot_drivers.overlay.layers import find_layers
from snapshot_drivers.view import SCRIPT_BYTES, run_in_view
from tests.e2e.plain_container import REPOSITORY, PlainContainer, engine, plain_container
from tests.e2e.probe.conftest import CANARY, Check, checker, said, tree, view


def test_the_exit_code_is_the_verdict(check: Check) -> None:
    assert check("true") == CheckResult(satisfied=True, exit_code=0)
    assert check("echo out; echo err >&2; exit 3") == CheckResult(False, 3, b"out\nerr\n")
    assert check("kill -9 $$") == CheckResult(False, 137)
    assert check("no-such-tool 2>/dev/null") == CheckResult(False, 127)


def test_it_reads_the_live_tree_with_its_mounts(container: PlainContainer, check: Check) -> None:
    container.must("echo live > /root/file; echo mounted > /fast/file; chmod 600 /root/file; chown 1234 /root/file")
    assert said(check("cat /target/root/file /target/fast/file")) == "live\nmounted\n"
    assert check("test -e /root/file").exit_code == 1


def test_its_environment_and_descriptors_are_clean(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    lines = said(check("env -u PWD -u _ -u OLDPWD -u SHLVL; echo; ls /proc/self/fd; umask; pwd")).split("\n\n")
    names = {line.partition("=")[0] for line in lines[0].splitlines()}
    assert names == {"PATH", "HOME", "LANG", "TARGET"}
    assert lines[1].split() == ["0", "1", "2", "3", "0022", "/"]  # 3: ls reads the directory


def test_it_reaches_a_server_on_the_containers_loopback(container: PlainContainer, check: Check) -> None:
    server = (
        "import socket\ns = socket.socket()\ns.setsockopt(1, 2, 1)\ns.bind(('127.0.0.1', 8099))\ns.listen(9)\n"
        "while True:\n  c, _ = s.accept()\n  c.sendall(b'served')\n  c.close()\n"
    )
    container.must(f"cat > /root/server.py <<'END'\n{server}END")
    container.leave_running("python3 /root/server.py")
    client = "import socket; s = socket.create_connection(('localhost', 8099), 2); print(s.recv(9).decode())"
    until = time.monotonic() + 10
    while (result := check(f'python3 -c "{client}"')).exit_code and time.monotonic() < until:
        time.sleep(0.1)
    assert said(result) == "served\n"


def test_links_of_the_container_are_resolved_below_target(container: PlainContainer, check: Check) -> None:
    container.must(
        "mkdir -p /d/e && echo x > /d/e/real && ln -s /d/e/real /d/absolute && ln -s e/real /d/relative && "
        "ln -s /d/absolute /d/twice && ln -s /../../../d/e /d/up && ln -s loop /d/loop && ln -s ../../../.. /d/e/out"
    )
    for name in (
        "e/real",
        "absolute",
        "relative",
        "twice",
        "up/real",
        "e/../e/./real",
        "e/out/d//e/real",
        "e/out/../d/e/real",
    ):
        assert said(check(f'target-path "/d/{name}"; cat "$(target-path /d/{name})"')) == "/target/d/e/real\nx\n", name
    assert check("target-path /d/loop").exit_code == 1
    assert check("target-path /d/nothing").exit_code == 1
    assert check("target-path /d/e/real/below").exit_code == 1
    assert said(check("target-path /")) == "/target\n"
    assert check(f"target-path /{'x/' * 3000}").exit_code == 1


# What it cannot do.


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("echo x > /target/root/new", "Read-only"),
        ("rm /target/etc/passwd", "Read-only"),
        ("chmod 777 /target/etc/passwd", "Read-only"),
        ("touch /target/fast/new", "Read-only"),
        ("/target/usr/bin/true", "Permission denied"),
        ("/target/usr/bin/dash -c true", "Permission denied"),
        ("cat /target/proc/1/root/etc/passwd", "symbolic links"),
        ("mknod /tmp/n b 7 0", "not permitted"),
        ("mknod /tmp/n c 1 3", "not permitted"),
        ("mount -t tmpfs none /mnt", "denied"),
        ("umount /target", "denied|permitted|superuser"),
        ("unshare -U true", "not permitted"),
        ("unshare -m true", "not permitted"),
        ("nsenter -t 1 -m true", "not permitted|denied"),
        ("chroot /target true", "not permitted"),
        ("hostname other", "must be root|not found"),
        ("echo '|/x' > /proc/sys/kernel/core_pattern", "Read-only"),
        ("echo b > /proc/sysrq-trigger", "Read-only|nonexistent"),
        ("dmesg", "not permitted|not found"),
        ("head -c 1 /dev/mem", "No such file"),
    ],
)
def test_it_has_no_way_out_or_into_the_container(check: Check, command: str, complaint: str) -> None:
    result = check(f"{command} 2>&1")
    assert result.exit_code not in (0, None), said(result)
    assert any(word in said(result) for word in complaint.split("|")), said(result)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("ptrace", "101, 16, 1, 0, 0"),
        ("bpf", "321, 0, 0, 0"),
        ("keyctl", "250, 1, 0"),
        ("open_by_handle_at", "304, -100, 0, 0"),
        ("perf_event_open", "298, 0, 0, -1, -1, 0"),
        ("userfaultfd", "323, 0"),
        ("io_uring_setup", "425, 1, 0"),
        ("init_module", "175, 0, 0, 0"),
        ("kexec_load", "246, 0, 0, 0, 0"),
        ("setns", "308, 0, 0"),
        ("open_tree", "428, -100, 0, 1"),
        ("clone with CLONE_NEWUSER", "56, 0x10000011, 0, 0, 0, 0"),
        ("socket AF_VSOCK", "41, 40, 1, 0"),
        ("pidfd_getfd", "438, 0, 0, 0"),
    ],
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="call numbers of x86_64")
def test_calls_that_reach_the_kernel_or_others_are_denied(check: Check, name: str, call: str) -> None:
    assert said(check(f"perl -e 'print syscall({call}), \" \", $! + 0'")) == "-1 1"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="call numbers of x86_64")
def test_calls_of_another_architecture_kill(check: Check) -> None:
    assert check("perl -e 'syscall(0x40000000 + 39)'").exit_code == 128 + 31


def test_its_rights_are_fewer_than_an_execs(container: PlainContainer, check: Check) -> None:
    def fields(text: str) -> dict[str, int]:
        pairs = (line.split(":") for line in text.splitlines() if line.startswith(("Cap", "NoNewPrivs", "Seccomp:")))
        return {key: int(value, 16) for key, value in pairs}

    ours, theirs = fields(said(check("cat /proc/self/status"))), fields(container.must("cat /proc/self/status"))
    allowed = sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 10))
    assert ours["CapBnd"] == ours["CapEff"] == ours["CapPrm"] == allowed
    assert ours["CapBnd"] & ~theirs["CapBnd"] == 0
    assert ours["CapInh"] == ours["CapAmb"] == 0
    assert (ours["NoNewPrivs"], ours["Seccomp"]) == (1, 2)


@pytest.mark.usefixtures("limits")
def test_it_stands_under_the_containers_limits(container: PlainContainer, check: Check) -> None:
    groups = said(check("cat /proc/self/cgroup")).splitlines()
    inside = [line for line in groups if container.container_id in line]
    wanted = ("devices", "pids", "memory") if len(groups) > 1 else ("",)
    assert all(any(f":{name}:" in line or not name for line in inside) for name in wanted), groups


# The agent reads, forges, and disturbs.


def test_the_time_limit_ends_everything_that_a_check_started(container: PlainContainer, check: Check) -> None:
    began = time.monotonic()
    result = check("trap '' TERM INT HUP; (setsid sleep 98761 &); sleep 98762 & echo said; sleep 98763", timeout_s=0.5)
    assert result == CheckResult(satisfied=False, output=b"said\n", timed_out=True)
    assert time.monotonic() - began < 3
    assert running(b"9876") == []


def test_what_a_check_leaves_running_is_gone_with_it(check: Check) -> None:
    assert check("(setsid sleep 98771 &); exit 0").satisfied
    assert running(b"98771") == []


def running(part: bytes) -> list[bytes]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes()
        except OSError:
            continue
        if text.startswith(b"sleep\0") and part in text:
            found.append(text)
    return found


def test_a_check_dies_with_the_orchestrator(container: PlainContainer, helper: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from types import SimpleNamespace as N\n"
        "from snapshot_drivers.view import run_in_view\n"
        "target = N(init_pid=int(sys.argv[1]), container_id=sys.argv[2], freeze_group=sys.argv[3])\n"
        "run_in_view(target, 'sleep 98781', layers=[Path(p) for p in sys.argv[5:]], helper=Path(sys.argv[4]))\n"
    )
    layers = find_layers(container.target()).lower
    arguments = [str(container.init_pid), container.container_id, container.group, str(helper), *map(str, layers)]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    )
    until = time.monotonic() + 20
    while not running(b"98781") and time.monotonic() < until:
        time.sleep(0.02)
    assert running(b"98781")
    child.kill()
    child.wait()
    until = time.monotonic() + 5
    while running(b"98781") and time.monotonic() < until:
        time.sleep(0.02)
    assert running(b"98781") == []


def test_endless_output_is_cut_and_does_not_stop_the_check(container: PlainContainer, helper: Path) -> None:
    outcome = view(container, helper, "head -c 50M /dev/zero; exit 4", output_limit_bytes=1000)
    assert (outcome.exit_code, len(outcome.output), outcome.truncated_bytes) == (4, 1000, 50 * 2**20 - 1000)


def test_the_container_is_left_as_it_was(container: PlainContainer, check: Check) -> None:
    members = sorted(Freezer(container.group).pids())
    before, descriptors = tree(container), os.listdir("/proc/self/fd")
    mounts = Path("/proc/self/mountinfo").read_bytes()
    for _ in range(3):
        assert check(
            "find /target -xdev -type f -newer /target/etc/passwd > /tmp/list; touch /etc/passwd /root/x"
        ).satisfied
    assert tree(container) == before
    assert sorted(Freezer(container.group).pids()) == members
    assert os.listdir("/proc/self/fd") == descriptors
    assert Path("/proc/self/mountinfo").read_bytes() == mounts


def test_more_layers_than_a_page_of_names(container: PlainContainer, helper: Path, tmp_path: Path) -> None:
    above = []
    for number in range(200):
        directory = tmp_path / f"{number:03}-{'long' * 20}"
        directory.mkdir()
        (directory / f"layer-{number}").touch()
        above.append(directory)
    assert sum(len(str(path)) for path in above) > 3 * 4096
    outcome = view(container, helper, "ls -d /layer-* | wc -l", above=above)
    assert (outcome.exit_code, outcome.output) == (0, b"200\n")


def test_scripts_of_any_length_and_bytes(container: PlainContainer, helper: Path) -> None:
    longest = "echo 'ä\udcff'; #" + "x" * (SCRIPT_BYTES - 16)
    assert len(longest.encode("utf-8", "surrogateescape")) <= SCRIPT_BYTES
    assert view(container, helper, longest).output == "ä".encode() + b"\xff\n"
    for wrong in ("x" * (SCRIPT_BYTES + 1), "echo \0"):
        with pytest.raises(ValueError, match="at most"):
            view(container, helper, wrong)


def test_failures_of_our_own_are_errors_and_never_verdicts(
    container: PlainContainer, helper: Path, tmp_path: Path
) -> None:
    missing = checker(container, tmp_path / "enter")("true")
    assert "cannot read the helper" in str(missing.error)
    assert not missing.satisfied
    assert "MAX" not in str(checker(container, helper)("echo \0").error)
    with plain_container("gone") as gone:
        target = gone.target()
        gone.handle.kill()
        with pytest.raises(Exception, match=r"is gone|does not belong"):
            run_in_view(target, "true", layers=[tmp_path], helper=helper)


def test_an_image_without_a_shell_is_an_error(helper: Path) -> None:
    client, tag = engine(), "pchk-no-shell:latest"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("nothing"), io.BytesIO())
    (tmp := Path(str(helper) + ".tar")).write_bytes(packed.getvalue())
    client.api.import_image_from_file(str(tmp), repository="pchk-no-shell", tag="latest")
    try:
        with plain_container("noshell", image=tag) as container:
            result = checker(container, helper)("true")
            assert "cannot run the image's /bin/sh" in str(result.error)
    finally:
        client.images.remove(tag)


def test_latency(container: PlainContainer, helper: Path) -> None:
    times = sorted(view(container, helper, "true").duration_ms for _ in range(30))
    print(f"\nprobe: median {times[15]:.1f} ms, fastest {times[0]:.1f}, slowest {times[-1]:.1f}")
    assert times[15] < 250
