"""The criu driver keeps the contract of files as the overlay driver does, where no process is to be taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_drivers.criu.driver import CriuDriver
from tests.contract.overlay_subject import OverlaySubject, assert_ci_has_engine, is_engine_there
from tests.contract.suite import DriverContract, Subject


class CriuSubject(OverlaySubject):
    """The overlay driver's container; nothing runs below a launcher in it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.driver.close()
        self.driver = CriuDriver(directory / "store")  # type: ignore[assignment]

    def reopen(self) -> None:
        self.driver.close()
        self.driver = CriuDriver(self.directory / "store")  # type: ignore[assignment]


class TestCriuContract(DriverContract):
    """No exceptions."""

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Iterator[Subject]:
        if not is_engine_there():
            assert_ci_has_engine()
            pytest.skip("no engine with the base image answers (deploy/setup brings one)")
        subject = CriuSubject(tmp_path)
        try:
            yield subject
        finally:
            subject.close()
