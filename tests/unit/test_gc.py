"""``gc`` and ``fsck`` over a data directory: what a run keeps, what it says of what is gone, and what damage hits."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpointer import Checkpointer
from orchestrator.cli.main import main
from orchestrator.context_log import ContextLog
from orchestrator.errors import HostError
from orchestrator.events import RewindEvent
from orchestrator.journal import Journal
from orchestrator.observer import Observer
from orchestrator.retention import retained
from orchestrator.rewind import Rewinder
from orchestrator.snapshot_spec import Retention
from orchestrator.store.collect import GarbageCollection
from orchestrator.totals import totals
from snapshot_drivers.base import CaptureOptions
from snapshot_drivers.errors import RestoreRefused
from snapshot_drivers.memory import MemoryDriver
from snapshot_drivers.overlay.capture import Index
from snapshot_drivers.store.manifest import ManifestStore
from tests.unit.directory_container import DirectoryContainer
from tests.unit.run_builder import RunBuilder
from tests.unit.test_verify import Kept

LAST_0 = Retention(live_path=False, notes=False, last=0)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """Breakpoints 0 to 3; then back to 1, which leaves 2, 3 and the 4 that was taken before it; 5 with a note; 6, 7."""
    kept = Kept(tmp_path)
    builder = RunBuilder(kept.run.events_path, driver="overlay")
    index = Index()

    def checkpoint(kind: str, **fields: Any) -> None:
        nonlocal index
        (kept.upper.upper / "file").write_text(f"state {len(kept.snapshots)}" + "x" * 5000)
        snapshot, index = kept.upper.capture(index)
        kept.snapshots.append(snapshot.snapshot_id)
        builder.checkpoint(kind, before=snapshot.snapshot_id, after=snapshot.snapshot_id, **fields)

    checkpoint("before_rewind", note="before going back to 1")
    target = next(event for event in builder.events if getattr(event, "breakpoint_id", None) == 1)
    builder.add(
        RewindEvent(
            step=4,
            parent_seq=target.seq,
            after=target.after,
            breakpoint_id=1,
            from_seq=builder.head_seq(),
            memory="m",
            restore_ms=1,
            verified="difference",
        )
    )
    checkpoint("model", note="here it still worked")
    checkpoint("model")
    checkpoint("model")
    builder.close()
    kept.upper.content.close()
    return kept


Command = Callable[..., dict[str, Any]]


@pytest.fixture
def command(kept: Kept, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command with ``--json``; ``code``: the expected exit code."""

    def run(*words: str, code: int = 0) -> Any:
        assert main([*words, "--json", "--data-dir", str(kept.place.root)]) == code
        return json.loads(capsys.readouterr().out)

    return run


def events(kept: Kept) -> list[Any]:
    return ContextLog.open(kept.run.events_path, "r1").events


def there(kept: Kept) -> list[int]:
    """The numbers of the breakpoints whose snapshots exist."""
    ids = ManifestStore(kept.place.store).ids()
    return [number for number, snapshot_id in enumerate(kept.snapshots) if snapshot_id in ids]


@pytest.mark.parametrize(
    ("retention", "numbers"),
    [
        (Retention(live_path=True, notes=True, last=0), [0, 1, 5, 6, 7]),
        (Retention(live_path=False, notes=True, last=0), [5, 7]),
        (Retention(live_path=False, notes=False, last=2), [6, 7]),
        (Retention(live_path=False, notes=False, last=5), [3, 4, 5, 6, 7]),
        (LAST_0, [7]),
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_a_retention_keeps_what_it_says_and_where_the_run_stands(
    kept: Kept, retention: Retention | None, numbers: list[int]
) -> None:
    wanted = {kept.snapshots[number] for number in numbers}
    assert retained(events(kept), retention) & set(kept.snapshots) == wanted


def test_what_is_collected_is_said_and_is_no_damage(kept: Kept, command: Command) -> None:
    before_s = totals(events(kept)).duration_s
    found = command("gc", "--last", "0")
    assert found["runs"] == [{"run_id": "r1", "snapshots": 3, "kept": 5}]
    assert there(kept) == [0, 1, 5, 6, 7]
    rows = command("breakpoints", "r1")
    assert [row["breakpoint_id"] for row in rows if row["collected"]] == [2, 3, 4]
    assert not any(row["damaged"] for row in rows)
    assert next(row["breakpoint_id"] for row in rows if row["head"]) == 7, "the run stands where it stood"
    checked = command("verify", "r1", "--content")
    assert checked["whole"] and checked["restorable"] == [0, 1, 5, 6, 7]
    assert "collected by gc" in checked["not_restorable"][0]["reason"]
    refused = command("diff", "r1", "1", "2", code=2)
    assert "collected by gc" in refused["error"]["message"]
    assert totals(events(kept)).duration_s == before_s, "no time of the run passes"
    assert command("gc", "--last", "0")["runs"] == []
    assert command("fsck")["whole"]


def test_a_collected_breakpoint_is_not_restored(kept: Kept, command: Command) -> None:
    command("gc", "--last", "0")
    with kept.run.lock(), ContextLog.open(kept.run.events_path, "r1", writer=True) as log:
        container = DirectoryContainer(kept.place.root / "c", "r1")
        journal = Journal(log, Observer(), {})
        checkpointer = Checkpointer(MemoryDriver(kept.place.store), container, journal, CaptureOptions())
        count = len(log.events)
        with pytest.raises(RestoreRefused, match="breakpoint 3 was collected by gc"):
            Rewinder(checkpointer, after_restore=lambda: None).restore(3)
        assert len(log.events) == count, "nothing was done"
        checkpointer.close()


def test_the_tasks_own_retention_counts(kept: Kept, command: Command) -> None:
    kept.run.task_path.write_text(
        "name: t\nimage: x\nagent: {kind: manual}\nsnapshots: {retention: {live_path: false, last: 1}}\n"
    )
    command("gc")
    assert there(kept) == [5, 7]


def test_without_a_retention_every_named_snapshot_stays(kept: Kept, command: Command) -> None:
    found = command("gc")
    assert there(kept) == list(range(8))
    assert found["packs_after"] == 1 and found["bytes_after"] < found["bytes_before"]


def test_a_driven_run_keeps_all_and_its_unnamed_snapshots_too(kept: Kept, command: Command) -> None:
    target = kept.upper.target
    kept.upper.target = lambda: replace(target(), run_id="r1")  # type: ignore[method-assign]
    unnamed, _ = kept.upper.capture()
    with kept.run.lock():
        found = GarbageCollection(kept.place, retention=LAST_0, grace_s=0).run()
        assert found.driven == ["r1"] and found.unnamed == 0
    assert there(kept) == list(range(8))
    assert unnamed.snapshot_id in ManifestStore(kept.place.store).ids()


def test_an_unnamed_snapshot_goes_when_it_is_old_and_its_run_is_not_driven(kept: Kept) -> None:
    unnamed, _ = kept.upper.capture()
    young = GarbageCollection(kept.place).run()
    assert young.unnamed == 0
    assert unnamed.snapshot_id in ManifestStore(kept.place.store).ids()
    assert GarbageCollection(kept.place, grace_s=0).run().unnamed == 1
    assert unnamed.snapshot_id not in ManifestStore(kept.place.store).ids()
    assert there(kept) == list(range(8))


def test_a_damaged_log_keeps_everything(kept: Kept, command: Command) -> None:
    kept.upper.capture()
    kept.change(lambda lines: lines.__setitem__(4, b"{damaged"))
    found = GarbageCollection(kept.place, retention=LAST_0, grace_s=0).run()
    assert (found.unreadable, found.runs, found.unnamed) == (["r1"], [], 0)
    assert there(kept) == list(range(8))


def test_a_kill_between_the_line_and_the_removal_is_made_good(
    kept: Kept, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise HostError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(ManifestStore, "delete", die)
        command("gc", "--last", "0", code=6)
    assert there(kept) == list(range(8))
    assert command("verify", "r1")["restorable"] == [0, 1, 5, 6, 7]
    command("gc", "--last", "0")
    assert there(kept) == [0, 1, 5, 6, 7]
    assert sum(event.kind == "collect" for event in events(kept)) == 1


def test_fsck_names_the_breakpoints_that_damage_touches(kept: Kept, command: Command) -> None:
    pack = kept.place.store / f"packs/{kept.snapshots[5]}.pack"
    raw = pack.read_bytes()
    pack.write_bytes(raw.replace(b"state 5", b"STATE 5"))
    found = command("fsck", code=4)
    assert [one["pack"] for one in found["damaged_packs"]] == [kept.snapshots[5]]
    assert found["lost_objects"] == 1
    (run,) = found["damaged_runs"]
    assert (run["run_id"], [one["breakpoint_id"] for one in run["breakpoints"]]) == ("r1", [5])
    assert Path(found["damaged_packs"][0]["moved_to"]).exists()
    again = command("fsck", code=4)
    assert not again["damaged_packs"], "it was put aside"
    (kept.upper.upper / "file").write_text("state 5" + "x" * 5000)
    kept.upper.capture()
    assert command("fsck")["whole"], "a capture met the same content and stored it again"


def test_fsck_says_what_is_wrong_in_words(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    (kept.place.store / f"manifests/{kept.snapshots[3]}.json").write_text("{")
    os.truncate(kept.place.store / f"packs/{kept.snapshots[7]}.pack", 100)
    assert main(["fsck", "--data-dir", str(kept.place.root)]) == 4
    out = capsys.readouterr().out
    assert f"snapshot {kept.snapshots[3]}: " in out
    assert f"pack {kept.snapshots[7]}: " in out
    assert "run r1: breakpoints that cannot be restored: 3, 7\n" in out
    assert "DAMAGED: " in out


def test_indexes_of_containers_that_are_gone_are_removed(kept: Kept, command: Command) -> None:
    (kept.place.store / "indexes").mkdir(exist_ok=True)
    (kept.place.store / "indexes/feedbeef").write_bytes(b"x")
    command("gc")
    assert not (kept.place.store / "indexes/feedbeef").exists()


def test_without_a_store_there_is_nothing_to_collect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("gc", "fsck"):
        assert main([command, "--data-dir", str(tmp_path / "none")]) == 2
        assert "no store" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_full_disk_ends_a_collection_in_words(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert main(["gc", "--data-dir", str(kept.place.root)]) == 6
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be collected any further: " in capsys.readouterr().err
    assert main(["fsck", "--data-dir", str(kept.place.root)]) == 0
    assert there(kept) == list(range(8))
