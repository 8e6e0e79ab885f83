"""A look at a container's processes is not of one moment; a child of nobody is believed at the second look only."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshot_drivers.criu import trees
from snapshot_drivers.criu.trees import Process, Running

SERVER = Process(10, 2, 1, {"VmSize": "1 kB"}, "launch serve", True)
CHILD = Process(11, 3, 12, {"VmSize": "1 kB"}, "sleep 1", False)


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([Running((SERVER,), (CHILD,)), Running((SERVER, CHILD), ())], Running((SERVER, CHILD), ())),
        ([Running((SERVER,), (CHILD,))] * 2, Running((SERVER,), (CHILD,))),
        ([Running((SERVER, CHILD), ())], Running((SERVER, CHILD), ())),
    ],
    ids=["its parent ended meanwhile", "it is nobody's", "nothing is nobody's"],
)
def test_what_is_nobodys_is_so_at_two_looks(
    monkeypatch: pytest.MonkeyPatch, looks: list[Running], expected: Running
) -> None:
    left: Iterator[Running] = iter(looks)
    monkeypatch.setattr(trees, "look", lambda *_: next(left))
    target: Any = None
    assert trees.settled(target, Path()) == expected
    assert next(left, None) is None


VFORK = """
#include <time.h>
#include <unistd.h>
int main(void)
{
	struct timespec long_enough = {60, 0};
	if (!vfork()) {
		nanosleep(&long_enough, 0);
		_exit(0);
	}
	return 0;
}
"""


def test_a_process_between_its_vfork_and_the_childs_program_is_known(tmp_path: Path) -> None:
    (tmp_path / "vfork.c").write_text(VFORK)
    subprocess.run(["cc", "-o", tmp_path / "vfork", tmp_path / "vfork.c"], check=True)
    with subprocess.Popen([tmp_path / "vfork"], start_new_session=True) as forking:
        try:
            deadline = time.monotonic() + 10
            while not trees.waits_for_exec(forking.pid):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            os.killpg(forking.pid, signal.SIGKILL)
    assert not trees.waits_for_exec(os.getpid())
    assert not trees.waits_for_exec(forking.pid)
