"""What a checkpoint and a restore cost, beside what one could use instead, on the same container in one run.

    python -m benchmarks [--rounds 20] [--json FILE]

Each state is made in a fresh container: so many changed files, or so much changed data. Then, per round, one small file
changes and the checkpoint is timed; restores go back and forth between two checkpoints. The peers see the same changes:
``docker commit`` (and ``docker run`` of the result), a bare git repository over the changed files, ``cp -a`` of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from orchestrator.data_dir import DataDir
from orchestrator.engine import Engine
from orchestrator.session import Session
from orchestrator.task import load_task

TASK = "name: bench\nimage: orchestrator-base:latest\nagent: {kind: manual}\n"
STATES = {
    "1,000 files": "mkdir -p /w; cd /w; for i in $(seq 1000); do echo $i > f$i; done",
    "10,000 files": "mkdir -p /w; cd /w; for d in $(seq 200); do mkdir d$d; "
    "for i in $(seq 50); do echo $i > d$d/f$i; done; done",
    "200 MB in one file": "mkdir -p /w; head -c 200M /dev/urandom > /w/blob",
}


@dataclass(frozen=True)
class Row:
    """One figure: milliseconds."""

    state: str
    what: str
    p50_ms: float
    p95_ms: float
    rounds: int


def timed(work: Callable[[int], object], rounds: int) -> list[float]:
    """Milliseconds of each round."""
    found = []
    for number in range(rounds):
        began = time.perf_counter()
        work(number)
        found.append(1e3 * (time.perf_counter() - began))
    return found


def row(state: str, what: str, times: list[float]) -> Row:
    """The figures of one series."""
    ordered = sorted(times)
    return Row(state, what, statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1], len(ordered))


def measure(state: str, make: str, rounds: int, stack: ExitStack) -> list[Row]:
    """All figures of one state."""
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
    (place / "task.yaml").write_text(TASK)
    data_dir = DataDir(place / "data").open()
    data_dir.install_helpers()
    loaded = load_task(place / "task.yaml", environ={})
    session = stack.enter_context(Session.create(loaded, data_dir, Engine.connect(), run_id=f"bench-{os.getpid()}"))
    stack.callback(session.remove_container)
    session.begin()
    session.exec(make)
    first = session.checkpoint(note="first")
    time.sleep(0.1)
    name = session.container.name
    rows: list[Row] = []

    def change(number: int) -> None:
        session.exec(f"echo {number} > /w/changed-{number % 3}")

    captures, frozen = [], []
    for number in range(rounds):
        change(number)
        made = session.checkpoint(note=None)
        captures.append(made.capture_ms)
        frozen.append(session.driver.load(made.snapshot_id or "").frozen_ms)
    rows += [row(state, "checkpoint", captures), row(state, "… frozen", frozen)]
    last = made.breakpoint_id
    ids = [first.breakpoint_id, last]
    restores = [session.restore(ids[number % 2]).restore_ms for number in range(max(4, rounds // 2))]
    rows.append(row(state, "restore", restores))
    few = max(3, rounds // 5)

    def commit(number: int) -> None:
        docker("commit", "--pause=true", name, f"bench-peer:{number}")

    change(1)
    rows.append(row(state, "docker commit", timed(commit, few)))

    def commit_and_run(number: int) -> None:
        commit(100 + number)
        image = f"bench-peer:{100 + number}"
        docker(
            "run", "-d", "--name", f"{name}-peer-{number}", "--network", "none", "--entrypoint", "sleep", image, "60"
        )

    rows.append(row(state, "docker commit + run", timed(commit_and_run, few)))
    for number in range(few):
        docker("rm", "-f", f"{name}-peer-{number}")
        docker("rmi", f"bench-peer:{number}", f"bench-peer:{100 + number}")
    upper = session.container.target().upper_hint
    assert upper is not None
    rows += peers_on_files(state, upper / "w", place, few)
    return rows


def peers_on_files(state: str, tree: Path, place: Path, rounds: int) -> list[Row]:
    """The same changes on the changed files alone, outside of any container."""
    work, bare, copies = place / "work", place / "bare.git", place / "copies"
    shutil.copytree(tree, work)
    copies.mkdir()
    subprocess.run(["git", "init", "-q", "--bare", bare], check=True)
    git = ["git", "--git-dir", str(bare), "--work-tree", str(work), "-c", "user.name=b", "-c", "user.email=b@b"]

    def commit(number: int) -> None:
        (work / "changed").write_text(str(number))
        subprocess.run([*git, "add", "-A"], check=True, capture_output=True)
        subprocess.run([*git, "commit", "-q", "-m", str(number)], check=True, capture_output=True)

    commit(-1)
    rows = [row(state, "git commit", timed(commit, rounds))]
    copy = timed(lambda number: subprocess.run(["cp", "-a", work, copies / str(number)], check=True), rounds)
    return [*rows, row(state, "cp -a", copy)]


def docker(*words: str) -> None:
    """The engine's own client."""
    subprocess.run(["docker", *words], check=True, capture_output=True)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for state, make in STATES.items():
        with ExitStack() as stack:
            rows += measure(state, make, options.rounds, stack)
    table = Table("state", "what", "p50 ms", "p95 ms", "times a checkpoint")
    base = {one.state: one.p50_ms for one in rows if one.what == "checkpoint"}
    for one in rows:
        ratio = one.p50_ms / base[one.state]
        table.add_row(one.state, one.what, f"{one.p50_ms:.1f}", f"{one.p95_ms:.1f}", f"{ratio:.1f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps([vars(one) for one in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
