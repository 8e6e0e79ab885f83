"""What a container can write to besides its root filesystem: what goes back, what stays, and the word for it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.container import Container
from orchestrator.data_dir import DataDir
from orchestrator.engine import Engine
from snapshot_drivers.base import CaptureOptions, CoverageState, Snapshot, StateKind
from snapshot_drivers.errors import RestoreRefused
from snapshot_drivers.overlay.driver import OverlayDriver
from tests.e2e.conftest import MakeContainer

pytestmark = pytest.mark.engine
NAMED, KEPT, ODD, TAG = "e2e-vol-named", "e2e-vol-kept", "e2e-vol-odd", "e2e-with-volume:latest"
GOES_BACK = ("/data", "/own", "/named", "/in", "/tm", "/dev/shm", "/dev", "/w")
STAYS = ("/kept", "/odd", "/out")


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def driver(data_dir: DataDir) -> Iterator[OverlayDriver]:
    driver = OverlayDriver(data_dir.store)
    yield driver
    driver.close()


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "odd").mkdir()
    docker("volume", "create", NAMED)
    docker("volume", "create", KEPT)
    docker("volume", "create", "--opt", "type=none", "--opt", "o=bind", "--opt", f"device={tmp_path}/odd", ODD)
    yield
    docker("volume", "rm", "-f", NAMED, KEPT, ODD)


@pytest.fixture
def box(
    volumes: None, container: MakeContainer, engine: Engine, base_image: str, tmp_path: Path
) -> Iterator[Container]:
    (tmp_path / "Dockerfile").write_text(f"FROM {base_image}\nRUN mkdir -p /data && echo 0 > /data/f\nVOLUME /data\n")
    engine.build(tmp_path, "Dockerfile", {}, TAG)
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    made = container(
        image=TAG,
        volumes=[
            {"path": "/own"},
            {"path": "/named", "name": NAMED, "restore": True},
            {"path": "/kept", "name": KEPT},
            {"path": "/odd", "name": ODD, "restore": True},
        ],
        binds=[{"source": str(tmp_path / name), "path": f"/{name}", "read_only": False} for name in ("in", "out")],
        tmpfs=[{"path": "/tm"}],
        snapshots={"include_binds": ["/in"]},
    )
    made.exec("mkdir /w")
    yield made
    made.remove()
    engine.release_image(made.config.run_id)
    docker("rmi", TAG)


def write(box: Container, text: str) -> None:
    for place in (*GOES_BACK, *STAYS):
        assert box.exec(f"echo {text} > {place}/f").exit_code == 0


def read(box: Container, places: tuple[str, ...]) -> set[str]:
    return {box.exec(f"cat {place}/f").output.decode().strip() for place in places}


def restore(box: Container, driver: OverlayDriver, snapshot: Snapshot) -> None:
    staged = driver.stage(box.target(), snapshot.snapshot_id, CaptureOptions())
    try:
        staged.apply(verify="full")
    finally:
        staged.discard()


def test_every_writable_mount_goes_back_or_is_named_and_never_written(box: Container, driver: OverlayDriver) -> None:
    write(box, "1")
    snapshot = driver.capture(box.target(), None, CaptureOptions())
    write(box, "2")
    restore(box, driver, snapshot)
    assert read(box, GOES_BACK) == {"1"}
    assert read(box, STAYS) == {"2"}
    assert snapshot.coverage.complete
    table = box.exec("awk '$6 !~ /^ro/ {print $5}' /proc/self/mountinfo").output.decode().split()
    writable = {path for path in table if not path.startswith(("/proc", "/sys", "/dev/pts"))}
    assert writable >= {"/", "/data", "/etc/hosts"}
    assert writable <= {item.path for item in snapshot.coverage.items if item.kind is not StateKind.PROCESS}
    for path in (*STAYS, "/dev/mqueue"):
        (item,) = [item for item in snapshot.coverage.items if item.path == path]
        assert item.state is CoverageState.EXCLUDED
        assert item.reason


@pytest.mark.parametrize("whose", ["/named", "/own"])
def test_a_volume_that_a_container_outside_of_the_run_mounts_is_not_restored(
    box: Container, driver: OverlayDriver, base_image: str, whose: str
) -> None:
    write(box, "1")
    snapshot = driver.capture(box.target(), None, CaptureOptions())
    name = next(volume.name for volume in box.config.volumes if volume.path == whose)
    docker("run", "-d", "--name", "e2e-stranger", "-v", f"{name}:/x", base_image, "sleep", "1000")
    try:
        write(box, "2")
        beside = driver.capture(box.target(), snapshot.snapshot_id, CaptureOptions())
        (item,) = [item for item in beside.coverage.items if item.state is CoverageState.UNKNOWN]
        assert item.path == whose
        assert "e2e-stranger" in str(item.reason)
        with pytest.raises(RestoreRefused, match="e2e-stranger"):
            restore(box, driver, snapshot)
        docker("kill", "e2e-stranger")
        with pytest.raises(RestoreRefused, match=r"e2e-stranger \(stopped\)"):
            restore(box, driver, snapshot)
        assert read(box, GOES_BACK) == {"2"}
    finally:
        docker("rm", "-f", "e2e-stranger")
    restore(box, driver, snapshot)
    assert read(box, GOES_BACK) == {"1"}
