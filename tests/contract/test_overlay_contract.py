"""The overlay driver keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.overlay_subject import (
    OverlaySubject,
    TrackedOverlaySubject,
    assert_ci_has_engine,
    is_engine_there,
    overlay_subject,
)
from tests.contract.suite import DriverContract, Subject


class TestOverlayContract(DriverContract):
    """No exceptions."""

    kind: type[OverlaySubject] = OverlaySubject
    hears_of_flags = True

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Iterator[Subject]:
        if not is_engine_there():
            assert_ci_has_engine()
            pytest.skip("no engine with the base image answers (deploy/setup brings one)")
        with overlay_subject(tmp_path, kind=self.kind) as subject:
            yield subject

    def test_a_flag_of_an_inode_alone_is_a_change_and_goes_back(self, subject: Subject) -> None:
        places = "/w", "/vol", "/tm", "/dev/shm"
        flag = (
            "import array, fcntl\n"
            f"for place in {places}:\n"
            "    for name in ('/f', '/d'):\n"
            "        fd = os.open(place + name, os.O_RDONLY); word = array.array('I', [0, 0])\n"
            "        fcntl.ioctl(fd, 0x80086601, word)\n"
            "        word[0] |= 0x40\n"
            "        fcntl.ioctl(fd, 0x40086602, word)\n"
        )
        for place in places:
            subject.sh(f"mkdir {place}/d; echo 1 > {place}/f")
        taken = [(subject.capture(), subject.tree())]
        subject.sh("sleep 0.1")
        taken.append((subject.capture(taken[0][0]), subject.tree()))
        subject.python(flag)
        taken.append((subject.capture(taken[1][0]), subject.tree()))
        assert taken[0][1] == taken[1][1] != taken[2][1]
        for which in (1, 2, 0, 2, 1):
            subject.restore(taken[which][0])
            assert (which == 2 and not self.hears_of_flags) or subject.tree() == taken[which][1]


class TestTrackedOverlayContract(TestOverlayContract):
    """The kernel reports no change of inode flags, so a capture learns of one late; no restore fails for it."""

    kind = TrackedOverlaySubject
    hears_of_flags = False
