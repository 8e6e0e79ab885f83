"""What a checkpoint with memory costs, beside Docker's and runc's own, on the same program in one run.

    python -m benchmarks.processes [--rounds 20] [--json FILE]

The program holds so many bytes of random memory. Between rounds it changes one page, or all. The peers take processes
alone: neither puts the container's files back. ``docker checkpoint`` needs an experimental engine, so a second one runs
for it, in namespaces of its own. For 1 GB the peer is ``cp`` with fsync of the very image files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.experimental_engine import criu_program, experimental_engine
from benchmarks.series import Row, docker, row, show, timed
from orchestrator.data_dir import DataDir
from orchestrator.engine import Engine
from orchestrator.session import Session
from orchestrator.task import load_task
from snapshot_drivers.base import CaptureOptions
from snapshot_drivers.criu.images import write_images
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import ManifestStore

IMAGE = "orchestrator-base:latest"
TASK = f"name: bench\nimage: {IMAGE}\nagent: {{kind: manual}}\nsnapshots: {{driver: criu, options: {{require: all}}}}\n"
PROGRAM = """
import os, signal, sys
size = int(sys.argv[1]) * 1_000_000
memory = bytearray(size)
def fill(*_):
    for start in range(0, size, 1_000_000):
        memory[start:start + 1_000_000] = os.urandom(1_000_000)
    open("/tmp/filled", "a").write("x")
def touch(*_):
    memory[size // 2] ^= 1
signal.signal(signal.SIGUSR1, touch)
signal.signal(signal.SIGUSR2, fill)
fill()
while True:
    signal.pause()
"""
OPTIONS = CaptureOptions()


@contextmanager
def program(megabytes: int) -> Iterator[tuple[Session, Path]]:
    """A run whose container runs the program, with so much memory; and its store."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp")))
        (place / "task.yaml").write_text(TASK)
        data_dir = DataDir(place / "data").open()
        data_dir.install_helpers()
        loaded = load_task(place / "task.yaml", environ={})
        engine, run_id = Engine.connect(), f"bench-{os.getpid()}"
        stack.callback(engine.release_image, run_id)
        session = stack.enter_context(Session.create(loaded, data_dir, engine, run_id=run_id))
        stack.callback(session.remove_container)
        session.begin()
        session.exec(["python3", "-c", f"open('/p.py', 'w').write({PROGRAM!r})"])
        session.exec(
            f"setsid python3 /p.py {megabytes} >/dev/null 2>&1 </dev/null & "
            "while [ ! -e /tmp/filled ]; do sleep 0.05; done"
        )
        yield session, data_dir.store


def fill(session: Session) -> None:
    """All of the program's memory is new."""
    session.exec("rm -f /tmp/filled; pkill -USR2 -f /p.py; while [ ! -e /tmp/filled ]; do sleep 0.02; done")


def captures(session: Session, state: str, rounds: int) -> tuple[list[Row], list[str]]:
    """Checkpoints with one page changed between them, then with all; ids of the first ones."""
    found: dict[str, list[float]] = {name: [] for name in ("one", "held", "all")}
    ids = []
    session.driver.capture(session.container.target(), None, OPTIONS)
    for number in range(2 * rounds):
        every = number >= rounds
        fill(session) if every else session.exec("pkill -USR1 -f /p.py")
        began = time.perf_counter()
        snapshot = session.driver.capture(session.container.target(), None, OPTIONS)
        found["all" if every else "one"].append(1e3 * (time.perf_counter() - began))
        ids.append(snapshot.snapshot_id)
        if not every:
            found["held"].append(snapshot.frozen_ms)
    return [
        row(state, "checkpoint", found["one"]),
        row(state, "… of which the program stood still", found["held"]),
        row(state, "checkpoint, all memory new", found["all"]),
    ], ids


def restores(session: Session, state: str, ids: list[str], rounds: int) -> Row:
    """Restores with kill and start."""

    def restore(number: int) -> None:
        staged = session.driver.stage(session.container.target(), ids[number % len(ids)], OPTIONS)
        staged.apply()
        staged.discard()

    return row(state, "restore, with kill and start", timed(restore, rounds))


@contextmanager
def plain(megabytes: int, host: str | None = None) -> Iterator[str]:
    """Id of a container of plain Docker that runs the program."""
    words = ["run", "-d", "--network", "none", "--entrypoint", "python3", IMAGE, "-c", PROGRAM, str(megabytes)]
    container = docker(*words, host=host)
    try:
        while "filled" not in docker("exec", container, "ls", "/tmp", host=host):
            time.sleep(0.1)
        yield container
    finally:
        docker("rm", "-f", container, host=host)


def runc(state: str, megabytes: int, rounds: int) -> Row:
    """``runc checkpoint`` of a plain container with the same program."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as name, plain(megabytes) as container:
        criu = str(criu_program(Path(name)))
        words = ["runc", "--root", "/run/docker/runtime-runc/moby", "--criu", criu, "checkpoint", "--leave-running"]

        def checkpoint(number: int) -> None:
            places = ["--image-path", f"{name}/{number}", "--work-path", name]
            subprocess.run([*words, *places, container], check=True, capture_output=True)

        return row(state, "runc checkpoint (no files)", timed(checkpoint, rounds))


def own_of_docker(state: str, megabytes: int, rounds: int) -> list[Row]:
    """Docker's checkpoint feature, in an engine that has it."""
    with experimental_engine(IMAGE) as host, plain(megabytes, host) as container:

        def checkpoint(number: int) -> None:
            docker("checkpoint", "create", "--leave-running", container, f"c{number}", host=host)

        def restore(number: int) -> None:
            docker("kill", container, host=host)
            docker("start", "--checkpoint", f"c{number}", container, host=host)

        made = timed(checkpoint, rounds)
        return [
            row(state, "docker checkpoint create (no files)", made),
            row(state, "docker kill + start --checkpoint (no files)", timed(restore, rounds)),
        ]


def copy(state: str, store: Path, snapshot_id: str, rounds: int) -> Row:
    """``cp`` of the snapshot's image files, and fsync of each copy."""
    processes = ManifestStore(store).read(snapshot_id).processes
    assert processes is not None
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as name:
        images = Path(name) / "images"
        images.mkdir()
        write_images(processes, images, ContentStore(store).read, keep_clock=True)

        def once(number: int) -> None:
            subprocess.run(["cp", "-r", images, f"{name}/{number}"], check=True)
            subprocess.run(["sync", *Path(name, str(number)).iterdir()], check=True)
            shutil.rmtree(f"{name}/{number}")

        return row(state, "cp + fsync of the images", timed(once, rounds))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    few = max(3, options.rounds // 4)
    rows: list[Row] = []
    with program(50) as (session, _):
        made, ids = captures(session, "50 MB", options.rounds)
        rows += [*made, restores(session, "50 MB", ids, options.rounds)]
    rows.append(runc("50 MB", 50, few))
    rows += own_of_docker("50 MB", 50, few)
    with program(1000) as (session, store):
        made, ids = captures(session, "1 GB", few)
        rows += [*made, copy("1 GB", store, ids[-1], few), restores(session, "1 GB", ids[-1:], few)]
    show(rows)
    if options.json:
        options.json.write_text(json.dumps([vars(one) for one in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
