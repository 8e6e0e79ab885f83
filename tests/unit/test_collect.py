"""Garbage collection: what a snapshot needs stays, beside running captures and whatever is killed; the rest goes."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshot_drivers.errors import StoreDamaged
from snapshot_drivers.overlay.capture import Index
from snapshot_drivers.overlay.driver import OverlayDriver
from snapshot_drivers.overlay.index_file import load_index, save_index
from snapshot_drivers.store import collect as collect_module
from snapshot_drivers.store import lock as lock_module
from snapshot_drivers.store.collect import Collected, Collector
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.lock import StoreLock
from snapshot_drivers.store.pack import packs_in
from tests.unit.plain_upper import PlainUpper


def whole(root: Path, *names: str) -> bool:
    """Every byte of these snapshots can be read."""
    driver = OverlayDriver(root)
    try:
        return not any(driver.verify(names, content=True).values())
    finally:
        driver.close()


@pytest.fixture
def plain(tmp_path: Path) -> PlainUpper:
    plain = PlainUpper(tmp_path)
    for number in range(30):
        (plain.upper / f"f{number}").write_text(f"file {number}\n" * 50)
    return plain


def collect(plain: PlainUpper) -> Collected:
    return Collector(plain.top / "store").run()


def test_what_is_needed_stays_and_the_rest_goes(plain: PlainUpper) -> None:
    (plain.upper / "big").write_bytes(os.urandom(3_000_000))
    dropped, index = plain.capture()
    (plain.upper / "big").unlink()
    kept, index = plain.capture(index)
    plain.manifests.delete(dropped.snapshot_id)
    done = collect(plain)
    assert whole(plain.top / "store", kept.snapshot_id)
    assert done.bytes_before > 3_000_000
    assert done.bytes_after < 100_000


def test_many_small_packs_become_one_that_is_a_tenth_of_their_size(plain: PlainUpper) -> None:
    index = Index()
    names = []
    for number in range(60):
        (plain.upper / "f7").write_text(f"change {number}")
        snapshot, index = plain.capture(index)
        names.append(snapshot.snapshot_id)
    done = collect(plain)
    assert (done.packs_before, done.packs_after) == (60, 1)
    assert done.bytes_after < done.bytes_before / 5
    assert whole(plain.top / "store", *names)
    again = collect(plain)
    assert again.bytes_after == done.bytes_after, "nothing is left to do"


def test_the_next_capture_stores_again_what_was_collected(plain: PlainUpper) -> None:
    """The index says that the files are unchanged, and what it knew to be stored is gone."""
    first, index = plain.capture()
    save_index(plain.top / "store", "c", index)
    plain.manifests.delete(first.snapshot_id)
    collect(plain)
    assert packs_in(plain.top / "store/packs") == {}
    second, _ = plain.capture(load_index(plain.top / "store", "c"))
    assert second.stored_bytes > 0
    assert whole(plain.top / "store", second.snapshot_id)


def test_content_that_is_only_half_there_is_not_taken_over(plain: PlainUpper) -> None:
    """The collection was killed between two packs: the tree's root is there still, the files below it are not."""
    (plain.upper / "f0").write_text("early")
    early, index = plain.capture()
    (plain.upper / "d").mkdir()
    (plain.upper / "d/late").write_text("late")
    late, index = plain.capture(index)
    save_index(plain.top / "store", "c", index)
    packs = plain.top / "store/packs"
    saved = packs / f"{late.snapshot_id}.pack"
    shutil.copy(saved, plain.top / "copy")
    plain.manifests.delete(early.snapshot_id, late.snapshot_id)
    collect(plain)
    shutil.copy(plain.top / "copy", saved)
    third, _ = PlainUpper.capture(plain, load_index(plain.top / "store", "c"))
    assert whole(plain.top / "store", third.snapshot_id)


def test_a_collection_between_look_and_manifest_waits_for_the_capture(plain: PlainUpper) -> None:
    """The capture has found content that only a deleted snapshot needed, and does not store it again."""
    first, _ = plain.capture()
    plain.manifests.delete(first.snapshot_id)
    worker = threading.Thread(target=collect, args=(plain,))
    write = plain.manifests.write

    def slowly(manifest: object) -> None:
        worker.start()
        worker.join(timeout=0.5)
        assert worker.is_alive(), "it waits"
        write(manifest)  # type: ignore[arg-type]

    plain.manifests.write = slowly  # type: ignore[method-assign, assignment]
    second, _ = plain.capture()
    worker.join()
    assert second.stored_bytes == 0
    assert whole(plain.top / "store", second.snapshot_id)


def test_a_capture_that_starts_while_a_collection_waits_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE_S", 60.0)
    lock, order = StoreLock(tmp_path), []
    started = threading.Event()

    def remove() -> None:
        started.set()
        with lock.exclusive():
            order.append("removal")

    def store() -> None:
        with StoreLock(tmp_path).shared():
            order.append("capture")

    with lock.shared():
        removal = threading.Thread(target=remove)
        removal.start()
        started.wait()
        while not _is_gated(tmp_path):
            pass
        capture = threading.Thread(target=store)
        capture.start()
        capture.join(timeout=0.2)
        assert order == []
        with lock.shared():
            order.append("our own again")
    removal.join()
    capture.join()
    assert order == ["our own again", "removal", "capture"]


def test_a_collection_that_waits_for_long_lets_captures_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive is on its way in: that takes minutes."""
    monkeypatch.setattr(lock_module, "PATIENCE_S", 0.2)
    removed = threading.Event()

    def remove() -> None:
        with StoreLock(tmp_path).exclusive():
            removed.set()

    def store() -> None:
        with StoreLock(tmp_path).shared():
            assert not removed.is_set()

    with StoreLock(tmp_path).shared():
        removal = threading.Thread(target=remove)
        removal.start()
        while not _is_gated(tmp_path):
            pass
        capture = threading.Thread(target=store)
        capture.start()
        capture.join(timeout=30)
        assert not capture.is_alive()
    removal.join(timeout=30)
    assert removed.is_set()


def _is_gated(root: Path) -> bool:
    with (root / "gate").open("r+") as gate:
        try:
            fcntl.flock(gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _capture_and_forget(top: Path, number: int, rounds: int, names: list[str]) -> None:
    plain = PlainUpper.__new__(PlainUpper)
    plain.__dict__.update(PlainUpper(top / f"c{number}").__dict__)
    plain.content = ContentStore(top / "store")
    plain.manifests = type(plain.manifests)(top / "store")
    index = Index()
    for turn in range(rounds):
        # The same content in all processes, and different from turn to turn: there is much to share and to drop.
        (plain.upper / "shared").write_text(f"turn {turn % 7} " * 2000)
        (plain.upper / f"own{turn % 3}").write_text(f"{number} {turn}")
        snapshot, index = plain.capture(index)
        if turn % 3:
            plain.manifests.delete(snapshot.snapshot_id)
        else:
            names.append(snapshot.snapshot_id)


def test_captures_in_other_processes_lose_nothing_to_collections_beside_them(tmp_path: Path) -> None:
    with multiprocessing.Manager() as manager:
        names = manager.list()
        context = multiprocessing.get_context("fork")
        workers = [
            context.Process(target=_capture_and_forget, args=(tmp_path, number, 60, names)) for number in range(2)
        ]
        for worker in workers:
            worker.start()
        rounds = 0
        while any(worker.is_alive() for worker in workers):
            if (tmp_path / "store/manifests").exists():
                Collector(tmp_path / "store").run()
                rounds += 1
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        Collector(tmp_path / "store").run()
        assert len(names) == 40
        assert whole(tmp_path / "store", *names)
    assert rounds > 1


def test_a_batch_at_a_time_gives_the_same(plain: PlainUpper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_module, "_BATCH_BYTES", 10_000)
    names = []
    for number in range(8):
        (plain.upper / "big").write_bytes(bytes([number]) * 20_000 + os.urandom(8_000))
        snapshot, _ = plain.capture()
        names.append(snapshot.snapshot_id)
    plain.manifests.delete(names.pop(3))
    collect(plain)
    assert whole(plain.top / "store", *names)


def test_a_damaged_snapshot_stops_the_collection_unless_it_is_accepted(plain: PlainUpper) -> None:
    first, index = plain.capture()
    (plain.upper / "f1").write_text("changed")
    second, _ = plain.capture(index)
    (plain.top / f"store/manifests/{first.snapshot_id}.json").write_text("{")
    with pytest.raises(StoreDamaged, match="nothing is removed"):
        collect(plain)
    assert len(packs_in(plain.top / "store/packs")) == 2
    Collector(plain.top / "store", accept_damage=True).run()
    assert whole(plain.top / "store", second.snapshot_id)


def test_a_damaged_pack_stays_where_it_is(plain: PlainUpper) -> None:
    snapshot, _ = plain.capture()
    (path,) = (plain.top / "store/packs").iterdir()
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"file 7\nfile 7", b"file 7\nFILE 7"))
    done = collect(plain)
    assert done.damaged_packs == (snapshot.snapshot_id,)
    assert path.exists()


@pytest.mark.parametrize("where", ["packs", "manifests"])
def test_what_the_dead_left_half_written_is_removed(plain: PlainUpper, where: str) -> None:
    plain.capture()
    half = plain.top / "store" / where / ".tmp-s-0"
    half.write_bytes(b"half")
    assert collect(plain).temporary_files == 1
    assert not half.exists()


def test_a_reader_finds_what_was_moved_meanwhile(plain: PlainUpper) -> None:
    snapshot, _ = plain.capture()
    reader = ContentStore(plain.top / "store")
    root = bytes.fromhex(plain.manifests.read(snapshot.snapshot_id).trees[0].root)
    look: Callable[[], bytes] = lambda: reader.read(root)  # noqa: E731
    before = look()
    collect(plain)
    assert look() == before
    reader.close()
