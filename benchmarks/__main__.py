"""What a checkpoint and a restore cost, beside what one could use instead, on the same container in one run.

    python -m benchmarks [--shape NAME]... [--rounds 20] [--without-peers] [--json FILE] [--chart FILE]
    python -m benchmarks --steps 300          a run with checkpoints and one without (see ``steps``)

Each state is made in a fresh container. Then, per round, something changes and a checkpoint is timed, until its line is
synced; restores go back and forth between two of them. The peers see the same changes: ``docker commit`` (and a
container of the result), a bare git repository, restic and ``cp -a`` over the changed files alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import steps
from benchmarks.chart import chart
from benchmarks.peers import engine_commit, on_files, synced_copy
from benchmarks.series import Row, docker, row, show, timed
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timed_lifecycle import TimedLifecycle
from orchestrator.data_dir import DataDir
from orchestrator.engine import Engine
from orchestrator.session import Session
from orchestrator.task import load_task
from snapshot_drivers.errors import EngineError

TASK = "name: bench\nimage: orchestrator-base:latest\nagent: {kind: manual}\n"
LARGE_ROUNDS, PEER_ROUNDS, REMOVAL_S = 5, 5, 900


def measure(shape: Shape, rounds: int, *, peers: bool, stack: ExitStack) -> list[Row]:
    """All figures of one state."""
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp")))
    (place / "task.yaml").write_text(TASK)
    data_dir = DataDir(place / "data").open()
    data_dir.install_helpers()
    loaded = load_task(place / "task.yaml", environ={})
    session = stack.enter_context(Session.create(loaded, data_dir, Engine.connect(), run_id=f"bench-{os.getpid()}"))
    stack.callback(remove, session)
    session.begin()
    run(session, shape.make)
    session.checkpoint(note="first")
    time.sleep(0.1)
    rounds = min(rounds, LARGE_ROUNDS) if shape.is_large else rounds
    rows, taken = [], {}
    numbers = itertools.count()
    for series, program in shape.changes.items():
        more, taken[series] = checkpoints(session, shape.name, series, changing(session, program, numbers), rounds)
        rows += more
    for series, last_two in taken.items():
        rows += restores(session, shape.name, series, last_two, max(4, rounds // 2))
    if peers:
        few = min(PEER_ROUNDS, rounds)
        change = changing(session, next(iter(shape.changes.values())), numbers)
        if shape.is_large:
            rows.append(synced_copy(shape.name, session, change, place, few))
        rows += engine_commit(shape.name, session, change, few)
        rows += on_files(shape.name, session, change, place, few)
    return rows


def remove(session: Session) -> None:
    """The container is gone, however long the engine takes for 100,000 files."""
    deadline = time.monotonic() + REMOVAL_S
    while True:
        try:
            session.remove_container()
        except EngineError:
            if time.monotonic() > deadline:
                raise
            time.sleep(5)
        else:
            return


def run(session: Session, program: str) -> None:
    """The program has run in the container."""
    done = session.exec(["python3", "-c", program])
    assert done.exit_code == 0, done


def changing(session: Session, program: str, numbers: Iterator[int]) -> Callable[[int], None]:
    """Makes the change of a round; no two rounds of all series have the same number."""
    return lambda _: run(session, program.format(round=next(numbers)))


def checkpoints(
    session: Session, state: str, series: str, change: Callable[[int], None], rounds: int
) -> tuple[list[Row], list[str]]:
    """Checkpoints with that change before each, and the snapshots of the last two."""
    taken: list[str] = []
    change(-1)
    session.checkpoint()

    def take(_: int) -> None:
        taken.append(session.checkpoint().snapshot_id or "")

    times = timed(take, rounds, change)
    loaded = [session.driver.load(snapshot_id) for snapshot_id in taken]
    return [
        row(state, f"checkpoint, {series} changed", times),
        row(state, "of which looking and storing", [one.capture_ms for one in loaded]),
        row(state, "of which the container stood still", [one.frozen_ms for one in loaded]),
    ], taken[-2:]


def restores(session: Session, state: str, series: str, snapshot_ids: list[str], rounds: int) -> list[Row]:
    """Restores to and fro between two that are one change apart, with the engine's kill and start and without."""
    spent: list[float] = []

    def restore(number: int) -> None:
        target = session.container.target()
        lifecycle = TimedLifecycle(target.lifecycle)
        target = replace(target, lifecycle=lifecycle)
        staged = session.driver.stage(target, snapshot_ids[number % 2], session.checkpointer.options)
        staged.apply()
        staged.discard()
        spent.append(lifecycle.spent_ms)

    restore(0)  # from wherever the container stands
    spent.clear()
    whole = timed(lambda number: restore(number + 1), rounds)
    without = [one - engine for one, engine in zip(whole, spent, strict=True)]
    return [row(state, f"restore, {series} changed", whole), row(state, "of which not kill and start", without)]


def machine() -> dict[str, str | int]:
    """What the figures are of."""
    file_system = subprocess.run(
        ["stat", "-f", "-c", "%T", docker("info", "--format", "{{.DockerRootDir}}")], capture_output=True, text=True
    )
    return {
        "processors": os.cpu_count() or 0,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "engine": docker("version", "--format", "{{.Server.Version}}"),
        "file_system": file_system.stdout.strip(),
        "load": os.getloadavg()[0].__format__(".1f"),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--shape", action="append", choices=[shape.name for shape in SHAPES], help="default: all")
    parser.add_argument("--steps", type=int, help="instead: a run of so many steps, with checkpoints and without")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    options = parser.parse_args()
    if options.steps:
        courses = steps.side_by_side(options.steps)
        steps.show(courses)
        if options.json:
            figures = {"machine": machine(), "courses": [asdict(one) for one in courses]}
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
        return
    rows: list[Row] = []
    for shape in SHAPES:
        if not options.shape or shape.name in options.shape:
            with ExitStack() as stack:
                found = measure(shape, options.rounds, peers=not options.without_peers, stack=stack)
                show(found)
                rows += found
        if rows and options.json:
            figures = {"machine": machine(), "rows": [asdict(one) for one in rows]}
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
        if rows and options.chart:
            options.chart.write_text(chart(rows))


if __name__ == "__main__":
    main()
