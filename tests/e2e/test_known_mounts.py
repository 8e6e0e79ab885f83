"""The mounts of a container are opened once, and again whenever anything about them is another thing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_drivers import known_mounts
from snapshot_drivers.errors import ContainerNotRunning
from snapshot_drivers.known_mounts import KnownMounts
from snapshot_drivers.namespaces import OpenedMounts
from tests.e2e.plain_container import PlainContainer, below_another_root, build_enter, plain_container

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_enter(tmp_path_factory.mktemp("bin"))


@pytest.fixture
def container() -> Iterator[PlainContainer]:
    with plain_container("known", tmpfs={"/fast": "size=8m", "/a/b": "size=1m"}, cap_add=["SYS_ADMIN"]) as made:
        yield made


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each start of the helper."""
    found: list[int] = []
    opened = known_mounts.opened_mounts

    def counted(init_pid: int, *arguments: object, **named: object) -> OpenedMounts:
        found.append(init_pid)
        return opened(init_pid, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(known_mounts, "opened_mounts", counted)
    return found


@pytest.fixture
def mounts(container: PlainContainer, helper: Path) -> Iterator[KnownMounts]:
    made = KnownMounts(container.container_id, helper)
    yield made
    made.close()


def files(mounts: KnownMounts, init_pid: int, *paths: str) -> dict[str, list[str]]:
    """What lies in the mounts; their descriptors are closed again."""
    opened = mounts.open(init_pid, paths)
    found = {}
    for path, descriptor in opened.roots.items():
        with os.scandir(f"/proc/self/fd/{descriptor}") as entries:
            found[path] = sorted(entry.name for entry in entries)
        os.close(descriptor)
    return found


def test_the_second_look_starts_no_helper_and_sees_what_is_there_now(
    container: PlainContainer, mounts: KnownMounts, visits: list[int]
) -> None:
    pid = container.init_pid
    assert files(mounts, pid, "/fast", "/a/b") == {"/fast": [], "/a/b": []}
    container.must("touch /fast/new")
    assert files(mounts, pid, "/fast", "/a/b") == {"/fast": ["new"], "/a/b": []}
    assert len(visits) == 1
    assert files(mounts, pid, "/fast") == {"/fast": ["new"]}
    assert len(visits) == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("mount -t tmpfs other /fast && touch /fast/other", {"/fast": ["other"], "/a/b": []}),
        ("umount /fast", {"/a/b": []}),
        ("umount /fast && mount -t tmpfs tmpfs /fast && touch /fast/again", {"/fast": ["again"], "/a/b": []}),
        ("mv /a /moved && ln -s /moved /a", {"/fast": []}),
    ],
)
def test_whatever_happens_to_a_mount_is_seen(
    container: PlainContainer, mounts: KnownMounts, visits: list[int], change: str, expected: dict[str, list[str]]
) -> None:
    pid = container.init_pid
    files(mounts, pid, "/fast", "/a/b")
    container.must(change)
    assert files(mounts, pid, "/fast", "/a/b") == expected
    assert len(visits) == 2


def test_a_container_that_was_started_again_is_another_one(
    container: PlainContainer, mounts: KnownMounts, visits: list[int]
) -> None:
    before = container.init_pid
    container.must("touch /fast/lost")
    files(mounts, before, "/fast")
    container.handle.kill()
    container.handle.wait()
    with pytest.raises(ContainerNotRunning):
        mounts.open(before, ["/fast"])
    container.handle.start()
    assert files(mounts, container.init_pid, "/fast") == {"/fast": []}
    assert len(visits) == 2


def test_a_first_process_that_moves_to_other_mounts_is_noticed(helper: Path, visits: list[int]) -> None:
    hostile = (
        "use POSIX; $SIG{USR1} = sub { syscall(272, 0x20000); system('mount -t tmpfs x /fast; touch /fast/decoy') };"
        "sleep 1 while 1"
    )
    options = {"entrypoint": ["perl", "-e", hostile], "command": [], "user": "root", "tmpfs": {"/fast": ""}}
    with plain_container("moving", cap_add=["SYS_ADMIN"], **options) as container:
        mounts = KnownMounts(container.container_id, helper)
        pid = container.init_pid
        assert files(mounts, pid, "/fast") == {"/fast": []}
        space = os.readlink(f"/proc/{pid}/ns/mnt")
        container.must("kill -USR1 1")
        while os.readlink(f"/proc/{pid}/ns/mnt") == space:
            assert Path(f"/proc/{pid}").exists()
        files(mounts, pid, "/fast")
        assert len(visits) == 2
        mounts.close()


def test_closed_it_holds_nothing(container: PlainContainer, mounts: KnownMounts) -> None:
    before = len(os.listdir("/proc/self/fd"))
    files(mounts, container.init_pid, "/fast", "/a/b")
    assert len(os.listdir("/proc/self/fd")) > before
    mounts.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_first_process_below_another_root_is_never_believed(helper: Path, visits: list[int]) -> None:
    with below_another_root() as container:
        pid = container.init_pid
        mounts = KnownMounts(container.container_id, helper)
        assert files(mounts, pid, "/fast") == files(mounts, pid, "/fast") == {"/fast": []}
        assert len(visits) == 2
        mounts.close()
