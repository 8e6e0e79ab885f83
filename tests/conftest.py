"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _own_umask() -> Iterator[None]:
    """The command line makes files private for its whole process, which here is that of all tests."""
    mask = os.umask(0o022)
    yield
    os.umask(mask)
