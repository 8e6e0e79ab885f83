"""The in-memory driver, failing, slow, or lacking something where a test says so."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from snapshot_drivers.base import (
    CaptureOptions,
    Coverage,
    CoverageItem,
    CoverageState,
    RestoreReport,
    Snapshot,
    Staged,
    StateKind,
    Target,
)
from snapshot_drivers.memory import MemoryDriver
from tests.unit.directory_container import Bench


class Trouble(MemoryDriver):
    """A driver that fails, waits, or lacks something where a test says so."""

    fail_capture: Exception | None = None
    fail_stage: Exception | None = None
    fail_apply: Sequence[BaseException | None] = ()
    capture_s = 0.0
    lacks: CoverageItem | None = None
    loses: bool = False

    def capture(self, target: Target, parent_id: str | None, options: CaptureOptions) -> Snapshot:
        time.sleep(self.capture_s)
        if self.fail_capture is not None:
            raise self.fail_capture
        return self.lacking(super().capture(target, parent_id, options))

    def load(self, snapshot_id: str) -> Snapshot:
        return self.lacking(super().load(snapshot_id))

    def lacking(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot as it would be if something could not be captured."""
        if self.lacks is None:
            return snapshot
        return snapshot.model_copy(update={"coverage": Coverage.of([*snapshot.coverage.items, self.lacks])})

    def stage(self, target: Target, snapshot_id: str, options: CaptureOptions) -> Staged:  # type: ignore[override]
        if self.fail_stage is not None:
            raise self.fail_stage
        return TroubleStaged(super().stage(target, snapshot_id, options), self)


class TroubleStaged:
    """A restore that writes half of it and fails, as often as the driver says."""

    def __init__(self, staged: Staged, driver: Trouble) -> None:
        self._staged = staged
        self._driver = driver
        self.snapshot = driver.lacking(staged.snapshot)

    def apply(self, *, verify: str = "difference") -> RestoreReport:
        error, *self._driver.fail_apply = self._driver.fail_apply or [None]
        report = self._staged.apply(verify=verify)
        if error is not None:
            (report.target.upper_hint / "half").write_text("half restored")  # type: ignore[operator]
            raise error
        if self._driver.loses:
            gone = CoverageItem(kind=StateKind.ROOTFS, path="/", state=CoverageState.MISSING, reason="it broke")
            return replace(report, coverage=Coverage.of([gone]))
        return replace(report, coverage=self.snapshot.coverage)

    def discard(self) -> None:
        self._staged.discard()


@contextmanager
def trouble(bench: Bench, **what: Any) -> Iterator[Trouble]:
    """The bench's driver misbehaves while the block runs."""
    driver = bench.driver
    assert isinstance(driver, Trouble)
    for name, value in what.items():
        setattr(driver, name, value)
    yield driver
    for name in what:
        setattr(driver, name, getattr(Trouble, name))
