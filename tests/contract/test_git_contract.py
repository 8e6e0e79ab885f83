"""The git driver keeps the contract as far as git holds what a workspace has; what it does not is listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from tests.contract.git_subject import GitSubject
from tests.contract.overlay_subject import assert_ci_has_engine, is_engine_there
from tests.contract.suite import DriverContract, Subject


class TestGitContract(DriverContract):
    """What git has no place for is lost, and the coverage says so."""

    not_promised: ClassVar[Mapping[str, str]] = {
        "a_restored_tree_is_the_captured_one[fifo]": "git holds files and links only",
        "nanoseconds_of_times_come_back": "git holds no times",
        "holes_come_back_where_they_were": "git knows no holes",
        "an_entry_changes_its_type_and_back_in_any_order": "git holds files and links only, not the fifo",
        "the_difference_names_what_changed": "git holds no permissions but the execute bit, and no empty directories",
    }
    not_run: ClassVar[Mapping[str, str]] = {
        "a_tree_of_great_depth_is_taken_whole": "git opens no path of more than 4,095 bytes: the coverage names it",
        "a_sparse_file_costs_what_it_holds": "git knows no holes, and files over max_file_bytes are not held",
    }

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Iterator[Subject]:
        if not is_engine_there():
            assert_ci_has_engine()
            pytest.skip("no engine with the base image answers (deploy/setup brings one)")
        subject = GitSubject(tmp_path)
        try:
            yield subject
        finally:
            subject.close()
