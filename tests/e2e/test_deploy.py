"""The scripts of ``deploy/``, run for real where that takes seconds; the engine that is in use is left alone."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from orchestrator import host

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
SCRIPTS = [path for path in sorted(DEPLOY.iterdir()) if path.is_file()] + [REPOSITORY / ".ci" / "run"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
needs_set_up = pytest.mark.skipif(
    not (REPOSITORY / ".venv" / ".made-from").exists(), reason="needs the environment that deploy/python makes"
)


def run(
    script: str, *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DEPLOY / script, *arguments],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def succeeds(script: str, *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 120) -> str:
    done = run(script, *arguments, env=env, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_can_be_run_from_anywhere_and_says_first_what_it_does(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()
    assert os.access(script, os.X_OK)
    assert lines[0] == "#!/usr/bin/env bash"
    assert lines[1].startswith("# ")
    assert "set -euo pipefail" in lines
    assert any("BASH_SOURCE[0]" in line for line in lines)
    assert max(len(line) for line in lines) <= 120


class TestEngine:
    @pytest.fixture
    def private(self, tmp_path: Path) -> Iterator[dict[str, str]]:
        """The environment that makes ``deploy/engine`` work on an engine of its own."""
        dockerd = shutil.which("dockerd")
        if os.geteuid() != 0 or not dockerd:
            pytest.skip("needs root and an installed dockerd")
        # Not below tmp_path: a socket's path may have 107 bytes.
        place = Path("/tmp") / f"engine-{os.getpid()}"
        place.mkdir(mode=0o700)
        # In a network namespace of its own: dockerd without a bridge deletes the one that another engine made.
        (place / "bin").mkdir()
        (place / "bin/dockerd").write_text(f'#!/bin/sh\nexec unshare --net {dockerd} "$@"\n')
        (place / "bin/dockerd").chmod(0o755)
        options = f"--data-root {place}/data --exec-root {place}/exec --pidfile {place}/pid"
        environment = {
            "DOCKER_HOST": f"unix://{place}/socket",
            "PATH": f"{place}/bin:{os.environ['PATH']}",
            "ENGINE_STATE_DIR": f"{place}/state",
            "ENGINE_OPTIONS": f"{options} --bridge none --iptables=false --ip6tables=false",
        }
        yield environment
        run("engine", "--stop", env=environment)
        # Where dockerd cannot see its mount as shared it leaves the one that it made over its data root.
        subprocess.run(["umount", place / "data"], stderr=subprocess.DEVNULL)
        shutil.rmtree(place)

    def test_starts_one_beside_a_stale_socket_leaves_it_alone_and_stops_it(self, private: dict[str, str]) -> None:
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(private["DOCKER_HOST"].removeprefix("unix://"))
        stale.close()
        pid_file = Path(private["ENGINE_STATE_DIR"]) / "pid"

        assert "answers" in succeeds("engine", env=private)
        pid = pid_file.read_text()
        assert (Path("/proc") / pid.strip() / "comm").read_text() == "dockerd\n"
        assert "starting" not in succeeds("engine", env=private)
        assert pid_file.read_text() == pid

        assert "stopped" in succeeds("engine", "--stop", env=private)
        assert not (Path("/proc") / pid.strip() / "exe").exists()

    def test_stopping_leaves_an_engine_that_somebody_else_started(self, tmp_path: Path) -> None:
        output = succeeds("engine", "--stop", env={"ENGINE_STATE_DIR": str(tmp_path)})
        assert "no engine that this script started" in output

    @needs_root
    def test_an_address_on_another_machine_is_an_error_with_a_remedy(self) -> None:
        done = run("engine", env={"DOCKER_HOST": "tcp://127.0.0.1:1"})
        assert done.returncode == 1
        assert "DOCKER_HOST=tcp://127.0.0.1:1" in done.stderr
        assert "unset it" in done.stderr


class TestHelpers:
    def test_they_are_static_and_replaced_only_when_they_differ(self, tmp_path: Path) -> None:
        succeeds("helpers", str(tmp_path))
        programs = [tmp_path / name for name in ("launch", "enter", "tracker")]
        assert sorted(tmp_path.iterdir()) == sorted(programs)
        assert [host.fault_of_static_program(program) for program in programs] == [None] * 3
        before = [program.stat().st_ino for program in programs]

        (tmp_path / "enter").write_bytes(b"another version")
        succeeds("helpers", str(tmp_path))
        after = [program.stat().st_ino for program in programs]
        assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
        assert host.fault_of_static_program(tmp_path / "enter") is None


class TestBaseImage:
    @pytest.fixture
    def apt(self, tmp_path: Path) -> Iterator[Path]:
        """apt's configuration directory, pointed at by APT_CONFIG."""
        if not shutil.which("apt-get"):
            pytest.skip("needs apt")
        (tmp_path / "parts").mkdir()
        config = tmp_path / "apt.conf"
        config.write_text(
            f'Dir::Etc::sourcelist "{tmp_path}/sources.list";\nDir::Etc::sourceparts "{tmp_path}/parts";\n'
            f'Dir::State::lists "{tmp_path}/lists";\n'
        )
        (tmp_path / "lists" / "partial").mkdir(parents=True)
        yield tmp_path

    def suite(self) -> str:
        lines = Path("/etc/os-release").read_text().splitlines()
        return next(line.partition("=")[2].strip('"') for line in lines if line.startswith("VERSION_CODENAME="))

    def test_mirrors_are_read_from_both_formats_of_apt(self, apt: Path) -> None:
        suite = self.suite()
        (apt / "sources.list").write_text(
            f"deb http://one.invalid/debian {suite} main contrib\n"
            f"# deb http://off.invalid/debian {suite} main\n"
            f"deb http://updates.invalid/debian {suite}-updates main\n"
        )
        (apt / "mirrors").write_text("http://three.invalid/debian\n")
        (apt / "parts" / "a.sources").write_text(
            f"Types: deb\nURIs: http://two.invalid/debian\nSuites: {suite} {suite}-backports\nComponents: main\n\n"
            f"Types: deb\nURIs: mirror+file:{apt}/mirrors\nSuites: {suite}\nComponents: main\n\n"
            f"Types: deb\nURIs: http://off.invalid/x\nSuites: {suite}\nComponents: main\nEnabled: no\n\n"
            f"Types: deb\nURIs: http://vendor.invalid/x\nSuites: {suite}\nComponents: stable\n"
        )
        mirrors = succeeds("base-image", "--mirrors", env={"APT_CONFIG": str(apt / "apt.conf")}).split()
        assert mirrors == [
            "http://one.invalid/debian",
            "http://two.invalid/debian",
            "http://three.invalid/debian",
        ]

    @pytest.mark.engine
    @needs_set_up
    def test_an_image_that_is_there_is_left_alone(self) -> None:
        output = succeeds("base-image")
        assert output.strip().endswith("orchestrator-base:latest is there")


class TestPackages:
    def test_apt_is_not_called_when_nothing_is_missing(self, tmp_path: Path) -> None:
        trap = tmp_path / "apt-get"
        trap.write_text("#!/bin/sh\nexit 99\n")
        trap.chmod(0o755)
        output = succeeds("packages", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
        assert "nothing missing" in output

    def test_an_unknown_need_is_an_error(self) -> None:
        done = run("packages", "coffee")
        assert done.returncode == 1
        assert "unknown need 'coffee'" in done.stderr


class TestPython:
    def test_an_interpreter_that_only_pretends_is_passed_over(self, tmp_path: Path) -> None:
        stub = tmp_path / "python3"
        stub.write_text("#!/bin/sh\necho 'no version selected' >&2\nexit 127\n")
        stub.chmod(0o755)
        found = succeeds("python", "--find", env={"PATH": f"{tmp_path}:/usr/bin:/bin"}).strip()
        assert found
        assert Path(found).parent != tmp_path

    @needs_set_up
    def test_an_environment_that_is_up_to_date_is_left_alone(self) -> None:
        stamp = REPOSITORY / ".venv" / ".made-from"
        before = stamp.stat().st_mtime_ns
        assert "up to date" in succeeds("python")
        assert stamp.stat().st_mtime_ns == before


@pytest.mark.engine
@pytest.mark.slow
@needs_root
@needs_set_up
def test_the_demo_ends_with_the_container_back_at_its_first_breakpoint(tmp_path: Path) -> None:
    data_dir, run_id = str(tmp_path / "data"), f"demo-test-{os.getpid()}"
    orchestrator = REPOSITORY / ".venv" / "bin" / "orchestrator"
    try:
        output = succeeds("demo", run_id, timeout_s=280, env={"ORCHESTRATOR_DATA_DIR": data_dir})
        assert "succeeded" in output
        assert "The container is as it was at breakpoint" in output
    finally:
        subprocess.run(
            [orchestrator, "rm", run_id, "--data-dir", data_dir],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
