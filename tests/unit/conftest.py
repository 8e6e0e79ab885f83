"""Fixtures of the tests that need no engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.archive_maker import RUN, Host, make_run, run_cli


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A true archive."""
    if os.geteuid() != 0:
        pytest.skip("needs root: the run's tree holds what only root can make")
    top = tmp_path_factory.mktemp("origin")
    place = make_run(top)
    assert run_cli("pack", RUN, "--data-dir", str(place.root), "--to", str(top / "a.tar"), "--without-image") == 0
    return top / "a.tar"


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host without an engine, to which hostile archives come."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine.sock")
    return Host(tmp_path, capsys)
