"""Commands in a container: what they answer, what they leave running, how they are ended, and who they are not."""

from __future__ import annotations

import resource
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.container import Container
from orchestrator.launcher import ExecResult
from snapshot_drivers.errors import EngineError

pytestmark = pytest.mark.engine

MakeContainer = Callable[..., Container]


@pytest.fixture
def box(container: MakeContainer) -> Container:
    return container()


def text(result: ExecResult) -> str:
    return result.output.decode()


def wait_until(true: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class TestAnswers:
    def test_exit_codes_are_those_of_a_shell(self, box: Container) -> None:
        assert box.exec("exit 0").exit_code == 0
        assert box.exec("exit 7").exit_code == 7
        assert box.exec("exit 255").exit_code == 255
        assert box.exec("kill -TERM $$").exit_code == 128 + 15

    def test_a_program_that_is_missing_or_no_program_is_a_result(self, box: Container) -> None:
        missing, directory = box.exec(["no-such-program"]), box.exec(["/etc"])
        assert (missing.exit_code, directory.exit_code) == (127, 126)
        assert "no-such-program: No such file" in text(missing)
        assert "/etc: Permission denied" in text(directory)

    def test_a_working_directory_that_is_missing_is_a_result(self, box: Container) -> None:
        result = box.exec("pwd", cwd="/no/such/place")
        assert result.exit_code == 126
        assert "/no/such/place: No such file or directory" in text(result)

    def test_stdout_and_stderr_come_in_the_order_in_which_they_were_written(self, box: Container) -> None:
        lines = text(box.exec("for i in 1 2 3 4 5; do echo out $i; echo err $i >&2; done")).split("\n")
        assert lines[:-1] == [f"{name} {i}" for i in range(1, 6) for name in ("out", "err")]

    def test_output_is_bytes(self, box: Container) -> None:
        result = box.exec(r"printf 'a\000\377\200\r\nb'")
        assert result.output == b"a\0\xff\x80\r\nb"

    def test_stdin_is_empty(self, box: Container) -> None:
        assert text(box.exec("readlink /proc/self/fd/0; cat; echo end")) == "/dev/null\nend\n"

    def test_long_output_is_cut_in_the_middle_and_says_how_much(self, box: Container) -> None:
        result = box.exec("seq 1 100000", output_limit_bytes=1000)
        assert result.output.startswith(b"1\n2\n3\n")
        assert result.output.endswith(b"99999\n100000\n")
        assert f"[... {result.truncated_bytes} bytes cut here ...]" in text(result)
        assert result.truncated_bytes == 588895 - 1000

    def test_output_just_at_the_limit_is_whole(self, box: Container) -> None:
        result = box.exec("head -c 1000 /dev/zero", output_limit_bytes=1000)
        assert (len(result.output), result.truncated_bytes) == (1000, 0)

    def test_characters_are_not_cut_in_two(self, box: Container) -> None:
        result = box.exec("for i in $(seq 1 3000); do printf '\\342\\202\\254'; done", output_limit_bytes=1001)
        assert "\ufffd" not in result.output.decode("utf-8", "replace")

    def test_a_flood_costs_little_memory(self, box: Container) -> None:
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = box.exec("yes | head -c 1G", output_limit_bytes=16_000, timeout_s=120)
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
        assert result.exit_code == 0
        assert result.truncated_bytes == 2**30 - 16_000
        assert grown_kb < 50_000

    def test_what_the_kernel_would_not_start_is_answered_as_a_shell_would(self, box: Container) -> None:
        long = box.exec("true " + "x" * 200_000)
        assert (long.exit_code, text(long)) == (126, "launch: Argument list too long\n")
        assert box.exec("true \0").exit_code == 126
        assert box.exec("true \udc80").exit_code == 126
        assert box.exec("true " + "x" * 100_000).exit_code == 0


class TestIdentity:
    def test_user_environment_and_directory_are_the_tasks(self, container: MakeContainer) -> None:
        box = container(user="daemon", workdir="/srv/new/place", env={"COLOUR": "two words\nand a line"})
        out = text(box.exec('id -un; id -G; pwd; echo "$COLOUR"; stat -c %U:%a /srv/new/place'))
        assert out == "daemon\n1\n/srv/new/place\ntwo words\nand a line\nroot:755\n"

    def test_a_call_can_say_otherwise(self, box: Container) -> None:
        out = text(box.exec("id -u; pwd; echo $A", user="nobody", cwd="/usr", env={"A": "b"}))
        assert out == "65534\n/usr\nb\n"

    def test_supplementary_groups_come_along(self, box: Container) -> None:
        box.exec("usermod -a -G audio,video games")
        assert text(box.exec("id -Gn", user="games")) == "games audio video\n"

    def test_rights_are_those_that_the_engine_gives(self, box: Container) -> None:
        show = "grep -E '^(Cap|NoNewPrivs|Seccomp)' /proc/self/status"
        root, nobody = text(box.exec(show)), text(box.exec(show, user="nobody"))
        assert "NoNewPrivs:\t1" in root and "Seccomp:\t2" in root
        assert "CapEff:\t0000000000000000" in nobody and "CapPrm:\t0000000000000000" in nobody
        mknod = 1 << 27
        effective = next(int(line.split()[1], 16) for line in root.splitlines() if line.startswith("CapEff"))
        assert effective and not effective & mknod

    def test_root_needs_no_passwd_file(self, box: Container) -> None:
        assert box.exec("rm /etc/passwd /etc/group").exit_code == 0
        assert text(box.exec("echo still here")) == "still here\n"

    def test_a_user_cannot_become_root_through_the_launchers_socket(self, box: Container) -> None:
        assert box.exec("true").exit_code == 0
        program = """
            import socket, struct
            s = socket.socket(socket.AF_UNIX)
            s.connect("\\0orchestrator-launch")
            strings = b"/\\0" b"/bin/sh\\0" b"-c\\0" b"id -u; id -G; cat /etc/shadow\\0" b"PATH=/bin\\0"
            s.sendall(struct.pack("=III", len(strings), 3, 0) + strings)
            print(b"".join(iter(lambda: s.recv(4096), b"")))
        """
        out = text(box.exec(["python3", "-c", textwrap.dedent(program)], user="nobody"))
        assert "65534" in out and "Permission denied" in out and "root:" not in out

    def test_malformed_requests_hurt_only_themselves(self, box: Container) -> None:
        assert box.exec("true").exit_code == 0
        program = """
            import socket, struct
            def request(argc, strings):
                return struct.pack("=III", len(strings), argc, 0) + strings
            requests = [
                b"", b"x", b"\\xff" * 12, request(0, b""), request(9, b"a\\0b\\0"), request(2**32 - 1, b"a\\0b\\0"),
                request(1, b"ab"), request(1, b"\\0" * (4 << 20)), request(1, b"\\0" * (5 << 20)),
            ]
            idle = []
            for request in requests * 5:
                s = socket.socket(socket.AF_UNIX)
                s.connect("\\0orchestrator-launch")
                try:
                    s.sendall(request)
                except OSError:
                    pass
                idle.append(s)
            print("sent")
        """
        assert text(box.exec(["python3", "-c", textwrap.dedent(program)], user="nobody")) == "sent\n"
        assert text(box.exec("echo alive")) == "alive\n"
        wait_until(lambda: box.other_processes() == 0)

    def test_only_roots_launcher_is_shown_a_request(self, box: Container) -> None:
        become_the_launcher(box, "open('/tmp/stolen', 'ab').write(peer.recv(1 << 20))", user="nobody")
        with pytest.raises(EngineError, match="launcher"):
            box.exec("true", env={"TOKEN": "canary"})
        pid = box.target().init_pid
        assert (
            not Path(f"/proc/{pid}/root/tmp/stolen").exists() or not Path(f"/proc/{pid}/root/tmp/stolen").read_bytes()
        )


def become_the_launcher(box: Container, answer: str, user: str = "root") -> None:
    """A program of the container holds the launcher's name; ``answer``: its statement for each ``peer``."""
    program = f"""
        import socket, struct, time
        s = socket.socket(socket.AF_UNIX)
        while True:
            try:
                s.bind("\\0orchestrator-launch")
                break
            except OSError:
                time.sleep(0.005)
        s.listen()
        peers = []
        while True:
            peers.append(s.accept()[0])
            peer = peers[-1]
            {answer}
    """
    assert box.exec(["python3", "-c", "pass"]).exit_code == 0
    box.background(["setsid", "python3", "-c", textwrap.dedent(program)], user=user)
    time.sleep(0.3)
    box.exec("pkill -9 launch; sleep 1")
    time.sleep(0.3)


class TestWhatRunsOn:
    def test_a_background_job_neither_holds_the_call_nor_dies(self, box: Container) -> None:
        began = time.monotonic()
        result = box.exec("(while :; do echo x; echo y >> /tmp/ticks; sleep 0.05; done) & echo started")
        assert time.monotonic() - began < 2
        assert "started\n" in text(result)
        assert result.left_running
        count = "wc -l < /tmp/ticks"
        first = int(text(box.exec(count)))
        time.sleep(0.5)
        assert int(text(box.exec(count))) >= first + 5

    def test_a_flood_in_the_background_does_not_hold_the_call(self, box: Container) -> None:
        result = box.exec("yes & sleep 0.2; echo done", timeout_s=20)
        assert (result.exit_code, result.timed_out, result.left_running) == (0, False, True)
        assert box.exec("pgrep -x yes").exit_code == 0

    def test_a_server_with_redirected_output_goes_on(self, box: Container) -> None:
        result = box.exec("nohup sleep 4321 >/tmp/log 2>&1 & echo $!")
        pid = text(result).strip()
        assert result.left_running
        assert text(box.exec(f"ps -o args= -p {pid}")) == "sleep 4321\n"

    def test_a_job_that_ends_leaves_nothing(self, box: Container) -> None:
        assert not box.exec("sleep 0.1 & wait").left_running
        assert not box.exec("(true &) ; true").left_running
        assert box.other_processes() == 0

    def test_everything_runs_below_one_subreaper_that_is_a_child_of_pid_1(self, box: Container) -> None:
        box.exec("sleep 1001 & (sleep 1002 &) ; setsid sleep 1003 & sh -c 'sleep 1004 & exit' & exit")
        box.background("exec sleep 1005")
        wait_until(lambda: "1005" in text(box.exec("pgrep -fa '[s]leep 100[1-5]'")))
        rows = [line.split(None, 2) for line in text(box.exec("ps -eo pid=,ppid=,args=")).splitlines()]
        parents = {pid: parent for pid, parent, _ in rows}
        servers = [pid for pid, parent, args in rows if parent == "1"]
        sleepers = [pid for pid, _, args in rows if args.startswith("sleep 100")]
        assert len(servers) == 1 and len(sleepers) == 5
        for pid in sleepers:
            while parents[pid] != "1":
                pid = parents[pid]
            assert pid == servers[0]

    def test_a_zombie_does_not_stay(self, box: Container) -> None:
        box.exec("for i in $(seq 1 50); do (sleep 0.2 &); done")
        time.sleep(0.6)
        assert "Z" not in text(box.exec("ps -eo stat="))

    def test_background_is_not_waited_for_and_what_it_prints_is_discarded(self, box: Container) -> None:
        session = box.background("while :; do echo line; sleep 0.02; echo . >> /tmp/dots; done")
        assert session is not None
        time.sleep(0.5)
        assert int(text(box.exec("wc -l < /tmp/dots"))) > 5
        assert box.other_processes() >= 1
        assert box.other_processes(session) == 0


class TestTimeLimit:
    def test_the_whole_session_is_killed_and_its_output_kept(self, box: Container) -> None:
        result = box.exec("sleep 1001 & echo before; trap '' TERM; sleep 1002; echo after", timeout_s=0.7)
        assert result.timed_out and result.exit_code is None and not result.left_running
        assert text(result) == "before\n"
        assert result.duration_ms < 4000
        assert box.exec("pgrep -f '[s]leep 100'").exit_code == 1

    def test_what_left_the_session_is_left_alone(self, box: Container) -> None:
        box.exec("setsid sleep 1003 & sleep 1004", timeout_s=0.7)
        assert text(box.exec("pgrep -fa '[s]leep 100'")).endswith("sleep 1003\n")

    def test_an_earlier_calls_background_job_is_left_alone(self, box: Container) -> None:
        box.exec("sleep 1005 >/dev/null 2>&1 &")
        box.exec("sleep 1006", timeout_s=0.5)
        assert "1005" in text(box.exec("pgrep -fa '[s]leep 100'"))

    @pytest.mark.usefixtures("limits")
    def test_a_fork_bomb_is_ended(self, container: MakeContainer) -> None:
        box = container(resources={"pids": 128, "memory": "256m"})
        result = box.exec("(b() { b | b & }; b) & exec sleep 1000", timeout_s=1.5)
        assert result.timed_out
        assert text(box.exec("echo alive")) == "alive\n"
        assert box.other_processes() == 0

    def test_an_endless_flood_ends_at_its_time(self, box: Container) -> None:
        result = box.exec("yes", timeout_s=1)
        assert result.timed_out and result.duration_ms < 8000
        assert box.exec("pgrep -x yes").exit_code == 1

    def test_a_lie_about_the_session_kills_nothing_outside(
        self, container: MakeContainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("orchestrator.launcher._START_S", 2.0)
        monkeypatch.setattr("orchestrator.launcher._END_S", 1.0)
        with subprocess.Popen(["sleep", "60"], start_new_session=True) as victim:
            for lie in (victim.pid, 1):
                box = container()
                init_pid = box.target().init_pid
                become_the_launcher(box, f"peer.sendall(struct.pack('<BI', 115, {len(str(lie))}) + b'{lie}')")
                assert box.exec("true", timeout_s=0.5).exit_code in (None, 137)
                assert victim.poll() is None
                assert box.target().init_pid == init_pid
            victim.kill()


class TestTheLauncherIsKilled:
    def test_by_the_command_itself(self, box: Container) -> None:
        result = box.exec("echo before; pkill -9 launch; sleep 30; echo after")
        assert result.exit_code == 137 and result.note is not None
        assert result.duration_ms < 10_000
        assert text(box.exec("echo again; pgrep -f '[s]leep 30'")) == "again\n"

    def test_between_calls(self, box: Container) -> None:
        box.exec("(sleep 0.2; pkill -9 launch) >/dev/null 2>&1 &")
        time.sleep(0.6)
        assert text(box.exec("echo again")) == "again\n"

    def test_when_it_only_stands_still(self, box: Container, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("orchestrator.launcher._START_S", 1.5)
        box.exec("(sleep 0.2; pkill -STOP launch) >/dev/null 2>&1 &")
        time.sleep(0.6)
        assert box.exec("echo lost").note is not None
        assert text(box.exec("echo again")) == "again\n"
