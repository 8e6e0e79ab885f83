"""Runs that are packed, taken to another data directory, and images that are made of checkpoints."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.main import CRASH_VARIABLE
from orchestrator.data_dir import DataDir
from orchestrator.engine import Engine
from snapshot_drivers.criu.gateway import DEFAULT_PREFIX
from tests.e2e.case_cli import Cli, docker
from tests.e2e.own_engine import own_engine
from tests.tree_walker import ENGINE_OWNED, walk

pytestmark = pytest.mark.engine

SECRET = "canary-8f1d0c7a92"
MADE_BY_ENGINE = (*ENGINE_OWNED, b"/.orchestrator", b"/data", b"/tm")
CHANGES = (
    "echo 1 > /data/f; echo 2 > /tm/g; echo 3 > /dev/shm/h; rm -r /usr/share/doc; mkdir -p /usr/share/doc/x; "
    "ln -s a /l; echo hello > /etc/motd",
    "mkdir /odd; cd /odd; cp /bin/true su; chmod 4755 su; ln su su2; mkfifo fifo; truncate -s 20M sparse; "
    "head -c 3000000 /dev/urandom > big; printf x > \"$(printf 'b\\377\\nd')\"; chown 12:13 big; chmod 0711 .; "
    'python3 -c \'import os; os.setxattr("big", "user.k", bytes([0, 255])); os.utime("su", ns=(1, 1234567890123))\'',
    "rm /data/f; mv /usr/share/bash-completion /usr/share/bc; echo more >> /odd/big; rm -r /odd/fifo; touch /later",
)


@pytest.fixture
def other(
    tmp_path: Path, helpers: Path, engine: Engine, base_image: str, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """The command line on another data directory of the same engine."""
    place = DataDir(tmp_path / "other").open()
    for file in helpers.iterdir():
        shutil.copy2(file, place.bin / file.name)
        (place.bin / file.name).chmod(0o755)
    place.bin.chmod(0o755)
    found = Cli(tmp_path, place, engine, base_image, capsys)
    yield found
    for run in place.runs():
        found("rm", run.run_id)


@pytest.fixture
def own_image(base_image: str) -> Iterator[str]:
    """An image that nobody else uses, so that it can go and come back."""
    name = f"case-image-{secrets.token_hex(4)}:1"
    text = f"FROM {base_image}\nRUN echo {name} > /made-for && rm -r /usr/share/zoneinfo\nVOLUME /vol\n"
    subprocess.run(["docker", "build", "-q", "-t", name, "-"], input=text.encode(), check=True, capture_output=True)
    yield name
    docker("rmi", "-f", name, check=False)


def changed_run(cli: Cli, looked: Callable[[str], object], **keys: Any) -> tuple[str, dict[int, object]]:
    """A run with a checkpoint after each of the changes, and what was seen at each."""
    run = cli.manual(volumes=[{"path": "/data"}], tmpfs=[{"path": "/tm"}], **keys)
    found = {}
    for change in CHANGES:
        cli.sh(run, change)
        found[cli.checkpoint(run)] = looked(run)
    return run, found


def tree(cli: Cli, run: str) -> list[str]:
    """The container as a whole, less what the engine makes anew in each."""
    return comparable(cli.tree(run))


def comparable(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith(("b'/etc' ", "b'/etc/mtab' "))]


def image_layers(name: str) -> list[str]:
    return list(json.loads(docker("inspect", "-f", "{{json .RootFS.Layers}}", name)))


@pytest.mark.slow
def test_a_run_comes_back_on_other_data_directories_and_engines_with_its_image_and_equal_trees(
    cli: Cli, other: Cli, own_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, trees = changed_run(cli, lambda run: tree(cli, run), image=own_image)
    conversation, archive = cli.conversation(run), tmp_path / "run.tar"
    packed = cli.json("pack", run, "--to", str(archive))
    assert packed["image"] and packed["breakpoints"] == [0, *trees] and packed["left_out"] == []
    layers = image_layers(own_image)
    cli("rm", run)
    docker("rmi", own_image)
    assert docker("images", "-q", own_image) == ""

    unpacked = other.json("unpack", str(archive), "--as", f"{run}-b")
    assert unpacked["image_loaded"] and unpacked["breakpoints"] == packed["breakpoints"]
    assert image_layers(f"orchestrator-run:{run}-b") == layers
    comes_back(other, f"{run}-b", conversation, {2: trees[2]})
    other("rm", f"{run}-b")

    with own_engine() as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.address)
        found = Engine.connect(engine.address)
        second = Cli(other.directory, other.place, found, other.image, other._capsys)
        assert second.json("unpack", str(archive))["image_loaded"]
        comes_back(second, run, conversation, {3: trees[3], 1: trees[1]})
        changes = {one["path"] for one in second.json("diff", run, "1", "3")["changes"]}
        assert {"/later", "/odd/big", "/usr/share/bc"} <= changes
        second("rm", run)
        found.close()
        monkeypatch.delenv("DOCKER_HOST")


def comes_back(cli: Cli, run: str, conversation: Any, trees: dict[int, object]) -> None:
    assert cli.json("verify", run, "--content")["whole"]
    assert cli.conversation(run) == conversation
    for number, wanted in trees.items():
        cli("restore", run, str(number), "--verify", "full")
        assert tree(cli, run) == wanted


def test_without_its_image_an_archive_needs_an_engine_that_has_the_same_layers(
    cli: Cli, other: Cli, own_image: str, tmp_path: Path
) -> None:
    run, archive = cli.manual(image=own_image), tmp_path / "run.tar"
    size = cli.json("pack", run, "--to", str(archive), "--without-image")["file_bytes"]
    assert size < 1 << 20
    answer = other.json("unpack", str(archive), "--as", f"{run}-b")
    assert not answer["image_loaded"]
    other("restore", f"{run}-b", "0")
    assert other.sh(f"{run}-b", "cat /made-for") == f"{own_image}\n"
    for one, name in ((other, f"{run}-b"), (cli, run)):
        one("rm", name)
    docker("rmi", own_image)
    refused = other.json("unpack", str(archive), code=6)["error"]
    assert "engine has none with its layers" in refused["message"] and other.json("runs") == []


def test_an_archive_of_a_breakpoint_holds_the_way_to_it_and_nothing_of_other_ways(cli: Cli, tmp_path: Path) -> None:
    run = cli.manual()
    for text in ("one", "abandoned", "two"):
        cli.sh(run, f"head -c 100000 /dev/urandom > /{text}")
        cli.checkpoint(run)
        if text == "abandoned":
            cli("restore", run, "1")
    cli.sh(run, "touch /after")
    cli.checkpoint(run)
    packed = cli.json("pack", run, "4", "--to", str(tmp_path / "a.tar"), "--without-image")
    assert packed["breakpoints"] == [0, 1, 4] and packed["left_out"] == [2, 3]
    copy = cli.json("unpack", str(tmp_path / "a.tar"), "--as", f"{run}-b")["run_id"]
    looked = cli.json("verify", copy)
    assert looked["whole"] and looked["restorable"] == [0, 1, 4]
    assert cli.json("restore", copy, "2", code=2)["error"]["message"].startswith("breakpoint 2 has no snapshot")
    cli("restore", copy, "4")
    assert cli.sh(copy, "cd /; ls -d one abandoned two after 2>/dev/null", code=2) == "one\ntwo\n"
    assert cli.json("show", copy)["breakpoints"] == 6


def test_a_run_id_that_is_taken_is_refused_and_packing_replaces_no_file(cli: Cli, tmp_path: Path) -> None:
    run, archive = cli.manual(), tmp_path / "a.tar"
    cli("pack", run, "--to", str(archive), "--without-image")
    before = archive.read_bytes()
    assert "--as" in cli.json("unpack", str(archive), code=2)["error"]["message"]
    assert cli.json("unpack", str(archive), "--as", "../x", code=2)["error"]["type"] == "UsageError"
    assert cli.json("pack", run, "--to", str(archive), "--without-image", code=2)["error"]["type"] == "UsageError"
    assert archive.read_bytes() == before and archive.stat().st_mode & 0o777 == 0o600
    cli("pack", run, "--to", str(tmp_path / "b.tar"), "--without-image")
    assert (tmp_path / "b.tar").read_bytes() == before, "equal runs make equal archives"


def test_no_secret_of_the_task_is_in_an_archive_or_image_unless_a_file_has_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    env = {"TOKEN": {"from_env": "TOKEN", "secret": True}, "PLAIN": "seen"}
    run = cli.manual(env=env, workdir="/srv", user="daemon")
    assert cli.sh(run, "echo $TOKEN; id -un") == f"{SECRET}\ndaemon\n"
    tag, archive = f"case-export:{run}", tmp_path / "a.tar"
    assert cli.json("pack", run, "--to", str(archive))["secrets"] == []
    assert SECRET.encode() not in archive.read_bytes()
    cli("image", run, "0", "--tag", tag)
    try:
        saved = subprocess.run(["docker", "save", tag], check=True, capture_output=True).stdout
        assert SECRET.encode() not in saved
        config = json.loads(docker("inspect", "-f", "{{json .Config}}", tag))
        assert (config["User"], config["WorkingDir"]) == ("daemon", "/srv")
        assert "PLAIN=seen" in config["Env"] and not any("TOKEN" in one for one in config["Env"])
    finally:
        docker("rmi", tag)
    refused = cli.json("unpack", str(archive), "--as", f"{run}-b", code=3)["error"]["message"]
    assert "the variable TOKEN of your environment" in refused
    cli.sh(run, "echo $TOKEN > /tmp/leak")
    cli.checkpoint(run)
    assert cli.json("pack", run, "--to", str(tmp_path / "b.tar"), "--without-image")["secrets"] == ["TOKEN"]


def test_an_image_of_a_breakpoint_shows_its_root_filesystem(cli: Cli) -> None:
    run, _ = changed_run(cli, lambda _: None)
    tag = f"case-export:{run}"
    made = cli.json("image", run, "2", "--tag", tag)
    name = f"{run}-plain"
    try:
        assert made["not_included"] == ["volume /data", "tmpfs /dev", "tmpfs /dev/shm", "tmpfs /tm"]
        assert image_layers(tag)[:-1] == image_layers(cli.image), "the run's layers are shared"
        assert cli.json("image", run, "1", "--tag", tag, code=2)["error"]["type"] == "UsageError"
        docker("run", "-d", "--name", name, tag, "sleep", "300")
        root = f"/proc/{docker('inspect', '-f', '{{.State.Pid}}', name)}/root"
        cli("restore", run, "2")
        wanted = walk(f"/proc/{cli.inspect(run)['State']['Pid']}/root", MADE_BY_ENGINE)
        found = walk(root, (*MADE_BY_ENGINE, b"/.init"))
        assert comparable(found) == comparable(wanted)
        assert os.listdir(f"{root}/data") == []
    finally:
        docker("rm", "-f", name)
        docker("rmi", tag)


def test_an_entry_that_no_image_can_hold_is_named_and_left_out_only_if_that_is_accepted(cli: Cli) -> None:
    run = cli.manual()
    cli.sh(run, "touch /kept /.wh.motd; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/sock\")'")
    number, tag = cli.checkpoint(run), f"case-export:{run}"
    refused = cli.json("image", run, str(number), "--tag", tag, code=3)["error"]["message"]
    assert "/.wh.motd: in a layer of an image that name is the sign of a deleted entry" in refused
    try:
        left_out = cli.json("image", run, str(number), "--tag", tag, "--accept-partial")["left_out"]
        assert [one.partition(":")[0] for one in left_out] == ["/.wh.motd", "/sock"]
        assert docker("run", "--rm", tag, "ls", "/kept", "/etc/motd") == "/etc/motd\n/kept"
    finally:
        docker("rmi", tag)


def killed_at(cli: Cli, point: str, *words: str) -> None:
    command = [sys.executable, "-m", "orchestrator.cli.main", words[0], "--data-dir", str(cli.place.root), *words[1:]]
    done = subprocess.run(command, env={**os.environ, CRASH_VARIABLE: point}, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_an_unpacking_that_is_killed_leaves_a_whole_run_or_none(cli: Cli, other: Cli, tmp_path: Path) -> None:
    run, archive = cli.manual(), tmp_path / "a.tar"
    cli("pack", run, "--to", str(archive), "--without-image")
    whole: list[str] = []
    for point in ("archive-checked", "archive-stored", "archive-manifest", "archive-settled"):
        killed_at(other, point, "unpack", str(archive), "--as", f"{run}-{point}")
        if point == "archive-settled":
            whole.append(f"{run}-{point}")
        assert {one["run_id"] for one in other.json("runs")} == set(whole)
    other("unpack", str(archive), "--as", f"{run}-b")
    left = [path.name for path in (other.place.root / "runs").iterdir() if path.name.startswith(".")]
    assert left == [], "the next one clears what a killed one left"
    for name in (*whole, f"{run}-b"):
        assert other.json("verify", name, "--content")["whole"]


def test_a_full_disk_leaves_neither_a_run_nor_half_an_archive(cli: Cli, other: Cli, tmp_path: Path) -> None:
    run, archive, small = cli.manual(), tmp_path / "a.tar", tmp_path / "small"
    cli.sh(run, "head -c 20000000 /dev/urandom > /big")
    cli.checkpoint(run)
    cli("pack", run, "--to", str(archive), "--without-image")
    small.mkdir(mode=0o700)
    for size, action in (("10m", "pack"), ("10m", "unpack"), ("30m", "unpack")):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(small)], check=True)
        try:
            if action == "pack":
                cli("pack", run, "--to", str(small / "b.tar"), "--without-image", code=6)
                assert list(small.iterdir()) == []
                continue
            full = Cli(other.directory, DataDir(small), other.engine, other.image, other._capsys)
            assert full.json("unpack", str(archive), "--as", f"{run}-b", code=6)["error"]["exit_code"] == 6
            assert full.json("runs") == [] and [*(small / "runs").iterdir(), *small.glob("store/manifests/*")] == []
            assert docker("images", "-q", f"orchestrator-run:{run}-b") == "", "nothing holds the image"
        finally:
            subprocess.run(["umount", str(small)], check=True)


@pytest.fixture
def criu_run(cli: Cli) -> str:
    """A run with the criu driver."""
    if not DEFAULT_PREFIX.is_dir():
        pytest.skip("needs CRIU: run deploy/criu")
    return cli.manual(snapshots={"driver": "criu"})


def test_the_memory_of_processes_travels_only_if_both_ends_want_it(
    cli: Cli, other: Cli, criu_run: str, tmp_path: Path
) -> None:
    run = criu_run
    cli.sh(run, "(setsid python3 -c 'import time; time.sleep(9999)' > /dev/null 2>&1 &); sleep 1")
    number = cli.checkpoint(run)
    row = next(one for one in cli.json("breakpoints", run) if one["breakpoint_id"] == number)
    if not any(one["kind"] == "process" and one["state"] == "captured" for one in row["coverage"]["items"]):
        pytest.skip(f"CRIU took nothing here: {row['coverage']}")
    plain, full = tmp_path / "plain.tar", tmp_path / "full.tar"
    assert not cli.json("pack", run, "--to", str(plain), "--without-image")["processes"]
    assert cli.json("pack", run, "--to", str(full), "--without-image", "--with-memory")["processes"]
    assert full.stat().st_size > plain.stat().st_size + (1 << 20)
    for name, archive, words, runs in (
        ("a", plain, ("--trust-processes",), False),
        ("b", full, (), False),
        ("c", full, ("--trust-processes",), True),
    ):
        copy = other.json("unpack", str(archive), "--as", f"{run}-{name}", *words)
        assert (copy["processes"], copy["processes_dropped"]) == (runs, name == "b")
        found = next(one for one in other.json("breakpoints", f"{run}-{name}") if one["breakpoint_id"] == number)
        states = {one["state"] for one in found["coverage"]["items"] if one["kind"] == "process"}
        assert states == ({"captured"} if runs else {"excluded"})
        answer = other.json("restore", f"{run}-{name}", str(number))
        assert bool(answer["processes"]["restored"]) is runs
        shown = other.sh(f"{run}-{name}", "ps -e -o args | grep -c '[t]ime.sleep(9999)'", code=0 if runs else 1)
        assert re.fullmatch(r"1\n" if runs else r"0\n", shown)
        other("rm", f"{run}-{name}")
