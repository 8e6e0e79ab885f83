"""The commit driver keeps the contract as far as an image holds what a root filesystem has; the rest is listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from tests.contract.commit_subject import CommitSubject
from tests.contract.overlay_subject import assert_ci_has_engine, is_engine_there
from tests.contract.suite import DriverContract, Subject


class TestCommitContract(DriverContract):
    """What the engine packs into a layer is all that comes back."""

    not_promised: ClassVar[Mapping[str, str]] = {
        "nanoseconds_of_times_come_back": "a layer has whole seconds of times",
        "names_may_be_any_bytes": "in a layer, names that begin with .wh. say what is deleted: the coverage names them",
        "holes_come_back_where_they_were": "a layer has no holes",
        "untouched_entries_keep_their_inode_and_all_their_times": "a new container has new inodes",
        "damaged_content_is_found_before_anything_is_touched": "an engine makes a container of an image unread; "
        "verify and restore --verify full read it",
        "excluded_paths_stay_and_volatile_ones_go": "an image holds the root filesystem as a whole: refused",
        "the_difference_names_what_changed": "an engine tells which paths differ from the image, not what of them, and "
        "what has differed before is not known to differ again",
    }
    not_run: ClassVar[Mapping[str, str]] = {
        "a_sparse_file_costs_what_it_holds": "a layer has no holes, so three gigabytes of zeros would be packed",
        "a_tree_of_great_depth_is_taken_whole": "an engine holds a descriptor a level, and gives up or takes minutes",
        "one_of_ten_thousand_entries_costs_one_of_them": "an engine packs all that differs from the image each time",
    }

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Iterator[Subject]:
        if not is_engine_there():
            assert_ci_has_engine()
            pytest.skip("no engine with the base image answers (deploy/setup brings one)")
        subject = CommitSubject(tmp_path)
        try:
            yield subject
        finally:
            subject.close()
