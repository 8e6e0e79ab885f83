"""A check of the store finds every damaged byte, saves what is whole, and lets captures store again what was lost."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from snapshot_drivers.overlay.driver import OverlayDriver
from snapshot_drivers.store.collect import Collector
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.fsck import StoreCheck, StoreChecker
from snapshot_drivers.store.pack import packs_in
from tests.unit.plain_upper import PlainUpper


@pytest.fixture
def plain(tmp_path: Path) -> PlainUpper:
    plain = PlainUpper(tmp_path)
    for number in range(10):
        (plain.upper / f"f{number}").write_text(f"file {number}\n" * 50)
    return plain


def check(plain: PlainUpper, *, repair: bool = True) -> StoreCheck:
    return StoreChecker(plain.top / "store", repair=repair).run()


def pack_of(plain: PlainUpper, snapshot_id: str) -> Path:
    return plain.top / f"store/packs/{snapshot_id}.pack"


def flip(path: Path, place: bytes) -> None:
    raw = path.read_bytes()
    assert raw.count(place) >= 1
    path.write_bytes(raw.replace(place, place.swapcase(), 1))


def problems(plain: PlainUpper, snapshot_id: str) -> list[str]:
    driver = OverlayDriver(plain.top / "store")
    try:
        return driver.verify([snapshot_id], content=True)[snapshot_id]
    finally:
        driver.close()


def test_a_whole_store_is_whole(plain: PlainUpper) -> None:
    plain.capture()
    found = check(plain)
    assert found.is_whole and not found.cache_remade
    assert (found.packs, found.snapshots) == (1, 1)
    assert found.objects > 10 and found.content_bytes > 3000


def test_a_flipped_byte_costs_one_object_and_the_next_capture_stores_it_again(plain: PlainUpper) -> None:
    first, index = plain.capture()
    flip(pack_of(plain, first.snapshot_id), b"file 7\n" * 3)
    untouched, index = plain.capture(index)
    assert untouched.stored_bytes == 0, "nobody knows yet"
    found = check(plain)
    (pack,) = found.damaged
    assert (pack.pack_id, len(pack.damaged), len(found.lost)) == (first.snapshot_id, 1, 1)
    assert pack.moved_to is not None and pack.moved_to.exists()
    (problem,) = problems(plain, first.snapshot_id)
    assert problem.startswith("/f7: ")
    healer, _ = plain.capture(index)
    assert healer.stored_bytes == len(b"file 7\n" * 50)
    assert problems(plain, first.snapshot_id) == problems(plain, healer.snapshot_id) == []
    assert check(plain).is_whole


def test_without_repair_everything_stays(plain: PlainUpper) -> None:
    first, _ = plain.capture()
    flip(pack_of(plain, first.snapshot_id), b"file 7\n" * 3)
    before = sorted((path.name, path.stat().st_ino) for path in (plain.top / "store/packs").iterdir())
    for _ in range(2):
        (pack,) = check(plain, repair=False).damaged
        assert pack.moved_to is None
    assert sorted((path.name, path.stat().st_ino) for path in (plain.top / "store/packs").iterdir()) == before


def test_a_byte_of_a_compressed_frame_costs_what_lies_in_the_frame(plain: PlainUpper) -> None:
    first, _ = plain.capture()
    Collector(plain.top / "store").run()
    (path,) = (plain.top / "store/packs").iterdir()
    raw = bytearray(path.read_bytes())
    raw[40] ^= 0x55
    path.write_bytes(raw)
    found = check(plain)
    assert found.lost
    assert problems(plain, first.snapshot_id)
    second, _ = plain.capture()
    assert problems(plain, first.snapshot_id) == problems(plain, second.snapshot_id) == []


def test_every_flipped_byte_of_a_pack_is_found(plain: PlainUpper) -> None:
    """In objects, index and trailer: what lies outside of the objects costs none while the cache knows them."""
    with plain.content.writer("s-small") as writer:
        digests = [writer.put(data) for data in (b"a" * 40, b"b" * 40)]
    plain.content.close()
    path = plain.top / "store/packs/s-small.pack"
    raw = path.read_bytes()
    for position in range(len(raw)):
        for left in (plain.top / "store/packs").iterdir():
            left.unlink()
        path.write_bytes(raw)
        store = ContentStore(plain.top / "store")
        assert all(digest in store for digest in digests)
        store.close()
        path.write_bytes(raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :])
        found = check(plain)
        assert [pack.pack_id for pack in found.damaged] == ["s-small"], position
        in_objects = 8 <= position < 88
        assert len(found.lost) == in_objects, position


def test_an_object_that_another_pack_holds_too_is_not_lost(plain: PlainUpper) -> None:
    first, _ = plain.capture()
    path = pack_of(plain, first.snapshot_id)
    (plain.top / "store/packs/s-twin.pack").write_bytes(path.read_bytes())
    flip(path, b"file 7\n" * 3)
    found = check(plain)
    assert len(found.damaged) == 1 and not found.lost
    assert problems(plain, first.snapshot_id) == []


def test_a_damaged_manifest_is_named(plain: PlainUpper) -> None:
    first, _ = plain.capture()
    (plain.top / f"store/manifests/{first.snapshot_id}.json").write_text("{}")
    found = check(plain)
    assert list(found.bad_manifests) == [first.snapshot_id]
    assert not found.is_whole and not found.damaged


@pytest.mark.parametrize("what", ["gone", "cut short", "foreign", "wrong rows"])
def test_a_damaged_cache_costs_nothing(plain: PlainUpper, what: str) -> None:
    first, _ = plain.capture()
    plain.content.close()
    (cache,) = (plain.top / "store/locations").glob("*.sqlite")
    if what == "gone":
        cache.unlink()
    elif what == "cut short":
        os.truncate(cache, cache.stat().st_size // 2)
    elif what == "foreign":
        cache.write_bytes(b"no database" * 1000)
    else:
        with sqlite3.connect(cache) as database:
            database.execute("UPDATE objects SET start = start + 1")
        database.close()
    found = check(plain)
    assert found.is_whole
    assert found.cache_remade is (what == "wrong rows") or what == "cut short"
    assert problems(plain, first.snapshot_id) == []
    second, _ = plain.capture()
    assert second.stored_bytes == 0
    assert len(packs_in(plain.top / "store/packs")) == 1


def test_a_full_place_for_the_cache_is_no_error(plain: PlainUpper) -> None:
    """Nothing can be written where the cache belongs: it is kept in memory."""
    (plain.top / "store/locations").write_text("no directory")
    first, _ = plain.capture()
    second, _ = plain.capture()
    assert first.stored_bytes > 0 and second.stored_bytes == 0
    assert problems(plain, first.snapshot_id) == []
