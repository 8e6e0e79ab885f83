"""A file under a lease is read without breaking it: a broken lease ends a holder that does not expect the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from snapshot_drivers import beneath
from snapshot_drivers.leases import Leases, write_leases
from snapshot_drivers.overlay.held import Held
from snapshot_drivers.overlay.scan import ScannedTree, Scanner
from tests.unit.plain_tree import NOTHING, Tree

HOLDER = """
import fcntl, os, sys
file = os.open(sys.argv[1], getattr(os, sys.argv[2]))
os.lseek(file, 5, os.SEEK_SET)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
sys.stdin.readline()
kept = fcntl.fcntl(file, fcntl.F_GETLEASE) == fcntl.F_WRLCK
print(kept, os.lseek(file, 0, os.SEEK_CUR))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path)
    with (tree.root / "leased").open("wb") as file:
        file.write(os.urandom(1000))
        file.seek(5 << 20)
        file.write(b"end")
    return tree


@contextmanager
def holder(path: Path, mode: str = "O_RDWR") -> Iterator[int]:
    """A process that holds a lease and stands still; afterwards it must still have it, at the same position."""
    words = [sys.executable, "-c", HOLDER, str(path), mode]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGSTOP)
        yield process.pid
        process.send_signal(signal.SIGCONT)
        assert process.communicate("go\n")[0] == "True 5\n"
    assert process.returncode == 0


def scan(tree: Tree, leases: Leases) -> ScannedTree:
    with beneath.closing(os.open(tree.root, os.O_RDONLY)) as root, tree.content.writer("p") as writer:
        scanner = Scanner(writer.put, tree.options, skip=NOTHING, leases=leases)
        return scanner.scan(root)


def test_it_is_captured_through_its_holder_who_notices_nothing(tree: Tree) -> None:
    before = tree.lines()
    with holder(tree.root / "leased") as pid:
        taken = scan(tree, write_leases([pid]))
    assert not taken.problems
    (tree.root / "leased").unlink()
    tree.restore(taken)
    assert tree.lines() == before


@pytest.mark.parametrize(("mode", "stands_still"), [("O_RDWR", False), ("O_WRONLY", True)])
def test_where_its_holder_cannot_lend_it_the_file_is_missing_with_that_word(
    tree: Tree, mode: str, stands_still: bool
) -> None:
    with holder(tree.root / "leased", mode) as pid:
        taken = scan(tree, write_leases([pid] if stands_still else []))
    assert [problem.path for problem in taken.problems] == ["/leased"]
    assert "lease" in taken.problems[0].reason


def test_a_holder_that_is_gone_lends_nothing(tree: Tree) -> None:
    with holder(tree.root / "leased") as pid:
        leases = {inode: 2**22 - 1 for inode, holder_pid in write_leases([pid]).items() if holder_pid == pid}
        assert len(leases) == 1
        assert [problem.path for problem in scan(tree, leases).problems] == ["/leased"]


MAPPED = """
import ctypes, fcntl, mmap, os, signal, sys
signal.signal(signal.SIGIO, lambda *_: os._exit(3))
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
assert libc.mmap(None, 4096, 1, 2, file, ctypes.c_long(0)) > 0
os.close(file)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_lease_that_only_a_mapping_holds_is_not_broken(tree: Tree) -> None:
    words = [sys.executable, "-c", MAPPED, str(tree.root / "leased")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGSTOP)
        taken = scan(tree, Held([process.pid]).leases(others=False))
        process.send_signal(signal.SIGCONT)
        process.communicate("go\n")
    assert process.returncode == 0
    assert [problem.path for problem in taken.problems] == ["/leased"] and "lease" in taken.problems[0].reason
