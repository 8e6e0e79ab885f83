"""A hostile container neither sees, forges nor feels a check."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.checks import CheckResult
from snapshot_drivers.freezer import Freezer
from tests.e2e.plain_container import PlainContainer, plain_container
from tests.e2e.probe.conftest import CANARY, Check, checker, said, tree

READER = """
my $canary = 'CAN' . 'ARY-4d1f';
open my $hits, '>>', '/dev/shm/hits'; $hits->autoflush(1); print $hits "reading\\n";
while (! -e '/root/stop') {
  my @of_processes = glob('/proc/[0-9]*/cmdline /proc/[0-9]*/environ /proc/[0-9]*/maps');
  for my $file (@of_processes, glob('/dev/shm/* /tmp/* /run/* /proc/net/unix')) {
    next if $file eq "/proc/$$/cmdline";
    open my $h, '<', $file or next; local $/; my $text = <$h> // '';
    print $hits "$file\\n" if index($text, $canary) >= 0;
  }
}
print $hits "stopped\\n";
"""

TROJAN = """#!/usr/bin/perl
open my $log, '>>', '/dev/shm/stolen'; print $log "@ARGV\\n"; print $log <STDIN> unless -t STDIN; exit 0;
"""

PRELOAD = r"""
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void trap(void)
{
	char text[4096];
	int from = open("/proc/self/cmdline", O_RDONLY), to = open("/dev/shm/stolen", O_WRONLY | O_CREAT | O_APPEND, 0666);
	ssize_t length = read(from, text, sizeof text);
	if (length > 0)
		write(to, text, length);
	close(from);
	close(to);
}
"""


def put(container: PlainContainer, path: str, content: bytes, mode: int) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo(path.lstrip("/"))
        entry.size, entry.mode = len(content), mode
        archive.addfile(entry, io.BytesIO(content))
    container.handle.put_archive("/", packed.getvalue())


def perl(container: PlainContainer, code: str) -> str:
    ended = container.handle.exec_run(["/usr/bin/perl", "-e", code], user="root")
    assert ended.exit_code == 0, ended.output
    return str(ended.output.decode(errors="replace"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainContainer]:
    work = tmp_path_factory.mktemp("trap")
    (work / "trap.c").write_text(PRELOAD)
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", work / "trap.so", work / "trap.c"], check=True)
    with plain_container("hostile") as container:
        container.must("mkdir /srv/app; echo wrong > /srv/app/answer; cp /usr/bin/perl /root/perl")
        put(container, "/trap.so", (work / "trap.so").read_bytes(), 0o755)
        for name in ("dash", "bash", "grep", "cat", "python3"):
            path = container.must(f"readlink -f $(command -v {name})").strip()
            perl(container, f"rename '{path}', '{path}.kept'")
            put(container, path, TROJAN.encode(), 0o755)
            if name == "dash":
                perl(container, "unlink '/usr/bin/sh'; symlink 'dash', '/usr/bin/sh'; $ENV{X} = 1")
                container = PlainContainerWithOtherShell(**vars(container))
        put(container, "/etc/ld.so.preload", b"/trap.so\n", 0o644)
        container.handle.exec_run(["/root/perl", "-MIO::Handle", "-e", READER], user="root", detach=True)
        until = time.monotonic() + 10
        while "reading" not in hits(container) and time.monotonic() < until:
            time.sleep(0.1)
        yield container


class PlainContainerWithOtherShell(PlainContainer):
    """Its own sh is a trojan now; ours stands beside it."""

    def run(self, command: str, *, user: str = "root") -> tuple[int, str]:
        ended = self.handle.exec_run(["/usr/bin/dash.kept", "-c", command], user=user)
        return ended.exit_code, ended.output.decode(errors="replace")


def test_a_trojaned_container_neither_sees_nor_forges_nor_feels_a_check(hostile: PlainContainer, helper: Path) -> None:
    check = checker(hostile, helper)
    # The reader and the trap do see a program that carries the canary inside the container.
    hostile.handle.exec_run(["/root/perl", "-e", f"select undef, undef, undef, 0.5 # {CANARY}"], user="root")
    assert CANARY in perl(hostile, "open F, '/dev/shm/stolen'; print <F>")
    perl(hostile, "unlink '/dev/shm/stolen'")
    time.sleep(0.2)
    seen = hits(hostile)
    assert "/cmdline" in seen
    assert "/environ" not in seen
    before = tree(hostile)
    for _ in range(10):
        assert check(f"grep -q {CANARY} /target/srv/app/answer").exit_code == 1
        assert check(f"bash -c 'grep -q {CANARY} /target/srv/app/answer'").exit_code == 1
        assert check(f'python3 -c \'open("/target/srv/app/answer").read().index("{CANARY}")\'').exit_code == 1
        assert check("grep -q wrong /target/srv/app/answer").satisfied
        assert check(f"echo {CANARY} | tee /tmp/note /dev/shm/note /run/note; sleep 0.05").satisfied
    assert tree(hostile) == before
    # Each line of the trap is a program that the container itself ran; the check's are not among them.
    assert CANARY not in perl(hostile, "open F, '/dev/shm/stolen'; print <F>")
    perl(hostile, "open F, '>', '/root/stop'")
    until = time.monotonic() + 10
    while not hits(hostile).endswith("stopped\n") and time.monotonic() < until:
        time.sleep(0.05)
    assert hits(hostile) == seen + "stopped\n"


def hits(container: PlainContainer) -> str:
    return perl(container, "open F, '/dev/shm/hits'; print <F>")


def test_a_link_cannot_point_a_check_at_itself(container: PlainContainer, check: Check) -> None:
    container.must(
        "ln -s /proc/self/cmdline /srv/forged; ln -s ../../proc/self/cmdline /srv/relative; ln -s /proc /srv/p"
    )
    for path in ("forged", "relative", "p/self/cmdline"):
        result = check(f"grep -q {CANARY} /target/srv/{path}")
        assert result.exit_code == 2, said(result)
        assert "symbolic links" in said(result)
    assert said(check("target-path /srv/forged; echo")).startswith("/target/proc/") is False


@pytest.mark.usefixtures("limits")
def test_a_container_without_processes_or_memory_left_still_gets_a_verdict(helper: Path) -> None:
    with plain_container("full", mem_limit="64m", memswap_limit="64m", pids_limit=12, shm_size="60m") as container:
        check = checker(container, helper)
        container.must("head -c 52M /dev/zero > /dev/shm/fill")
        container.leave_running(
            "exec perl -e 'while () { my $p = fork; sleep 99 if defined $p && !$p; select undef, undef, undef, 0.01 }'"
        )
        until = time.monotonic() + 10
        while len(Freezer(container.group).pids()) < 12 and time.monotonic() < until:
            time.sleep(0.05)
        assert check("true") == CheckResult(satisfied=True, exit_code=0)
        result = check("/bin/true; /bin/true")
        assert result.error is None
        assert not result.satisfied  # no process is left for it: the container's own doing
    with plain_container("memory", mem_limit="64m", memswap_limit="64m", shm_size="60m") as container:
        check = checker(container, helper)
        container.must("head -c 56M /dev/zero > /dev/shm/fill")
        assert check("true") == CheckResult(satisfied=True, exit_code=0)
        result = check("head -c 14M /dev/zero > /tmp/x; test -s /tmp/x")
        assert result.error is None
        assert container.run("test -s /dev/shm/fill")[0] == 0


def test_a_first_process_that_changed_its_root_changes_no_verdict(helper: Path) -> None:
    hostile = (
        "mkdir '/fake'; mkdir '/fake/etc'; open F, '>', '/fake/etc/marker'; chroot '/fake' or die; chdir '/'; sleep 1e6"
    )
    with plain_container("chroot", entrypoint=["perl", "-e", hostile], command=[], user="root") as container:
        while not os.readlink(f"/proc/{container.init_pid}/root").endswith("/fake"):
            time.sleep(0.02)
        check = checker(container, helper)
        assert check("test -e /target/etc/marker").exit_code == 1
        assert check("test -e /target/fake/etc/marker && test -e /target/etc/passwd").satisfied


# Our own machinery.
