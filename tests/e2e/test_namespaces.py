"""What the helper brings out of a container's mount namespace, and what it refuses to be led to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_drivers.errors import ContainerNotRunning, EngineError, UnsupportedHost
from snapshot_drivers.namespaces import helper_path, mount_table, open_mounts
from tests.e2e.plain_container import PlainContainer, below_another_root, build_enter, plain_container

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_enter(tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module")
def container() -> Iterator[PlainContainer]:
    with plain_container("mounts", tmpfs={"/fast": "size=8m", "/a/b c/d": "size=1m"}) as made:
        yield made


@pytest.fixture
def opened(container: PlainContainer, helper: Path) -> Iterator[dict[str, int]]:
    made = open_mounts(
        container.init_pid,
        ["/fast", "/nowhere", "/etc", "/a/b c/d", "/dev/shm", "/etc/passwd", "/dev/../fast"],
        helper=helper,
        container_id=container.container_id,
    )
    yield made
    for descriptor in made.values():
        os.close(descriptor)


def test_mounts_are_opened_and_what_is_no_mount_is_absent(container: PlainContainer, opened: dict[str, int]) -> None:
    assert set(opened) == {"/fast", "/a/b c/d", "/dev/shm", "/dev/../fast"}
    container.must("echo in tmpfs > /fast/file")
    with open(os.open("file", os.O_RDONLY, dir_fd=opened["/fast"])) as file:
        assert file.read() == "in tmpfs\n"


def test_no_way_leads_up_from_a_detached_mount(opened: dict[str, int]) -> None:
    above = os.open("../../..", os.O_PATH, dir_fd=opened["/fast"])
    try:
        assert os.fstat(above).st_ino == os.fstat(opened["/fast"]).st_ino
        assert os.fstat(above).st_dev == os.fstat(opened["/fast"]).st_dev
    finally:
        os.close(above)


def test_descriptors_are_not_inherited(opened: dict[str, int]) -> None:
    assert not any(os.get_inheritable(descriptor) for descriptor in opened.values())


def test_a_link_on_the_way_makes_the_mount_absent(container: PlainContainer, helper: Path) -> None:
    container.must("mv /a /moved && ln -s /moved /a")
    try:
        assert open_mounts(container.init_pid, ["/a/b c/d"], helper=helper) == {}
    finally:
        container.must("rm /a && mv /moved /a")


def test_the_mount_table_is_the_containers(container: PlainContainer, helper: Path) -> None:
    lines = {line.mount_point: line for line in mount_table(container.init_pid, helper=helper)}
    assert lines["/"].fs_type == "overlay"
    assert lines["/fast"].fs_type == "tmpfs"
    assert "/a/b c/d" in lines
    assert "/.init" in lines


def test_a_first_process_that_changed_its_root_changes_nothing(helper: Path) -> None:
    with below_another_root() as container:
        pid = container.init_pid
        assert "/fast" in {line.mount_point for line in mount_table(pid, helper=helper)}
        found = open_mounts(pid, ["/fast", "/fake"], helper=helper)
        for descriptor in found.values():
            os.close(descriptor)
        assert set(found) == {"/fast"}


def test_a_process_of_the_host_or_of_another_container_is_refused(container: PlainContainer, helper: Path) -> None:
    with pytest.raises(EngineError, match="no container's"):
        mount_table(os.getpid(), helper=helper)
    with pytest.raises(ContainerNotRunning, match="does not belong"):
        open_mounts(container.init_pid, ["/fast"], helper=helper, container_id="f" * 64)


def test_a_dead_process_is_told(helper: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(ContainerNotRunning, match="is gone"):
        mount_table(process.pid, helper=helper)


def test_a_helper_that_is_not_there_is_told(tmp_path: Path, container: PlainContainer) -> None:
    with pytest.raises(UnsupportedHost, match="make -C images/enter"):
        helper_path(tmp_path)
    with pytest.raises(UnsupportedHost, match="cannot read the helper"):
        mount_table(container.init_pid, helper=tmp_path / "enter")
    (tmp_path / "enter").write_text("not a program")
    with pytest.raises(UnsupportedHost, match="cannot run"):
        mount_table(container.init_pid, helper=tmp_path / "enter")


def test_a_loop_that_swaps_a_directory_for_a_link_never_leads_to_another_mount(
    container: PlainContainer, helper: Path
) -> None:
    inside = container.must("stat -c %d /a/*/d").strip()
    container.leave_running(
        "mkdir -p /decoy/d; while [ ! -e /stop ]; do mv /a /b; ln -s / /a; rm /a; mv /b /a; done; touch /stopped"
    )
    pid, shown = container.init_pid, 0
    for _ in range(50):
        found = open_mounts(pid, ["/a/b c/d"], helper=helper)
        for descriptor in found.values():
            assert str(os.fstat(descriptor).st_dev) == inside
            os.close(descriptor)
            shown += 1
    container.must("touch /stop; while [ ! -e /stopped ]; do sleep 0.01; done")
    print(f"\nopened {shown} of 50 while it was swapped")


def test_no_descriptor_and_no_process_is_left(container: PlainContainer, helper: Path) -> None:
    before = os.listdir("/proc/self/fd")
    children = Path("/proc/thread-self/children").read_text()
    for _ in range(5):
        mount_table(container.init_pid, helper=helper)
    assert os.listdir("/proc/self/fd") == before
    assert Path("/proc/thread-self/children").read_text() == children
