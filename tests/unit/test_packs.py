"""The store: what it says that it has it can give back, and nothing that fails leaves anything half-done."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions, Coverage, Snapshot, StateKind
from snapshot_drivers.errors import CaptureError, StoreDamaged, UnknownSnapshot
from snapshot_drivers.overlay.capture import Index
from snapshot_drivers.overlay.driver import OverlayDriver
from snapshot_drivers.overlay.index_file import INDEXES, load_index, save_index
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.overlay.scan import Scanner
from snapshot_drivers.store import pack
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import Manifest, ManifestStore, new_snapshot_id
from snapshot_drivers.tree import digest_of
from tests.unit.plain_upper import PlainUpper

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tiny tmpfs needs root")


def store_pack(root: Path, pack_id: str, *objects: bytes) -> list[bytes]:
    store = ContentStore(root)
    with store.writer(pack_id) as writer:
        digests = [writer.put(data) for data in objects]
    store.close()
    return digests


def packs(root: Path) -> list[str]:
    return sorted(os.listdir(root / "packs"))


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_objects_come_back_and_are_stored_once(tmp_path: Path) -> None:
    digests = store_pack(tmp_path, "one", b"a" * 5000, b"b", b"", b"b")
    store = ContentStore(tmp_path)
    assert [store.read(digest) for digest in digests] == [b"a" * 5000, b"b", b"", b"b"]
    with store.writer("two") as writer:
        assert [writer.put(data) for data in (b"b", b"a" * 5000)] == [digests[1], digests[0]]
    assert writer.stored_bytes == 0
    assert packs(tmp_path) == ["one.pack"]


@pytest.mark.parametrize("length", [0, 7, 40, -100, -1])
def test_a_torn_pack_costs_its_own_objects_and_no_others(tmp_path: Path, length: int) -> None:
    (lost,) = store_pack(tmp_path, "a-torn", os.urandom(3000))
    (kept,) = store_pack(tmp_path, "b-whole", b"kept")
    torn = tmp_path / "packs/a-torn.pack"
    os.truncate(torn, length if length >= 0 else torn.stat().st_size + length)
    shutil.rmtree(tmp_path / "locations")
    store = ContentStore(tmp_path)
    assert store.read(kept) == b"kept"
    with pytest.raises(StoreDamaged, match=r"a-torn\.pack"):
        store.read(lost)
    with store.writer("c") as writer:
        again = writer.put(b"new")
    assert store.read(again) == b"new"


def test_what_a_torn_pack_held_is_stored_again(tmp_path: Path) -> None:
    data = os.urandom(3000)
    (digest,) = store_pack(tmp_path, "torn", data)
    os.truncate(tmp_path / "packs/torn.pack", 1000)
    assert store_pack(tmp_path, "again", data) == [digest]
    assert ContentStore(tmp_path).read(digest) == data


def test_a_flipped_byte_is_found_wherever_it_is(tmp_path: Path) -> None:
    digests = store_pack(tmp_path, "p", b"x" * 100, b"y" * 100)
    path = tmp_path / "packs/p.pack"
    whole = path.read_bytes()
    for position in range(len(pack.MAGIC), len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        shutil.rmtree(tmp_path / "locations", ignore_errors=True)
        store = ContentStore(tmp_path)
        with pytest.raises(StoreDamaged, match=r"p\.pack"):
            for digest in digests:
                store.read(digest)
        store.close()


def test_a_pack_that_vanishes_meanwhile_is_damage_and_no_riddle(tmp_path: Path) -> None:
    (digest,) = store_pack(tmp_path, "p", b"x")
    store = ContentStore(tmp_path)
    assert digest in store
    (tmp_path / "packs/p.pack").unlink()
    with pytest.raises(StoreDamaged, match=r"p\.pack"):
        store.read(digest)


@needs_root
def test_a_full_disk_fails_the_capture_and_leaves_nothing(tiny: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    store = ContentStore(tiny)
    with pytest.raises(CaptureError, match="No space left"), store.writer("p") as writer:
        for _ in range(40):
            writer.put(os.urandom(100_000))
    store.close()
    assert packs(tiny) == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert store_pack(tiny, "q", b"small")
    assert packs(tiny) == ["q.pack"]


@needs_root
@pytest.mark.parametrize("size", [900_000, 1_040_000])
def test_a_disk_that_fills_up_while_a_tree_is_read_is_no_unreadable_file(tiny: Path, tmp_path: Path, size: int) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in "abcdef":
        (tree / name).write_bytes(os.urandom(size))
    store = ContentStore(tiny)
    with (
        beneath.closing(os.open(tree, os.O_RDONLY)) as root_fd,
        pytest.raises(CaptureError, match="No space left"),
        store.writer("p") as writer,
    ):
        Scanner(writer.put, CaptureOptions(), skip=PathSet()).scan(root_fd)
    store.close()
    assert packs(tiny) == []


def test_no_object_is_misplaced_after_a_write_that_failed(tmp_path: Path) -> None:
    """The disk was full for a moment: the caller goes on regardless, and must not commit."""
    store = ContentStore(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(CaptureError), store.writer("p") as writer:
        writer.put(b"first")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(CaptureError):
                writer.put(os.urandom(3 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.put(b"second")
    assert packs(tmp_path) == []


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)
    with pytest.raises(KeyboardInterrupt), store.writer("p") as writer:
        writer.put(b"x")
        raise KeyboardInterrupt
    assert packs(tmp_path) == []
    assert digest_of(b"x") not in store


def test_a_name_that_cannot_be_given_leaves_nothing(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)
    (tmp_path / "packs/p.pack").mkdir()
    (tmp_path / "packs/p.pack/full").mkdir()
    with pytest.raises(CaptureError), store.writer("p") as writer:
        writer.put(b"x")
    assert packs(tmp_path) == ["p.pack"]


def _write_many(root: Path, name: str) -> None:
    for number in range(20):
        store_pack(root, f"{name}{number}", *(b"shared %d" % item for item in range(number)), name.encode() * 100)


def test_two_processes_write_one_store(tmp_path: Path) -> None:
    workers = [multiprocessing.get_context("fork").Process(target=_write_many, args=(tmp_path, name)) for name in "ab"]
    for worker in workers:
        worker.start()
    reader = ContentStore(tmp_path)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    for data in [b"shared %d" % item for item in range(19)] + [b"a" * 100, b"b" * 100]:
        assert reader.read(digest_of(data)) == data


def test_temporary_files_of_the_dead_are_ignored(tmp_path: Path) -> None:
    (digest,) = store_pack(tmp_path, "p", b"x")
    (tmp_path / "packs/.tmp-q").write_bytes(b"torn")
    (tmp_path / "packs/.tmp-q.pack").write_bytes(b"torn")
    manifests = ManifestStore(tmp_path)
    (tmp_path / "manifests/.tmp-s-1.json").write_bytes(b"torn")
    assert ContentStore(tmp_path).read(digest) == b"x"
    with pytest.raises(UnknownSnapshot):
        manifests.read(new_snapshot_id())


def test_few_descriptors_serve_many_packs(tmp_path: Path) -> None:
    digests = [store_pack(tmp_path, f"p{number}", b"%d" % number)[0] for number in range(100)]
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    store = ContentStore(tmp_path)
    for digest in digests + digests:
        store.read(digest)
    assert len(os.listdir("/proc/self/fd")) <= before + 64
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


def manifest(snapshot_id: str) -> Manifest:
    snapshot = Snapshot(
        snapshot_id=snapshot_id,
        parent_id=None,
        driver="overlay",
        created_at="",
        coverage=Coverage.of([]),
        root_digest="",
        entries=0,
        stored_bytes=0,
        capture_ms=0,
        frozen_ms=0,
    )
    return Manifest(
        snapshot=snapshot, image_id="", layer_ids=(), architecture="", lower_dirs=(), trees=(), etc_files=()
    )


def test_a_manifest_comes_back_and_that_of_another_snapshot_is_not_taken(tmp_path: Path) -> None:
    store = ManifestStore(tmp_path)
    one, two = new_snapshot_id(), new_snapshot_id()
    store.write(manifest(one))
    assert store.read(one) == manifest(one)
    (tmp_path / f"manifests/{one}.json").rename(tmp_path / f"manifests/{two}.json")
    with pytest.raises(StoreDamaged, match="another snapshot"):
        store.read(two)
    with pytest.raises(UnknownSnapshot):
        store.read(one)


@pytest.mark.parametrize("keep", [0, 1, 50, -1])
def test_a_manifest_cut_short_is_damage(tmp_path: Path, keep: int) -> None:
    store, name = ManifestStore(tmp_path), new_snapshot_id()
    store.write(manifest(name))
    path = tmp_path / f"manifests/{name}.json"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StoreDamaged, match=name):
        store.read(name)


@needs_root
def test_a_manifest_that_finds_no_room_is_not_there(tiny: Path) -> None:
    store, name = ManifestStore(tiny), new_snapshot_id()
    (tiny / "filler").write_bytes(
        bytes(1 << 20 if os.statvfs(tiny).f_bavail > 256 else os.statvfs(tiny).f_bavail * 4096)
    )
    with pytest.raises(CaptureError, match="No space left"):
        store.write(manifest(name))
    assert os.listdir(tiny / "manifests") == []
    with pytest.raises(UnknownSnapshot):
        store.read(name)


def test_an_index_cut_short_or_changed_is_an_empty_one(tmp_path: Path) -> None:
    with beneath.closing(os.open(tmp_path, os.O_RDONLY)) as root_fd:
        taken = Scanner(digest_of, CaptureOptions(), skip=PathSet()).scan(root_fd)
    key = (StateKind.ROOTFS, "/")
    save_index(tmp_path, "c", Index({key: taken}, frozenset([b"/m"]), tmp_path))
    assert load_index(tmp_path, "c").trees[key].digest == taken.digest
    path = tmp_path / INDEXES / "c"
    whole = path.read_bytes()
    for damaged in (b"", whole[:20], whole[:-1], whole[:40] + b"\0" + whole[41:], bytes(100)):
        path.write_bytes(damaged)
        assert load_index(tmp_path, "c") == Index()
    assert os.listdir(tmp_path / INDEXES) == ["c"]


def test_a_changed_byte_of_a_large_file_stores_one_block_and_one_list(tmp_path: Path) -> None:
    """Its list of blocks is stored by spans; so what a change adds does not depend on the size."""
    plain = PlainUpper(tmp_path)
    large = plain.upper / "large"
    with large.open("wb") as file:
        for number in range(90):
            file.write(number.to_bytes(4) * (1 << 18))
        file.seek(20 << 20, os.SEEK_CUR)
        file.write(b"behind a hole of a span and more")
    first, index = plain.capture()
    assert first.stored_bytes < 91 * (1 << 18) + 100_000, "equal blocks are stored once"
    with large.open("r+b") as file:
        file.seek(70 << 20)
        file.write(b"x")
    second, _ = plain.capture(index)
    assert (1 << 18) < second.stored_bytes < (1 << 18) + 20_000
    driver = OverlayDriver(tmp_path / "store")
    pieces = driver.read_file(second.snapshot_id, "/large")
    assert pieces is not None
    assert blake3_of(pieces) == blake3_of(iter([large.read_bytes()]))
    assert driver.verify([first.snapshot_id, second.snapshot_id]) == {first.snapshot_id: [], second.snapshot_id: []}
    driver.close()


def blake3_of(pieces: Iterator[bytes]) -> bytes:
    found = blake3()
    for piece in pieces:
        found.update(piece)
    return found.digest()
