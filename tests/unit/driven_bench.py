"""A `Bench` whose run is driven in a thread, and reached through its control socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from orchestrator.control import Unattended, ask, listening
from orchestrator.errors import Busy, HostError, UsageError
from orchestrator.runner import RunResult, run
from snapshot_drivers.errors import SnapshotError
from tests.unit.directory_container import Bench

HELD = "touch begun; while ! test -e go; do sleep 0.02; done"
"""A command that runs until the file ``go`` is there."""
DEAD_S = 20.0


class Driven:
    """A bench whose run is driven in a thread of its own."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.root = bench.container.root
        self.result: RunResult | None = None

    def ask(self, wish: Any, wait_s: float = DEAD_S) -> dict[str, Any]:
        return ask(self.bench.directory, wish, wait_s=wait_s)

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEAD_S
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def begun(self) -> None:
        """The command `HELD` runs."""
        self.until((self.root / "begun").exists)

    def thinking(self, step: int) -> None:
        """The model's request of that step is under way, and its breakpoint is committed."""
        self.until(lambda: len(self.bench.session.log.events) > 0 and f"thinking {step}" in self.seen())
        self.until(lambda: any(event.kind == "checkpoint" and event.step == step - 1 for event in self.events()))

    def seen(self) -> list[Any]:
        return [what for _, what in self.bench.recorder.seen]

    def events(self) -> list[Any]:
        return list(self.bench.session.log.events)

    def go(self) -> None:
        (self.root / "go").touch()


@contextmanager
def driven(bench: Bench) -> Iterator[Driven]:
    """The run is driven while the block runs, and has ended after it."""
    it = Driven(bench)
    with bench.session, listening(bench.session) as desk:

        def drive() -> None:
            it.result = run(bench.session, bench.model, bench.recorder, desk)

        thread = threading.Thread(target=drive)
        thread.start()
        try:
            yield it
        except BaseException:
            desk.stop()
            raise
        finally:
            thread.join(DEAD_S)
            assert not thread.is_alive()


def in_background(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """The answer, or the error, is in the list when the thread has ended."""
    answers: list[Any] = []

    def work() -> None:
        try:
            answers.append(function())
        except (Unattended, Busy, HostError, UsageError, SnapshotError) as error:
            answers.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, answers
