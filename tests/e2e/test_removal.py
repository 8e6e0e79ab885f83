"""What ``rm`` and ``clean`` take, and what they leave."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys

import pytest

from orchestrator.cli.main import main
from tests.e2e.case_cli import Cli, bash, docker, new_id, until

pytestmark = pytest.mark.engine


def crashed(cli: Cli) -> str:
    """Id of a run whose process was killed in the middle of a step."""
    run = new_id()
    task = cli.scripted(bash("echo 1 > /data/f"), bash("touch /begun; sleep 60"), volumes=[{"path": "/data"}])
    child = os.fork()
    if child == 0:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            sys.stdout = sys.stderr = open(null, "w", closefd=False)  # noqa: SIM115
            main(["launch", task, "--run-id", run, "--data-dir", str(cli.place.root)])
        finally:
            os._exit(0)
    try:
        until(lambda: docker("exec", f"orchestrator-{run}", "ls", "/begun", check=False), 60)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return run


def test_clean_takes_what_nobody_drives_and_leaves_everything_else(cli: Cli) -> None:
    import litellm  # noqa: F401 - the forked process has it at once

    stranger = f"case-stranger-{secrets.token_hex(4)}"
    docker("run", "-d", "--name", stranger, "--label", "orchestrator.run=theirs", cli.image, "sleep", "300")
    try:
        dead, manual = crashed(cli), cli.manual(volumes=[{"path": "/v"}])
        assert cli.json("show", dead)["status"] == "interrupted"
        found = cli.json("clean")
        assert [one["run_id"] for one in found["removed"]] == [dead]
        assert [(one["run_id"], "on purpose" in one["reason"]) for one in found["kept"]] == [(manual, True)]
        assert cli.left(dead) == []
        assert cli.is_whole(dead) and cli.is_whole(manual)
        assert cli.sh(manual, "echo alive") == "alive\n"
        with cli.place.run(manual).lock():
            assert [one["reason"] for one in cli.json("clean", "--all")["kept"]] == ["it is being driven"]
        assert [one["run_id"] for one in cli.json("clean", "--all")["removed"]] == [manual]
        assert cli.left(manual) == []
        assert cli.json("show", manual)["status"] == "stopped"
        assert cli("clean")[0] == "There is nothing to clean.\n"
        cli("restore", dead, "1")
        assert cli.sh(dead, "cat /data/f") == "1\n", "what clean took can be made again"
        assert docker("inspect", "-f", "{{.State.Running}}", stranger) == "true"
    finally:
        docker("rm", "-f", stranger)


def test_rm_takes_a_run_with_all_that_is_its_own_and_nothing_of_another_one(cli: Cli) -> None:
    gone, stays = cli.manual(volumes=[{"path": "/v"}]), cli.manual(volumes=[{"path": "/v"}])
    for run in (gone, stays):
        cli.sh(run, f"head -c 100000 /dev/urandom > /big; echo {run} > /v/f")
        cli.checkpoint(run)
    assert any("cgroup" in path for path in cli.left(gone)), "there is something to look for"
    removed = cli.json("rm", gone)
    assert removed["snapshots"] == 2 and len(removed["containers"]) == 2 and len(removed["volumes"]) == 1
    assert cli.left(gone) == []
    assert not cli.place.run(stays).path.with_name(gone).exists()
    assert cli.json("show", gone, code=2)["error"]["type"] == "UsageError"
    assert cli.json("verify", stays, "--content")["restorable"] == [0, 1]
    assert cli.sh(stays, "cat /v/f") == f"{stays}\n"
    with cli.place.run(stays).lock():
        cli("rm", stays, code=5)


def test_a_run_with_a_damaged_log_or_record_can_still_be_cleaned_and_removed(cli: Cli) -> None:
    log, record = cli.manual(), cli.manual()
    cli.place.run(log).events_path.write_bytes(b"rubbish\n")
    cli.place.run(record).record_path.unlink()
    kept = {one["run_id"]: one["reason"] for one in cli.json("clean")["kept"]}
    assert "log cannot be read" in kept[log] and "on purpose" in kept[record]
    for run in (log, record):
        cli("rm", run)
        assert cli.left(run) == []


def test_a_tree_too_deep_for_the_engine_is_removed_with_its_run(cli: Cli) -> None:
    run = cli.manual()
    dig = "import os; os.chdir('/root')\nfor _ in range(19000): os.mkdir('n' * 200); os.chdir('n' * 200)"
    cli.sh(run, f'python3 -c "{dig}"')
    cli.json("rm", run)
    assert cli.left(run) == []


def test_what_nobody_may_change_is_removed_with_its_run(cli: Cli) -> None:
    run = cli.manual(volumes=[{"path": "/v"}])
    cli.sh(run, "mkdir -p /v/d /root/d; echo x > /v/d/f; echo x > /root/d/f")
    volume = docker("volume", "inspect", "-f", "{{.Mountpoint}}", f"orchestrator-{run}-1").strip()
    upper = docker("inspect", "-f", "{{.GraphDriver.Data.UpperDir}}", f"orchestrator-{run}").strip()
    for place in (f"{volume}/d", f"{upper}/root/d"):
        subprocess.run(["chattr", "+i", f"{place}/f", place], check=True)
    cli.json("rm", run)
    assert cli.left(run) == []


def test_a_volume_that_somebody_else_uses_is_neither_removed_nor_emptied(cli: Cli) -> None:
    run = cli.manual(volumes=[{"path": "/v"}])
    cli.sh(run, "echo x > /v/f")
    name = f"orchestrator-{run}-1"
    stranger = docker("run", "-d", "-v", f"{name}:/x", cli.image, "sleep", "1000").strip()
    try:
        cli("rm", run, code=6)
        assert docker("exec", stranger, "cat", "/x/f").strip() == "x"
    finally:
        docker("rm", "-f", stranger)
    cli("rm", run)
    assert cli.left(run) == []
