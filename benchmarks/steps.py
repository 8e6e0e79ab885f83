"""A run of many steps with a model that answers in a second, with checkpoints and without, wall time side by side.

    python -m benchmarks --steps 300

Both runs are whole ones by the command line, in processes of their own, at the same time. The one without checkpoints
has a driver that takes nothing, made known by an entry point as a third party's would be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MODEL_S: Final = 1.0
TASK: Final = """
name: steps
image: orchestrator-base:latest
instruction: Work.
model: {{name: scripted/replies.yaml}}
network: none
limits: {{steps: {steps}}}
"""
REPLY: Final = """
- delay_s: {delay_s}
  repeat: true
  say: I go on.
  calls:
    - name: bash
      arguments:
        command: date >> /root/log; head -c 100000 /dev/urandom > /root/part-$(($(wc -l < /root/log) % 10))
"""
ENTRY_POINT: Final = "[orchestrator.snapshot_drivers]\nnone = benchmarks.no_snapshots:NoSnapshots\n"


@dataclass(frozen=True)
class Course:
    """One run."""

    driver: str
    duration_s: float
    waited_ms: float
    """How long steps waited for their checkpoints, all together."""


def side_by_side(steps: int) -> list[Course]:
    """The run with the default driver and without snapshots."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as name:
        place = Path(name)
        (place / "task.yaml").write_text(TASK.format(steps=steps))
        (place / "replies.yaml").write_text(REPLY.format(delay_s=MODEL_S))
        package = place / "path/bench_none-0.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-none\nVersion: 0\n")
        (package / "entry_points.txt").write_text(ENTRY_POINT)
        with ThreadPoolExecutor(2) as both:
            return list(both.map(lambda driver: _course(place, driver), ("none", "overlay")))


def _course(place: Path, driver: str) -> Course:
    run_id = f"steps-{driver}-{os.getpid()}"
    _orchestrator(place, "launch", str(place / "task.yaml"), "--run-id", run_id, "--driver", driver)
    shown = _orchestrator(place, "show", run_id)
    rows = _orchestrator(place, "breakpoints", run_id)
    return Course(driver, shown["duration_s"], sum(one["waited_ms"] or 0 for one in rows))


def _orchestrator(place: Path, *words: str) -> Any:
    """What a command answers. A run that reached its limit ends with 1."""
    path = os.pathsep.join([str(place / "path"), str(Path(__file__).parents[1])])
    command = [str(Path(sys.executable).with_name("orchestrator")), *words, "--json", "--data-dir", str(place / "data")]
    done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    if done.returncode not in (0, 1):
        raise SystemExit(done.returncode)
    return json.loads(done.stdout)


def show(courses: list[Course]) -> None:
    """Both, and what the checkpoints cost."""
    without, with_them = courses
    for one in courses:
        print(f"driver {one.driver}: {one.duration_s:.1f} s, of which {one.waited_ms:.0f} ms waiting for checkpoints")
    more = with_them.duration_s / without.duration_s - 1
    waited = with_them.waited_ms / 1e3 / with_them.duration_s
    print(f"with checkpoints {100 * more:+.1f} %; steps waited {100 * waited:.2f} % of the run")
