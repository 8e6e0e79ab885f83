"""The doctor beside a real engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.doctor import examine
from orchestrator.engine import Engine
from orchestrator.errors import HostError


@pytest.mark.engine
def test_every_finding_about_a_working_engine_is_made_and_nothing_stays_behind(tmp_path: Path) -> None:
    try:
        engine = Engine.connect(os.environ.get("DOCKER_HOST"))
    except HostError as error:
        pytest.skip(str(error))
    findings = {finding.name: finding for finding in examine(tmp_path, connect=lambda: engine)}
    assert findings["engine"].ok
    assert findings["engine"].found.startswith(f"version {engine.facts().version}")
    assert findings["storage driver"].found == f"{engine.facts().storage_driver} in {engine.facts().data_root}"
    assert findings["control groups"].ok
    if findings["base image"].ok and findings["storage driver"].ok and os.geteuid() == 0:
        assert findings["upper directory"].ok
    assert findings["runc"].needed is False
    assert engine.list_ours(run_id=f"doctor-{os.getpid()}") == []
    engine.close()
