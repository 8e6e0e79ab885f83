"""Killed, or out of room, at each call that changes the store: it is whole every time, and goes on.

Every third call by default; ``ORCHESTRATOR_FAULT_STRIDE=1`` hits each one (about a minute on a quiet machine).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.fault_injection import WORKS

STRIDE = os.environ.get("ORCHESTRATOR_FAULT_STRIDE", "3")
ROOT = Path(__file__).parents[2]

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="the faults are a library that is compiled")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
    return library


@needs_compiler
@pytest.mark.parametrize("kind", ["kill", "full"])
@pytest.mark.parametrize("work", WORKS)
def test_the_store_is_whole_wherever_it_is_hit(faults: Path, tmp_path: Path, work: str, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.fault_injection", work, kind, tmp_path / "w", STRIDE],
        env={**os.environ, "LD_PRELOAD": str(faults)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30, "so many calls were there to be hit"
