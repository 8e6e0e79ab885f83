"""Known ways in which others lose a run's files, its conversation or its container, through our command line."""

from __future__ import annotations

import json
import threading
import time

import pytest

from orchestrator.lineage import find_checkpoint, live_path, messages
from tests.e2e.case_cli import SUBMIT, Cli, bash, docker, new_id, until
from tests.tree_walker import walk

pytestmark = pytest.mark.engine


# --- case 44: every edit is undone, whoever made it and wherever


def test_a_restore_brings_back_the_whole_container_and_touches_nothing_else(cli: Cli) -> None:
    outside = cli.directory / "outside"
    outside.mkdir()
    (outside / "mine").write_text("1")
    run = cli.manual(
        volumes=[{"path": "/data"}],
        tmpfs=[{"path": "/scratch"}],
        binds=[{"source": str(outside), "path": "/outside", "read_only": False}],
        setup=[
            "mkdir -p /w/out /data/d && cd /w && printf 'out/\\n.env\\n' > .gitignore && echo k=1 > .env"
            " && echo 1 > tracked && echo o > out/old && ln tracked out/hard && echo v > /data/d/f"
            " && echo t > /scratch/t"
        ],
    )
    number = cli.checkpoint(run)
    before, host = cli.tree(run), walk(str(outside))
    cli.sh(
        run,
        "cd /w && echo 2 > tracked && echo k=2 > .env && echo hi > /etc/motd && echo '#!/bin/sh' > /usr/local/bin/t"
        " && chmod +x /usr/local/bin/t && echo n > out/new && mkdir -p /opt/x/y && rm out/old && chmod 700 /w"
        " && p=$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))') && mkdir -p $p/pkg"
        " && echo x=1 > $p/pkg/__init__.py && rm -r /data/d && echo n > /data/new && echo u > /scratch/t"
        " && rm -r /usr/share/doc && ln -sf /nowhere /etc/localtime",
    )
    assert cli.tree(run) != before
    for verify in ("difference", "full"):
        assert cli.json("restore", run, str(number), "--verify", verify)["verified"] == verify
        assert cli.tree(run) == before
    assert walk(str(outside)) == host
    assert cli.json("verify", run, "--content")["whole"]


# --- case 46: conversation and container go together or not at all


@pytest.fixture
def two_steps(cli: Cli) -> str:
    """A run in which /a is 1 at breakpoint 1 and 2 afterwards, which the model has read."""
    task = cli.scripted(bash("echo 1 > /a"), bash("echo 2 > /a; cat /a"), bash("touch /done"), SUBMIT)
    run = new_id()
    assert cli.json("launch", task, "--run-id", run, "--keep")["status"] == "succeeded"
    return run


def test_both_halves_go_back_and_the_next_request_is_the_one_of_then(cli: Cli, two_steps: str) -> None:
    events = cli.events(two_steps)
    asked = messages(live_path(events, find_checkpoint(events, 1).seq))
    assert any(message.get("content", "") for message in cli.conversation(two_steps)[len(asked) :])
    cli("restore", two_steps, "1")
    assert cli.sh(two_steps, "cat /a") == "1\n"
    assert cli.conversation(two_steps) == json.loads(json.dumps(asked))


@pytest.mark.parametrize("damage", ["manifest", "pack"])
def test_an_unreadable_snapshot_moves_neither_half(cli: Cli, two_steps: str, damage: str) -> None:
    snapshot = find_checkpoint(cli.events(two_steps), 1).after
    assert snapshot is not None
    name = f"manifests/{snapshot}.json" if damage == "manifest" else f"packs/{snapshot}.pack"
    before, said = cli.tree(two_steps), cli.conversation(two_steps)
    (cli.place.store / name).rename(cli.directory / "away")
    assert cli.json("restore", two_steps, "1", code=4)["error"]["exit_code"] == 4
    assert (cli.tree(two_steps), cli.conversation(two_steps)) == (before, said)
    assert 1 not in cli.json("verify", two_steps, code=4)["restorable"]
    cli("restore", two_steps, "0")
    (cli.directory / "away").rename(cli.place.store / name)
    cli("restore", two_steps, "1")
    assert cli.sh(two_steps, "cat /a") == "1\n"


def test_a_damaged_message_moves_neither_half(cli: Cli, two_steps: str) -> None:
    path = cli.place.run(two_steps).events_path
    whole = path.read_bytes()
    lines = whole.split(b"\n")
    at = next(number for number, line in enumerate(lines) if b'"kind":"tool_call"' in line)
    lines[at] = lines[at].replace(b"exit code", b"exit c0de").replace(b"echo 1", b"echo 7")
    assert lines[at] != whole.split(b"\n")[at]
    path.write_bytes(b"\n".join(lines))
    before, damaged = cli.tree(two_steps), path.read_bytes()
    error = cli.json("restore", two_steps, "1", code=4)["error"]
    assert error["type"] == "LogDamaged"
    assert (cli.tree(two_steps), path.read_bytes()) == (before, damaged)
    _, err = cli("breakpoints", two_steps)
    assert f"{path}:{at + 1}: " in err
    assert [row["breakpoint_id"] for row in cli.json("breakpoints", two_steps) if not row["damaged"]] == [0]
    assert cli.json("verify", two_steps, code=4)["restorable"] == [0]
    cli("restore", two_steps, "0")
    assert cli.sh(two_steps, "test -e /a; echo $?") == "1\n"


# --- case 47: the container is gone or dead


@pytest.mark.parametrize("end", [("kill",), ("rm", "-f")], ids=["killed", "removed"])
def test_an_agent_whose_container_dies_is_told_and_no_empty_breakpoint_is_made(cli: Cli, end: tuple[str, ...]) -> None:
    run = new_id()
    task = cli.scripted(bash("echo 1 > /a"), bash("touch /begun; sleep 30"), bash("touch /done"), SUBMIT)

    def strike() -> None:
        until(lambda: docker("exec", f"orchestrator-{run}", "ls", "/begun", check=False), 60)
        docker(*end, f"orchestrator-{run}")

    striker = threading.Thread(target=strike)
    striker.start()
    result = cli.json("launch", task, "--run-id", run, code=1)
    striker.join()
    assert (result["status"], result["reason"]) == ("failed", "engine_error")
    events = cli.events(run)
    said = " ".join(event.text for event in events if event.kind == "engine_error")
    assert "container" in said and ("not running" in said or "No such container" in said), said
    assert cli.json("show", run)["text"] in said
    rows = cli.json("breakpoints", run)
    assert [row["breakpoint_id"] for row in rows if row["snapshot_id"] is None or row["damaged"]] == []
    assert len(rows) == 2, "none was taken of a dead container"
    cli("restore", run, "1")
    assert cli.sh(run, "cat /a; test -e /begun; echo $?") == "1\n1\n"


def test_a_stopped_container_may_be_captured_and_says_so_and_a_removed_one_may_not(cli: Cli) -> None:
    run = cli.manual()
    cli.sh(run, "echo 1 > /a")
    docker("kill", f"orchestrator-{run}")
    row = cli.json("checkpoint", run)
    assert row["snapshot_id"] is not None and not row["coverage"]["complete"]
    assert any("did not run" in (item["reason"] or "") for item in row["coverage"]["items"])
    assert "--accept-partial" in cli.json("restore", run, str(row["breakpoint_id"]), code=3)["error"]["message"]
    docker("rm", "-f", f"orchestrator-{run}")
    count = len(cli.json("breakpoints", run))
    error = cli.json("checkpoint", run, code=6)["error"]
    assert f"container orchestrator-{run} is gone" in error["message"]
    assert len(cli.json("breakpoints", run)) == count


def test_a_command_that_eats_all_memory_is_a_result_and_the_container_lives_on(cli: Cli) -> None:
    run = cli.manual(resources={"memory": "64m"})
    before = cli.inspect(run)["Id"]
    eater = "x = bytearray(10**6)\nwhile True: x += bytes(range(256)) * 4000"
    done = cli.json("exec", run, "--", "python3", "-c", eater, code=None)
    assert done["exit_code"] in (137, 1)
    assert cli.json("checkpoint", run)["coverage"]["complete"]
    assert cli.inspect(run)["Id"] == before and cli.inspect(run)["State"]["Running"]


# --- case 48: who holds the container's id


SURROUNDINGS = "pwd; id; umask; env | sort; cat /etc/hostname; hostname"


def test_after_a_restore_the_old_id_still_works(cli: Cli) -> None:
    run = cli.manual(workdir="/w", env={"A": "1"}, network="bridge")
    number = cli.checkpoint(run)
    old, seen = cli.inspect(run)["Id"], cli.sh(run, SURROUNDINGS)
    address = cli.sh(run, "cat /etc/hosts; cat /proc/net/fib_trie")
    cli.sh(run, "rm -rf /w /etc/passwd")
    result = cli.json("restore", run, str(number))
    assert result["container_id"] == result["previous_container_id"] == old
    assert result["previous_container"] == result["container"] == f"orchestrator-{run}"
    docker("exec", old, "true")
    assert cli.sh(run, SURROUNDINGS) == seen
    assert cli.sh(run, "cat /etc/hosts; cat /proc/net/fib_trie") == address


def test_a_neighbour_finds_the_container_at_its_address_after_a_restore(cli: Cli) -> None:
    connect = "import socket; socket.create_connection(('localhost', 8000))"
    web = {
        "name": "web",
        "start": "exec python3 -m http.server 8000 --directory /www",
        "ready": f'python3 -c "{connect}"',
    }
    run = cli.manual(network="bridge", setup=["mkdir /www; echo 1 > /www/page"], daemons=[web])
    number = cli.checkpoint(run)
    cli.sh(run, "echo 2 > /www/page")
    address = docker(
        "inspect", "-f", "{{.NetworkSettings.Networks.bridge.IPAddress}}", f"orchestrator-{run}-net"
    ).strip()
    fetch = f"import urllib.request; print(urllib.request.urlopen('http://{address}:8000/page', timeout=60).read())"
    ask = ("run", "--rm", "--network", "bridge", cli.image, "python3", "-c", fetch)
    assert "b'2" in docker(*ask)
    cli("restore", run, str(number))
    assert "b'1" in docker(*ask)


def test_a_container_that_was_removed_is_made_again_and_both_ids_are_told(cli: Cli) -> None:
    run = cli.manual(workdir="/w", env={"A": "1"}, volumes=[{"path": "/data"}])
    cli.sh(run, "echo 1 > /data/f; echo 1 > /f")
    number = cli.checkpoint(run)
    old, seen, before = cli.inspect(run)["Id"], cli.sh(run, SURROUNDINGS), cli.tree(run)
    docker("rm", "-f", f"orchestrator-{run}", f"orchestrator-{run}-net")
    result = cli.json("restore", run, str(number))
    new = cli.inspect(run)["Id"]
    assert (result["previous_container_id"], result["container_id"], result["previous_container"]) == (old, new, None)
    assert new != old
    assert cli.sh(run, SURROUNDINGS) == seen
    differ = set(cli.tree(run)) ^ set(before)
    # The engine makes these anew in every container, below what is captured; only their times tell them apart.
    assert {line.split(" ")[0] for line in differ} <= {"b'/etc'", "b'/etc/mtab'"}, differ
    docker("rm", "-f", f"orchestrator-{run}")
    out, _ = cli("restore", run, str(number))
    assert f"{new[:12]} → {cli.inspect(run)['Id'][:12]}" in out


# --- case 51: processes


def test_later_processes_are_gone_and_those_of_the_breakpoint_are_named(cli: Cli) -> None:
    run = cli.manual(daemons=[{"name": "clock", "start": "exec sleep 4242"}])
    cli.sh(run, "python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &")
    number = cli.checkpoint(run)
    cli.sh(
        run,
        "python3 -m http.server 8001 --bind 127.0.0.1 >/dev/null 2>&1 & (while :; do date >> /tick; sleep 0.1; done) &",
    )
    until(lambda: cli.sh(run, "test -e /tick && echo yes; true"))
    processes = cli.json("restore", run, str(number))["processes"]
    assert [name.split(" ", 2)[2] for name in processes["missing"]] == [
        "python3 -m http.server 8000 --bind 127.0.0.1"
    ], processes
    assert [name.split(" ", 2)[2] for name in processes["restored"]] == ["sleep 4242"], processes
    time.sleep(0.5)
    running = cli.sh(run, "ps -eo args")
    assert "http.server" not in running and "date" not in running and "sleep 0.1" not in running
    assert cli.sh(run, "test -e /tick; echo $?") == "1\n"
    bind = "import socket; [socket.socket().bind(('127.0.0.1', port)) for port in (8000, 8001)]"
    cli.sh(run, f'python3 -c "{bind}"')
    _, err = cli("restore", run, str(number))
    assert err.count("not running after restore: pid ") == 1 and "http.server 8000" in err
