"""Run as a program with ``faults.c`` preloaded: one work on a store, again and again, hit at every call that it makes.

    LD_PRELOAD=faults.so python -m tests.unit.fault_injection WORK kill|full DIRECTORY STRIDE

The work is done in a forked child on a fresh copy of a prepared store; then the store is looked at without faults.
Prints how many calls there were to be hit.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from snapshot_drivers.errors import SnapshotError
from snapshot_drivers.overlay.capture import Index
from snapshot_drivers.overlay.driver import OverlayDriver
from snapshot_drivers.store.collect import Collector
from snapshot_drivers.store.durable import TEMPORARY
from snapshot_drivers.store.fsck import StoreChecker
from snapshot_drivers.store.manifest import ManifestStore
from tests.unit.plain_upper import PlainUpper

REFUSED = 3
"""Exit code of a child that was told of the full disk in the way that it should be."""


def prepare(top: Path) -> None:
    """A store with packs of captures and of a collection, some garbage, and a container that goes on."""
    plain = PlainUpper(top)
    index = Index()
    names = []
    for number in range(6):
        (plain.upper / "file").write_text(f"state {number} " * 300)
        (plain.upper / f"more{number}").write_bytes(bytes([number]) * 9000 + os.urandom(2000))
        snapshot, index = plain.capture(index)
        names.append(snapshot.snapshot_id)
        if number == 2:
            Collector(top / "store").run()
    plain.manifests.delete(names[1], names[4])
    plain.content.close()


def capture(top: Path) -> None:
    """Another capture of the container."""
    plain = reopened(top)
    (plain.upper / "file").write_text("the next state " * 400)
    (plain.upper / "large").write_bytes(b"large" * 80_000)
    plain.capture()


def collect(top: Path) -> None:
    """A collection that has something to do."""
    Collector(top / "store").run()


def forget(top: Path) -> None:
    """A snapshot goes, and a collection follows."""
    manifests = ManifestStore(top / "store")
    manifests.delete(manifests.ids()[0])
    Collector(top / "store").run()


def repair(top: Path) -> None:
    """A check that finds a damaged pack."""
    StoreChecker(top / "store").run()


def reopened(top: Path) -> PlainUpper:
    """The container of a copied store."""
    plain = PlainUpper.__new__(PlainUpper)
    (top / "layer").rename(top / "kept")
    plain.__init__(top)  # type: ignore[misc]
    shutil.rmtree(top / "layer/upper")
    (top / "kept/upper").rename(top / "layer/upper")
    shutil.rmtree(top / "kept")
    return plain


def damage(top: Path) -> None:
    """A byte of one pack is flipped."""
    path = max((top / "store/packs").iterdir())
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"state 5")] ^= 1
    path.write_bytes(raw)


WORKS: dict[str, Callable[[Path], None]] = {"capture": capture, "collect": collect, "forget": forget, "repair": repair}


def child(work: Callable[[Path], None], top: Path, at: int, disk_full: bool) -> int:
    """The work, hit at its call number ``at``; the child's wait status, or -1 - calls: it was over before."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            faults = ctypes.CDLL(None)
            faults.fault_arm(os.fsencode(top / "store"), ctypes.c_long(at), int(disk_full))
            try:
                work(top)
                code = 0
            except (SnapshotError, OSError):
                code = REFUSED
            os.write(writer, str(faults.fault_seen()).encode())
        except BaseException:  # noqa: BLE001 the parent sees the exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    seen = os.read(reader, 64)
    os.close(reader)
    status = os.waitpid(pid, 0)[1]
    return -1 if seen and int(seen) <= at else status


def look(top: Path, committed: list[str], work: str) -> None:
    """The store is whole: what was committed can be read, and it can be captured, collected and checked."""
    store = top / "store"
    ids = ManifestStore(store).ids()
    gone = set(committed) - set(ids)
    assert gone <= (set(committed[:1]) if work == "forget" else set()), gone
    if work != "repair":
        assert StoreChecker(store, repair=False).run().is_whole
    else:
        StoreChecker(store).run()
    if (top / "kept").exists():
        shutil.rmtree(top / "layer", ignore_errors=True)
        (top / "kept").rename(top / "layer")
    plain = reopened(top)
    (plain.upper / "file").write_text("state 5 " * 300)
    plain.capture()
    plain.content.close()
    driver = OverlayDriver(store)
    found = driver.verify(ManifestStore(store).ids(), content=True)
    driver.close()
    assert not any(found.values()), found
    Collector(store).run()
    assert StoreChecker(store).run().is_whole
    assert not list(store.glob(f"*/{TEMPORARY}*"))


def main(work: str, kind: str, directory: str, stride: str) -> int:
    """Hit every ``stride``-th call."""
    top = Path(directory)
    prepare(top / "prepared")
    if work == "repair":
        damage(top / "prepared")
    committed = ManifestStore(top / "prepared/store").ids()
    at = 0
    while True:
        place = top / "copy"
        shutil.copytree(top / "prepared", place, symlinks=True)
        status = child(WORKS[work], place, at, kind == "full")
        if status == -1:
            print(at)
            return 0
        if kind == "kill":
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (at, status)
        else:
            assert os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, REFUSED), (at, status)
        try:
            look(place, committed, work)
        except BaseException:
            print(f"{work}, {kind} at call {at}", file=sys.stderr)
            raise
        shutil.rmtree(place)
        at += int(stride)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
