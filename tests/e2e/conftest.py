"""What tests on a real engine need: the engine, an image, a data directory with the static helpers, containers."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import recorded_run, resumed_run
from orchestrator.container import Container
from orchestrator.data_dir import DataDir
from orchestrator.engine import Engine
from orchestrator.errors import HostError
from orchestrator.task import TaskSpec
from snapshot_drivers.cgroups import hierarchies
from tests.built_helpers import built_helpers
from tests.e2e.case_cli import Cli
from tests.e2e.scripted_damage import TASK

REPOSITORY = Path(__file__).parents[2]
IMAGES = ("orchestrator-base:latest", "base:test")

MakeContainer = Callable[..., Container]


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The engine of this host; without one, or without root, these tests say so and are skipped."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    try:
        found = Engine.connect(os.environ.get("DOCKER_HOST"))
    except HostError as error:
        pytest.skip(str(error))
    yield found
    found.close()


@pytest.fixture(scope="session")
def base_image(engine: Engine) -> str:
    """Name of a small Debian image with Python and procps."""
    for name in IMAGES:
        try:
            engine.image(name)
        except HostError:
            continue
        return name
    pytest.skip(f"needs one of the images {', '.join(IMAGES)}: run deploy/base-image")


@pytest.fixture(scope="session")
def helpers() -> Path:
    """A directory with the helpers, built from the sources of this repository."""
    return built_helpers()


@pytest.fixture
def limits() -> None:
    """The engine can limit processes, memory and processors: version 2 cannot what version 1 has in its hands."""
    version_2 = [found for found in hierarchies() if found.version == 2]
    if version_2 == hierarchies() and "pids" not in (version_2[0].mount_point / "cgroup.controllers").read_text():
        pytest.skip("control groups of version 2 have no controllers on this host")


@pytest.fixture
def data_dir(tmp_path: Path, helpers: Path) -> DataDir:
    """An empty data directory with the helpers in its ``bin``."""
    found = DataDir(tmp_path / "data").open()
    for file in helpers.iterdir():
        shutil.copy2(file, found.bin / file.name)
        (found.bin / file.name).chmod(0o755)
    found.bin.chmod(0o755)  # the container's init is nobody special
    return found


@pytest.fixture
def new_task(base_image: str) -> Callable[..., TaskSpec]:
    """Makes a task on the base image; keywords are the keys of ``task.yaml``."""

    def make(**keys: Any) -> TaskSpec:
        task = {"name": "e2e", "image": base_image, "agent": {"kind": "manual"}}
        return TaskSpec.model_validate({**task, **keys})

    return make


@pytest.fixture
def container(
    engine: Engine, data_dir: DataDir, new_task: Callable[..., TaskSpec], request: pytest.FixtureRequest
) -> Iterator[MakeContainer]:
    """Makes running containers; keywords are the keys of ``task.yaml``. All are removed afterwards."""
    made: list[Container] = []

    def make(*, run_id: str | None = None, **keys: Any) -> Container:
        name = run_id or f"e2e-{secrets.token_hex(4)}"
        made.append(Container.create(engine, data_dir, name, new_task(**keys)))
        return made[-1]

    yield make
    for one in made:
        one.remove()
        engine.release_image(one.config.run_id)


@pytest.fixture
def cli(
    tmp_path: Path, data_dir: DataDir, engine: Engine, base_image: str, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """The command line, on the test's data directory; its runs are removed afterwards."""
    if shutil.which("docker") is None:
        pytest.skip("needs the docker command")
    mask = os.umask(0o077)
    found = Cli(tmp_path, data_dir, engine, base_image, capsys)
    yield found
    for run in data_dir.runs():
        found("rm", run.run_id)
    os.umask(mask)


@pytest.fixture
def open_run(cli: Cli, base_image: str, engine: Engine, data_dir: DataDir) -> Iterator[Callable[..., Any]]:
    """Opens a recorded run, or takes one up again when there is one of that id."""

    def opened(run_id: str, **keys: Any) -> Any:
        if any(run.run_id == run_id for run in data_dir.runs()):
            return resumed_run(run_id, data_dir=data_dir.root, engine=engine)
        task = {**TASK, "image": base_image, **keys}
        return recorded_run(task, run_id=run_id, data_dir=data_dir.root, engine=engine)

    yield opened
