"""Fixtures of the tests of probes: a container, and a check of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checks import CheckResult, Probe
from orchestrator.task import CheckSpec
from snapshot_drivers.overlay.layers import find_layers
from snapshot_drivers.view import Outcome, run_in_view
from tests.e2e.plain_container import PlainContainer, build_enter, plain_container

pytestmark = pytest.mark.engine

CANARY = "CANARY-4d1f"
Check = Callable[..., CheckResult]


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_enter(tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module")
def container() -> Iterator[PlainContainer]:
    with plain_container("probe", mem_limit="128m", pids_limit=64, tmpfs={"/fast": "size=4m"}) as made:
        yield made


def checker(container: PlainContainer, helper: Path) -> Check:
    def run(command: str, timeout_s: float = 20) -> CheckResult:
        spec = CheckSpec(name="c", probe=command, timeout_s=timeout_s, feedback="no")
        return Probe(container, helper).run(spec)

    return run


@pytest.fixture
def check(container: PlainContainer, helper: Path) -> Check:
    return checker(container, helper)


def said(result: CheckResult) -> str:
    assert result.error is None, result.error
    return result.output.decode(errors="replace")


# What a check can see and do.


def view(container: PlainContainer, helper: Path, script: str, **options: Any) -> Outcome:
    layers = [*options.pop("above", []), *find_layers(container.target()).lower]
    return run_in_view(container.target(), script, layers=layers, helper=helper, **options)


def tree(container: PlainContainer) -> list[str]:
    upper = find_layers(container.target()).upper
    return [
        f"{path.relative_to(upper)} {status.st_mode:o} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
        for path in sorted(upper.rglob("*"))
        for status in [path.lstat()]
    ]
