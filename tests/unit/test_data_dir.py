"""The data directory is ours alone, runs are found by name, and one process drives a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.container_config import ImageFacts, config_of
from orchestrator.data_dir import HELPERS, DataDir, new_run_id
from orchestrator.errors import Busy, HostError, LogDamaged, UsageError
from orchestrator.run_dir import write_file
from orchestrator.run_record import RunRecord
from orchestrator.task import TaskSpec


@pytest.fixture
def data_dir(tmp_path: Path) -> DataDir:
    return DataDir(tmp_path / "state" / "orchestrator").open()


def record_of(data_dir: DataDir, run_id: str, created_at: str = "2026-01-01T00:00:00+00:00") -> RunRecord:
    image = ImageFacts(image_id="sha256:1", layer_ids=("sha256:2",), architecture="amd64")
    spec = TaskSpec(name="t", image="base")
    config = config_of(
        spec, image, run_id=run_id, data_dir=data_dir.root, helpers=data_dir.bin, cgroup_driver="cgroupfs"
    )
    return RunRecord(
        run_id=run_id,
        created_at=created_at,
        orchestrator_version="0.1.0",
        task_name="t",
        driver="overlay",
        source_dir="/src",
        container=config,
    )


def test_it_is_made_private_with_its_parts_and_opening_is_repeatable(data_dir: DataDir) -> None:
    old = os.umask(0)
    try:
        data_dir.open()
        run = data_dir.create_run("a", task_text="name: a\n")
        run.write_record(record_of(data_dir, "a"))
        with run.lock():
            pass
    finally:
        os.umask(old)
    for path in [data_dir.root, *data_dir.root.rglob("*")]:
        allowed = 0o755 if path == data_dir.bin else 0o700
        assert path.stat().st_mode & 0o777 & ~allowed == 0, path
    assert data_dir.store.is_dir()
    assert data_dir.bin.stat().st_mode & 0o777 == 0o755, "the containers' init must be able to look into it"


def test_a_directory_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o755)
    (tmp_path / "d").chmod(0o755)
    with pytest.raises(HostError, match="chmod 0700"):
        DataDir(tmp_path / "d").open()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory that belongs to somebody else")
def test_somebody_elses_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o700)
    os.chown(tmp_path / "d", 12345, -1)
    with pytest.raises(HostError, match="belongs to uid 12345"):
        DataDir(tmp_path / "d").open()


def test_links_among_its_parts_are_not_followed(tmp_path: Path, data_dir: DataDir) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    data_dir.store.rmdir()
    data_dir.store.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostError, match="not a directory"):
        data_dir.open()
    (data_dir.root / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    assert data_dir.runs() == []
    with pytest.raises(UsageError):
        data_dir.run("link")


def test_helpers_are_installed_where_they_differ_and_missing_ones_are_named(data_dir: DataDir, tmp_path: Path) -> None:
    with pytest.raises(HostError, match="deploy/helpers"):
        data_dir.install_helpers(tmp_path / "none")
    source = tmp_path / "helpers"
    source.mkdir()
    for name in HELPERS:
        (source / name).write_bytes(name.encode())
    old = os.umask(0o077)
    try:
        data_dir.install_helpers(source)
    finally:
        os.umask(old)
    before = {name: (data_dir.bin / name).stat() for name in HELPERS}
    assert all(found.st_mode & 0o777 == 0o755 for found in before.values())
    (source / "launch").write_bytes(b"newer")
    data_dir.install_helpers(source)
    assert (data_dir.bin / "launch").read_bytes() == b"newer"
    assert (data_dir.bin / "enter").stat().st_ino == before["enter"].st_ino
    data_dir.install_helpers(tmp_path / "none")


def test_a_run_id_is_taken_once_and_well_formed(data_dir: DataDir) -> None:
    data_dir.create_run("a", task_text="x")
    with pytest.raises(UsageError, match="run a exists"):
        data_dir.create_run("a", task_text="y")
    for bad in ("", "-a", "A", "../x", "a/b", "a" * 64, "last", "a\n"):
        with pytest.raises(UsageError, match="cannot be a run id"):
            data_dir.create_run(bad, task_text="x")
    assert data_dir.run("a").task_path.read_text() == "x"


def test_new_ids_are_valid_and_differ() -> None:
    ids = {new_run_id("t" * 63) for _ in range(50)}
    assert len(ids) == 50
    assert all(len(run_id) <= 63 for run_id in ids)


def test_a_run_is_found_by_id_unique_beginning_and_last(data_dir: DataDir) -> None:
    for run_id, day in (("web", "03"), ("web-1", "01"), ("db-1", "02")):
        run = data_dir.create_run(run_id, task_text="x")
        run.write_record(record_of(data_dir, run_id, f"2026-01-{day}T00:00:00+00:00"))
    assert [run.run_id for run in data_dir.runs()] == ["web-1", "db-1", "web"]
    assert data_dir.find("web").run_id == "web"
    assert data_dir.find("web-").run_id == "web-1"
    assert data_dir.find("d").run_id == "db-1"
    assert data_dir.find("last").run_id == "web"
    with pytest.raises(UsageError, match="begins 2 run ids"):
        data_dir.find("we")
    for name in ("", "x", "../web"):
        with pytest.raises(UsageError, match="no run"):
            data_dir.find(name)


def test_last_of_no_runs_is_an_error_with_a_remedy(data_dir: DataDir) -> None:
    with pytest.raises(UsageError, match="orchestrator launch"):
        data_dir.find("last")


def test_the_record_comes_back_and_a_damaged_one_is_named(data_dir: DataDir) -> None:
    run = data_dir.create_run("a", task_text="x")
    with pytest.raises(LogDamaged, match="orchestrator rm a"):
        run.read_record()
    record = record_of(data_dir, "a")
    run.write_record(record)
    assert run.read_record() == record
    run.record_path.write_text('{"v": 1}')
    with pytest.raises(LogDamaged, match=r"run\.json cannot be understood"):
        run.read_record()
    assert run.created_at()


def test_a_file_is_replaced_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_file(tmp_path / "f", b"one")
    write_file(tmp_path / "f", b"two")
    assert (tmp_path / "f").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    with pytest.raises(HostError):
        write_file(tmp_path / "none" / "f", b"x")


def test_the_lock_excludes_names_its_owner_and_goes_with_the_block(data_dir: DataDir) -> None:
    run = data_dir.create_run("a", task_text="x")
    assert not run.is_locked()
    with run.lock():
        assert run.is_locked()
        with pytest.raises(Busy, match=f"process {os.getpid()}"), data_dir.run("a").lock():
            pass
    assert not run.is_locked()
    with run.lock():
        pass


def test_the_lock_goes_with_a_killed_process(data_dir: DataDir) -> None:
    run = data_dir.create_run("a", task_text="x")
    code = (
        "import sys, time; from pathlib import Path; from orchestrator.run_dir import RunDir\n"
        "with RunDir(Path(sys.argv[1])).lock(): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(Busy, match=f"process {child.pid}"), run.lock():
            pass
        child.kill()
    with run.lock():
        pass


def test_removing_a_run_frees_its_id_and_wakes_no_ghost(data_dir: DataDir) -> None:
    run = data_dir.create_run("a", task_text="x")
    with run.lock():
        run.remove()
    assert data_dir.runs() == []
    assert list((data_dir.root / "runs").iterdir()) == []
    with pytest.raises(UsageError, match="removed meanwhile"), run.lock():
        pass
    data_dir.create_run("a", task_text="x")
