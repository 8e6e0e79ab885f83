"""The static helpers, built once a test session from the sources of this repository."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@functools.cache
def built_helpers() -> Path:
    """A directory with ``launch`` and ``enter``."""
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler: run deploy/packages")
    directory = Path(tempfile.mkdtemp(prefix="helpers-"))
    directory.chmod(0o755)  # the container's PID 1 is nobody special
    done = subprocess.run([REPOSITORY / "deploy" / "helpers", directory], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return directory
