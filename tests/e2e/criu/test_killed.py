"""The orchestrator dies while processes are in CRIU's hands: they go on, and the next snapshot takes them."""

from __future__ import annotations

import os
import signal

import pytest

from snapshot_drivers import crash_points
from snapshot_drivers.criu.driver import CriuDriver
from tests.e2e.criu.rewindable import ASK, OPTIONS, SERVE, Make

COUNTER = SERVE + "count = 0\ndef answer():\n    global count; count += 1; return count\nserve(answer)"


@pytest.mark.parametrize("point", ["frozen", "after-pack"])
def test_a_program_goes_on_when_the_one_who_holds_it_is_killed(make: Make, point: str) -> None:
    place = make()
    place.start(COUNTER)
    target = place.container.target()
    child = os.fork()
    if not child:
        crash_points.arm(point)
        try:
            CriuDriver(place.data_dir.store).capture(target, None, OPTIONS)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert place.sh(ASK) == "1"
    snapshot = place.taken()
    assert place.sh(ASK) == "2"
    place.restore(snapshot)
    assert place.sh(ASK) == "2"
