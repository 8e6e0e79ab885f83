"""Runs with the drivers ``git`` and ``commit``: an agent rewinds, an operator restores and removes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.case_cli import SUBMIT, Cli, bash, docker, new_id

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SECRET = "s3cr3t-of-the-operator"


def rewind(breakpoint_id: int) -> dict[str, Any]:
    arguments = {"breakpoint_id": breakpoint_id, "memory_summary": "do not delete the notes"}
    return {"calls": [{"name": "backtrack_commit", "arguments": arguments}]}


def launched(cli: Cli, driver: str, *replies: dict[str, Any], **keys: Any) -> str:
    run_id = new_id()
    task = cli.scripted(*replies, snapshots={"driver": driver, **keys.pop("snapshots", {})}, keep=True, **keys)
    done = cli.json("launch", task, "--run-id", run_id)
    assert (done["status"], done["rewinds"]) == ("succeeded", 1)
    return run_id


def snapshots(cli: Cli, run_id: str) -> set[str]:
    events = cli.events(run_id)
    return {name for event in events for name in (event.before, event.after) if name is not None}


def images(run_id: str) -> list[str]:
    return docker("images", "-q", "--filter", f"label=orchestrator.run={run_id}").split()


def test_git_takes_the_workspace_back_and_leaves_the_rest_and_the_tasks_own_repository_alone(cli: Cli) -> None:
    run_id = launched(
        cli,
        "git",
        bash("mkdir -p .git sub && echo mine > .git/HEAD && echo notes > sub/notes && chmod +x sub/notes && ln -s a l"),
        bash("rm -r sub l && echo theirs > .git/HEAD && touch junk /outside && echo x > .git/index"),
        rewind(1),
        bash("touch /done"),
        SUBMIT,
        checklist=[
            {"name": "all", "scratch": "test -e /done && test -e sub/notes && rm -r sub /done", "feedback": "no"},
            {
                "name": "still",
                "probe": "test -e /target/done && test -e /target/srv/work/sub/notes",
                "feedback": "gone",
            },
        ],
        workdir="/srv/work",
    )
    assert cli.sh(run_id, "cat sub/notes; readlink l; test -x sub/notes && ls; cat .git/HEAD .git/index").split() == [
        "notes", "a", "l", "sub", "theirs", "x",
    ]  # fmt: skip
    cli.sh(run_id, "test -e /outside")
    row = next(row for row in cli.json("breakpoints", run_id) if row["breakpoint_id"] == 1)
    assert row["driver"] == "git"
    states = {(item["path"], item["state"]) for item in row["coverage"]["items"]}
    assert {("/srv/work", "captured"), ("/", "excluded"), ("/srv/work/.git", "excluded")} <= states
    cli.sh(run_id, "rm -r sub")
    cli("restore", run_id, "1", "--verify", "full")
    assert len(git(cli.place.store / "git/objects.git", "for-each-ref").splitlines()) == len(snapshots(cli, run_id))
    assert cli.sh(run_id, "cat sub/notes").strip() == "notes"
    assert cli.is_whole(run_id)
    repository = cli.place.store / "git/objects.git"
    assert git(repository, "for-each-ref")
    cli("rm", run_id)
    assert not git(repository, "for-each-ref")
    assert git(repository, "count-objects", "-v").startswith("count: 0\n")


def git(repository: Path, *words: str) -> str:
    return subprocess.run(["git", f"--git-dir={repository}", *words], check=True, capture_output=True, text=True).stdout


def test_commit_takes_the_root_filesystem_back_into_a_new_container_and_no_secret_into_an_image(cli: Cli) -> None:
    run_id = new_id()
    task = cli.scripted(
        bash('test -n "$TOKEN" && echo notes > /notes && mkdir /etc/mine'),
        bash("rm -r /notes /etc/mine /usr/bin/env && touch /junk && sleep 600 & sleep 0.1"),
        rewind(1),
        bash("touch /done"),
        SUBMIT,
        checklist=[
            {"name": "done", "scratch": "test -e /done && touch /scratched", "feedback": "/done is missing"},
            {"name": "env", "probe": "test -e /usr/bin/env && test ! -e /notes", "feedback": "the image was changed"},
        ],
        snapshots={"driver": "commit"},
        env={"TOKEN": {"from_env": "TOKEN", "secret": True}},
        keep=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKEN", SECRET)
        assert cli.json("launch", task, "--run-id", run_id)["status"] == "succeeded"
    first = cli.events(run_id)[0].container_id  # type: ignore[union-attr]
    assert cli.inspect(run_id)["Id"] != first
    assert cli.sh(run_id, "cat /notes; ls -d /etc/mine /usr/bin/env").split() == ["notes", "/etc/mine", "/usr/bin/env"]
    cli.sh(run_id, "test -e /junk", code=1)
    assert images(run_id)
    assert SECRET not in docker("inspect", *images(run_id))
    tags = docker(
        "images", "orchestrator-snapshot", "--filter", f"label=orchestrator.run={run_id}", "--format", "{{.Tag}}"
    )
    assert set(tags.split()) == snapshots(cli, run_id)
    docker("commit", f"orchestrator-{run_id}", "orchestrator-snapshot:s-left-by-a-process-that-died")
    answer = cli.json("restore", run_id, "1", "--verify", "full")
    assert answer["container_id"] == cli.inspect(run_id)["Id"] != answer["previous_container_id"]
    assert cli.json("verify", run_id)["whole"]
    cli("rm", run_id)
    assert images(run_id) == []
    assert cli.left(run_id) == []


def test_commit_names_volumes_that_the_task_wants_back_and_leaves_them(cli: Cli) -> None:
    run_id = cli.manual(snapshots={"driver": "commit"}, volumes=[{"path": "/data"}])
    cli.sh(run_id, "echo 1 > /data/f; echo 1 > /f")
    taken = cli.checkpoint(run_id)
    cli.sh(run_id, "echo 2 > /data/f; echo 2 > /f")
    _, refused = cli("restore", run_id, str(taken), code=3)
    assert "/data" in refused
    cli("restore", run_id, str(taken), "--accept-partial")
    assert cli.sh(run_id, "cat /f /data/f").split() == ["1", "2"]
