"""The engine goes down in the middle of a run, and the run goes on when it is there again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.data_dir import DataDir
from tests.e2e.own_engine import OwnEngine, own_engine
from tests.e2e.test_control import SUBMIT, Operator, bash

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def second(base_image: str) -> Iterator[OwnEngine]:
    with own_engine(base_image) as engine:
        yield engine


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_outlives_its_engine(
    second: OwnEngine,
    tmp_path: Path,
    data_dir: DataDir,
    base_image: str,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", second.address)
    operator = Operator(tmp_path, data_dir, base_image)
    run_id = operator.launch(
        bash("echo 1 >> /data/effects; echo 1 > /first"),
        bash("echo 2 >> /data/effects; rm /first; touch begun; sleep 600; true"),
        bash("cat /data/effects > done"),
        SUBMIT,
        volumes=[{"path": "/data"}],
    )
    operator.until(run_id, "tool_start", step=2)
    while "begun" not in second("exec", f"orchestrator-{run_id}", "ls", "/work", check=False):
        time.sleep(0.1)
    second.end(number)
    try:
        said = operator.launched[-1].communicate(timeout=60)[0]
        assert operator.launched[-1].returncode in (1, 6), said
        assert "Traceback" not in said and "engine" in said, said
    finally:
        second.start()
    # The call that was under way runs again from the state before it, and waits again.
    resumed = operator.start("resume", run_id)
    while "begun" not in second("exec", f"orchestrator-{run_id}", "ls", "/work", check=False):
        assert resumed.poll() is None, resumed.communicate()[0]
        time.sleep(0.1)
    second("exec", f"orchestrator-{run_id}", "pkill", "-x", "sleep")
    said, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, said
    tool = operator.until(run_id, "tool_call", step=2)
    assert (tool["attempt"], tool["before"] is not None) == (2, True)
    operator.does("verify", run_id)
    operator.does("restore", run_id, "2")
    assert operator.does("exec", run_id, "--", "cat", "/data/effects") == "1\n2\n", "each effect once"
    operator.does("rm", run_id)
