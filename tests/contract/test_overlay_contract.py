"""The overlay driver keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.overlay_subject import assert_ci_has_engine, is_engine_there, overlay_subject
from tests.contract.suite import DriverContract, Subject


class TestOverlayContract(DriverContract):
    """No exceptions."""

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Iterator[Subject]:
        if not is_engine_there():
            assert_ci_has_engine()
            pytest.skip("no engine with the base image answers (deploy/setup brings one)")
        with overlay_subject(tmp_path) as subject:
            yield subject
