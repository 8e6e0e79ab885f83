"""Many checkpoints in one run: what the thousandth costs beside the first, in time, memory and bytes.

    python -m benchmarks.growth [--checkpoints 10000] [--json FILE] [--svg FILE]

A program in the container changes one of a hundred files of 1 kB, then a checkpoint is taken, context log and all. At
the end it is compared with a run that is young, in turns; checkpoints from the beginning, the middle and the end are
restored; the store is collected and checked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.curve import Panel, svg
from orchestrator.data_dir import DataDir
from orchestrator.engine import Engine
from orchestrator.session import Session
from orchestrator.store.collect import GarbageCollection
from orchestrator.store.fsck import fsck
from orchestrator.task import load_task

TASK = "name: growth\nimage: orchestrator-base:latest\nagent: {kind: manual}\n"
FILES = 100
FILE_BYTES = 1024
_WRITER = "mkdir -p /w; while read n text; do echo $text > /w/f$n; echo done; done"


@dataclass(frozen=True)
class Sample:
    """What a stretch of checkpoints cost, and how large everything is after it."""

    checkpoints: int
    p10_ms: float
    """Of the fastest tenth, at most: what it costs when nothing else runs."""
    p50_ms: float
    p95_ms: float
    frozen_ms: float
    cpu_ms: float
    """Of our own process, on average."""
    memory_mb: float
    content_bytes: int
    """Different content that the container had so far."""
    packs_bytes: int
    manifests_bytes: int
    log_bytes: int
    cache_bytes: int

    @property
    def metadata_bytes(self) -> int:
        """All bytes that are not content."""
        total = self.packs_bytes + self.manifests_bytes + self.log_bytes + self.cache_bytes
        return total - self.content_bytes


@contextmanager
def writer(container: str) -> Iterator[subprocess.Popen[str]]:
    """A program in the container that writes what it is told to."""
    command = ["docker", "exec", "-i", container, "sh", "-c", _WRITER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as program:
        yield program
        program.communicate()


def change(program: subprocess.Popen[str], number: int) -> None:
    """One file has new content."""
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write(f"{number % FILES} {secrets.token_hex(FILE_BYTES // 2 - 1)}\n")
    assert program.stdout.readline() == "done\n"


def size_of(place: Path) -> int:
    """Bytes of all files below."""
    with os.scandir(place) as entries:
        return sum(size_of(Path(one)) if one.is_dir() else one.stat().st_size for one in entries)


def memory_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(session: Session, place: DataDir, count: int, every: int) -> Iterator[Sample]:
    """Take the checkpoints; a sample after each stretch."""
    with writer(session.container.name) as program:
        used = time.process_time()
        times: list[float] = []
        frozen: list[float] = []
        for number in range(1, count + 1):
            change(program, number)
            began = time.perf_counter()
            taken = session.checkpoint()
            times.append(1e3 * (time.perf_counter() - began))
            frozen.append(session.driver.load(taken.snapshot_id or "").frozen_ms)
            if number % every == 0:
                yield Sample(
                    checkpoints=number,
                    p10_ms=sorted(times)[len(times) // 10],
                    p50_ms=statistics.median(times),
                    p95_ms=sorted(times)[int(len(times) * 0.95)],
                    frozen_ms=statistics.median(frozen),
                    cpu_ms=1e3 * (time.process_time() - used) / every,
                    memory_mb=memory_mb(),
                    content_bytes=number * (FILE_BYTES - 1),
                    packs_bytes=size_of(place.store / "packs"),
                    manifests_bytes=size_of(place.store / "manifests"),
                    log_bytes=session.log.path.stat().st_size,
                    cache_bytes=size_of(place.store / "locations"),
                )
                times, frozen, used = [], [], time.process_time()


def added(samples: list[Sample], size: Callable[[Sample], int]) -> list[float]:
    """By how many kB a checkpoint of each stretch has made something larger; the first stretch is not counted."""
    found = [
        (size(after) - size(before)) / (after.checkpoints - before.checkpoints) / 1e3
        for before, after in itertools.pairwise(samples)
    ]
    return [*found[:1], *found]


def picture(samples: list[Sample]) -> str:
    """The curve."""
    panels = [
        Panel(
            "ms a checkpoint",
            {
                "median": [s.p50_ms for s in samples],
                "fastest tenth": [s.p10_ms for s in samples],
                "CPU of the process": [s.cpu_ms for s in samples],
            },
        ),
        Panel("MB of memory", {"the whole process": [s.memory_mb for s in samples]}),
        Panel(
            "kB that a checkpoint adds",
            {
                "content": added(samples, lambda sample: sample.content_bytes),
                "everything else": added(samples, lambda sample: sample.metadata_bytes),
            },
        ),
    ]
    return svg([s.checkpoints for s in samples], panels, "checkpoints in one run")


def started(stack: ExitStack, top: Path, name: str) -> tuple[Session, DataDir]:
    """A run in a data directory of its own, gone with the stack."""
    (top / "task.yaml").write_text(TASK)
    place = DataDir(top / name).open()
    place.install_helpers()
    loaded = load_task(top / "task.yaml", environ={})
    session = stack.enter_context(
        Session.create(loaded, place, Engine.connect(), run_id=f"growth-{name}-{os.getpid()}")
    )
    stack.callback(session.remove_container)
    session.begin()
    return session, place


def beside(old: Session, young: Session, rounds: int) -> dict[str, float]:
    """Median ms of a checkpoint of the old run and of the young one, in turns: the machine is the same for both."""
    times: dict[str, list[float]] = {"old": [], "young": []}
    with writer(old.container.name) as old_program, writer(young.container.name) as young_program:
        for number in range(rounds):
            for name, session, program in (("old", old, old_program), ("young", young, young_program)):
                change(program, number)
                began = time.perf_counter()
                session.checkpoint()
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in times.items()}


def cared_for(place: DataDir) -> dict[str, object]:
    """What a collection and a check of the store take."""
    began = time.perf_counter()
    collected = GarbageCollection(place).run()
    gc_s, began = time.perf_counter() - began, time.perf_counter()
    checked = fsck(place)
    fsck_s = time.perf_counter() - began
    assert checked.whole, checked
    return {
        "gc_s": gc_s,
        "fsck_s": fsck_s,
        "packs": [collected.packs_before, collected.packs_after],
        "packs_bytes": [collected.bytes_before, collected.bytes_after],
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth")
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    count = options.checkpoints
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="growth-")))
        session, place = started(stack, top, "old")
        samples = []
        for sample in run(session, place, count, max(1, count // 100)):
            samples.append(sample)
            print(
                f"{sample.checkpoints:>6}  {sample.p50_ms:.1f} ms (10 %: {sample.p10_ms:.1f}, 95 %: "
                f"{sample.p95_ms:.1f}, frozen {sample.frozen_ms:.1f}, CPU {sample.cpu_ms:.1f})  "
                f"{sample.memory_mb:.0f} MB  {sample.metadata_bytes / sample.checkpoints / 1e3:.1f} kB of metadata",
                flush=True,
            )
        young, _ = started(stack, top, "young")
        after: dict[str, object] = {"beside_ms": beside(session, young, min(200, count))}
        after["restores_ms"] = {
            number: session.restore(number, verify="full").restore_ms for number in (1, count // 2, count - 1)
        }
        after |= cared_for(place)
    print(json.dumps(after, indent=1))
    if options.json:
        found = {"samples": [asdict(sample) for sample in samples], "after": after}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.svg:
        options.svg.parent.mkdir(exist_ok=True)
        options.svg.write_text(picture(samples))


if __name__ == "__main__":
    main()
