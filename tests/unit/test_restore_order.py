"""A capture and a restore as a whole, on plain directories: nothing is said to be done that was not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_drivers.base import CaptureOptions, CoverageState, StateKind
from snapshot_drivers.errors import CaptureError, RestoreError, RestoreRefused, SnapshotError
from snapshot_drivers.overlay import restore as restore_module
from snapshot_drivers.overlay.changes import file_content
from snapshot_drivers.overlay.etc_files import capture_etc, restore_etc
from snapshot_drivers.overlay.layers import Layers
from snapshot_drivers.overlay.sources import open_sources
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.tree import digest_of
from tests.tree_walker import walk
from tests.unit.plain_upper import PlainUpper, descriptors

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the engine's directories must belong to root")
ROOTFS = (StateKind.ROOTFS, "/")


@pytest.fixture
def plain(tmp_path: Path) -> PlainUpper:
    return PlainUpper(tmp_path / "engine")


def missing(plain: PlainUpper, path: str) -> str:
    snapshot, _ = plain.capture()
    return next(item.reason or "" for item in snapshot.coverage.items if item.path == path)


def test_memory_that_is_not_there_after_the_start_fails_the_restore(plain: PlainUpper) -> None:
    place = plain.mount(StateKind.TMPFS, "/tm")
    (place / "f").write_text("x")
    manifest = plain.snapshot_of({ROOTFS: plain.upper, (StateKind.TMPFS, "/tm"): place})
    del plain.memory["/tm"]
    with plain.staged(manifest.snapshot.snapshot_id) as staged, pytest.raises(RestoreError, match="/tm"):
        staged.apply()


def test_a_volume_that_cannot_be_opened_is_refused_before_anything_is_touched(plain: PlainUpper) -> None:
    place = plain.mount(StateKind.VOLUME, "/vol", "v")
    (plain.upper / "f").write_text("1")
    snapshot, _ = plain.capture()
    (plain.upper / "f").write_text("2")
    place.rmdir()
    with pytest.raises(SnapshotError, match="/vol"), plain.staged(snapshot.snapshot_id):
        pass
    assert (plain.upper / "f").read_text() == "2"


def test_a_restore_can_be_repeated_after_memory_could_not_be_written(plain: PlainUpper) -> None:
    place = plain.mount(StateKind.TMPFS, "/tm")
    (place / "d").mkdir()
    (place / "d/f").write_text("x")
    os.link(place / "d/f", place / "d/g")
    (plain.upper / "f").write_text("1")
    os.link(plain.upper / "f", plain.upper / "g")
    wanted = walk(str(place)), walk(str(plain.upper))
    manifest = plain.snapshot_of({ROOTFS: plain.upper, (StateKind.TMPFS, "/tm"): place})
    (plain.upper / "f").unlink()
    with plain.staged(manifest.snapshot.snapshot_id) as staged:
        plain.memory["/tm"] = Path("/proc/self")  # nothing can be made there
        with pytest.raises(RestoreError):
            staged.apply()
        with (plain.upper / "g").open("w") as file:  # the container ran
            file.write("of the second life")
        fresh = plain.top / "fresh"
        fresh.mkdir()
        plain.memory["/tm"] = fresh
        staged.apply(verify="full")
    assert (walk(str(fresh)), walk(str(plain.upper))) == wanted
    assert not [name for name in os.listdir(fresh) if name.startswith(".")]


def test_content_that_is_damaged_meanwhile_is_an_error_of_the_restore(plain: PlainUpper) -> None:
    (plain.upper / "f").write_text("1")
    snapshot, _ = plain.capture()
    (plain.upper / "f").write_text("2")
    with plain.staged(snapshot.snapshot_id) as staged:
        (plain.upper / "g").write_text("so that the plan must be made again")
        for pack in (plain.top / "store/packs").iterdir():
            data = bytearray(pack.read_bytes())
            for position in range(8, len(data) - 200, 9):
                data[position] ^= 1
            pack.write_bytes(data)
        with pytest.raises(RestoreError, match=snapshot.snapshot_id):
            staged.apply()


def test_staging_beside_or_inside_leaves_no_trace_when_it_is_discarded(plain: PlainUpper) -> None:
    bind = plain.mount(StateKind.BIND, "/data")
    (bind / "f").write_text("1")
    snapshot, _ = plain.capture()
    (bind / "f").write_text("2")
    os.utime(bind, ns=(1, 1_700_000_000_123_456_789))
    before = walk(str(bind)), os.stat(bind).st_mtime_ns, descriptors(plain)
    with plain.staged(snapshot.snapshot_id):
        pass
    assert (walk(str(bind)), os.stat(bind).st_mtime_ns, descriptors(plain)) == before
    with plain.staged(snapshot.snapshot_id) as staged:
        staged.apply(verify="full")
    assert (bind / "f").read_text() == "1"
    assert plain.capture()[0].root_digest == snapshot.root_digest


def test_what_a_dead_restore_left_beside_a_tree_is_cleared_by_the_next(plain: PlainUpper) -> None:
    (plain.upper / "f").write_text("1")
    snapshot, _ = plain.capture()
    (plain.upper / "f").unlink()
    (plain.upper.parent / ".orchestrator-restore-0123/d").mkdir(parents=True)
    with plain.staged(snapshot.snapshot_id) as staged:
        staged.apply()
    assert sorted(os.listdir(plain.upper.parent)) == ["lower", "upper"]


def test_an_interrupt_while_staging_leaves_nothing_behind(plain: PlainUpper, monkeypatch: pytest.MonkeyPatch) -> None:
    (plain.upper / "f").write_text("1")
    snapshot, _ = plain.capture()
    (plain.upper / "f").unlink()
    before = descriptors(plain)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(restore_module.StagedRestore, "_read_ahead", interrupted)
    with pytest.raises(KeyboardInterrupt), plain.staged(snapshot.snapshot_id):
        pass
    assert descriptors(plain) == before
    assert sorted(os.listdir(plain.upper.parent)) == ["lower", "upper"]


@pytest.mark.parametrize("kind", [StateKind.ROOTFS, StateKind.BIND, StateKind.VOLUME])
def test_no_name_of_the_products_own_hides_notes_from_a_rewind(plain: PlainUpper, kind: StateKind) -> None:
    place = (
        plain.upper if kind is StateKind.ROOTFS else plain.mount(kind, "/m", "m" if kind is StateKind.VOLUME else None)
    )
    clean, _ = plain.capture()
    (place / ".orchestrator-restore").mkdir()
    (place / ".orchestrator-restore/note").write_text("remember")
    noted, before = plain.capture()[0], walk(str(place))
    assert noted.root_digest != clean.root_digest
    for snapshot, wanted in ((clean, []), (noted, before), (clean, [])):
        with plain.staged(snapshot.snapshot_id) as staged:
            staged.apply(verify="full")
        assert walk(str(place)) == wanted


def test_an_index_whose_objects_have_left_the_store_is_not_believed(plain: PlainUpper) -> None:
    (plain.upper / "d").mkdir()
    (plain.upper / "d/f").write_text("1")
    time.sleep(0.05)
    _, index = plain.capture()
    for pack in (plain.top / "store/packs").iterdir():
        pack.unlink()
    plain.content = ContentStore(plain.top / "store")
    snapshot, _ = plain.capture(index)
    (plain.upper / "d/f").write_text("2")
    with plain.staged(snapshot.snapshot_id) as staged:
        staged.apply()
    assert (plain.upper / "d/f").read_text() == "1"


@pytest.mark.parametrize("excluded", ["/m/vol", "/m"])
def test_a_mount_on_or_below_an_excluded_path_is_left_alone(plain: PlainUpper, excluded: str) -> None:
    place = plain.mount(StateKind.VOLUME, "/m/vol", "v")
    (place / "f").write_text("1")
    plain.options = CaptureOptions(excluded=(excluded,))
    snapshot, _ = plain.capture()
    states = {item.path: item.state for item in snapshot.coverage.items if item.kind is StateKind.VOLUME}
    assert states == {"/m/vol": CoverageState.EXCLUDED}
    (place / "f").write_text("2")
    with plain.staged(snapshot.snapshot_id) as staged:
        staged.apply()
    assert (place / "f").read_text() == "2"


def test_an_error_of_the_host_is_an_error_of_the_capture(plain: PlainUpper, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("snapshot_drivers.beneath.read_xattrs", broken)
    with pytest.raises(CaptureError, match="Input/output"):
        plain.capture()


@pytest.fixture
def etc(plain: PlainUpper) -> Iterator[Path]:
    place = plain.top / "hosts"
    place.write_text("127.0.0.1 localhost\n" * 50)
    plain.etc_files = (("/etc/hosts", place),)
    yield place


def test_the_mode_of_a_file_under_etc_is_part_of_the_state(plain: PlainUpper, etc: Path) -> None:
    first, _ = plain.capture()
    etc.chmod(0o666)
    assert plain.capture()[0].root_digest != first.root_digest


def test_a_file_under_etc_is_written_whole(plain: PlainUpper, etc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = etc.read_bytes()
    with plain.content.writer("p") as writer:
        stored = capture_etc(plain.target(), writer.put)
    etc.write_text("")
    write, write_at = os.write, os.pwrite
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:100]))
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write_at(file, data[:100], at))
    restore_etc(plain.target(), stored, lambda digest: text)
    assert etc.read_bytes() == text
    assert digest_of(text).hex() == stored[0].digest


def test_a_path_with_dots_names_no_file_of_a_snapshot(plain: PlainUpper) -> None:
    (plain.top / "l/none").mkdir(parents=True)
    snapshot, _ = plain.capture()
    manifest = plain.manifests.read(snapshot.snapshot_id)
    for path in ("/..", "/../x", "/a/../b", "/."):
        assert file_content(manifest, path, plain.content.read) is None


def test_mounts_that_cannot_be_opened_cost_no_descriptors(plain: PlainUpper) -> None:
    plain.mount(StateKind.TMPFS, "/a")
    plain.mount(StateKind.TMPFS, "/b")
    plain.memory["/a"] = Path("/etc/hostname")
    before = descriptors(plain)
    target = plain.target()
    running = type(target)(**{**vars(target), "init_pid": 1})
    layers = Layers(plain.upper, (), plain.top / "layer/merged")
    with pytest.raises(OSError, match=os.strerror(20)), open_sources(running, layers, plain.open_mounts, disk=False):
        pass
    assert descriptors(plain) == before


def test_files_under_etc_that_have_no_place_in_the_container_are_refused(plain: PlainUpper, etc: Path) -> None:
    snapshot, _ = plain.capture()
    plain.etc_files = ()
    with pytest.raises(RestoreRefused, match="/etc/hosts"), plain.staged(snapshot.snapshot_id):
        pass
