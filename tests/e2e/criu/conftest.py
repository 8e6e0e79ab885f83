"""Fixtures of the criu driver's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchestrator.container import Container
from orchestrator.data_dir import DataDir
from snapshot_drivers.criu.gateway import DEFAULT_PREFIX
from tests.e2e.criu.program_image import program_image
from tests.e2e.criu.programs import packages
from tests.e2e.criu.rewindable import Make, Rewindable


@pytest.fixture
def make(container: Callable[..., Container], data_dir: DataDir) -> Iterator[Make]:
    """Makes containers with the driver; ``task``: keys of the task, other keywords: options of the driver."""
    if not (DEFAULT_PREFIX / "join.so").exists():
        pytest.skip("needs the CRIU that deploy/criu brings")
    made: list[Rewindable] = []

    def one(task: dict[str, Any] | None = None, **options: Any) -> Rewindable:
        made.append(Rewindable(container(**(task or {})), data_dir, **options))
        return made[-1]

    yield one
    for place in made:
        place.driver.close()


@pytest.fixture(scope="session")
def programs_image(base_image: str) -> str:
    """Name of an image with the programs of the table; made once for its list of packages."""
    return program_image(base_image, packages())
