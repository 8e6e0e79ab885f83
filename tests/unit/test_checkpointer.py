"""Taking breakpoints: the lines of a pair, their order, and what stands in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.checkpointer import FILES_LISTED_MAX, Pending
from orchestrator.tools import Outcome
from snapshot_drivers.errors import CaptureError
from tests.unit.directory_container import SUBMIT, Bench, bash, call, rewind
from tests.unit.troubled_driver import Trouble, trouble


def pending(before: str | None, *, ran: bool = True) -> Pending:
    return Pending("c1", "bash", "{}", Outcome("said", exit_code=0), before, ran=ran)


def test_a_call_and_the_breakpoint_after_it_share_one_snapshot(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [])
    with bench.session as session:
        first = session.checkpointer.checkpoint("manual")
        (bench.container.root / "a").write_text("1")
        with session.checkpointer.begin(pending(first.after)) as taken:
            second = taken.committed()
    kinds = [event.kind for event in bench.events]
    assert kinds == ["run", "checkpoint", "tool_call", "checkpoint"]
    tool = bench.of("tool_call")[0]
    assert (tool.before, tool.after) == (first.after, second.after)
    assert second.parent_seq == tool.seq and second.files_changed_count == 1
    assert [change.path for change in tool.files_changed] == ["/a"]


def test_a_call_that_did_not_touch_the_container_costs_no_snapshot(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [], driver=Trouble)
    with bench.session as session:
        first = session.checkpointer.checkpoint("manual")
        with trouble(bench, fail_capture=CaptureError("asked for one")):
            assert session.checkpointer.settle(pending(first.after, ran=False)) == first.after
    assert bench.of("tool_call")[0].after == first.after


def test_at_most_200_changes_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch $(seq 300); touch done"), SUBMIT])
    bench.run()
    event = bench.of("tool_call")[0]
    assert len(event.files_changed) == FILES_LISTED_MAX and event.files_changed_count == 301
    assert bench.of("checkpoint")[1].files_changed_count == 301


def test_a_breakpoint_counts_what_all_calls_before_it_changed(tmp_path: Path) -> None:
    calls = [call("bash", command="touch a b"), call("bash", command="rm a; touch c"), call("backtrack_candidates")]
    bench = Bench(tmp_path, [{"calls": calls}, bash("touch done"), SUBMIT])
    bench.run()
    assert [event.files_changed_count for event in bench.of("checkpoint")] == [0, 3, 1, 0]


def test_numbers_of_breakpoints_are_never_used_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch a"), rewind(0), bash("touch done"), SUBMIT], keep=True)
    bench.run()
    with bench.open() as session:
        session.restore(0)
        row = session.checkpoint("by hand")
    assert [event.breakpoint_id for event in bench.of("checkpoint")] == list(range(row.breakpoint_id + 1))
    assert (row.kind, row.note, row.parent_id, row.head) == ("manual", "by hand", 0, True)


def test_a_failed_capture_leaves_the_call_in_the_log_without_a_snapshot(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [], driver=Trouble)
    with bench.session as session:
        first = session.checkpointer.checkpoint("manual")
        with trouble(bench, fail_capture=CaptureError("disk full")):
            with session.checkpointer.begin(pending(first.after)) as taken, pytest.raises(CaptureError):
                taken.committed()
            with pytest.raises(CaptureError):
                session.checkpointer.settle(pending(first.after))
    assert [event.after for event in bench.of("tool_call")] == [None, None]
    assert len(bench.of("checkpoint")) == 1


def test_the_next_capture_builds_on_the_state_that_the_container_last_had(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch a"), rewind(0), bash("touch done"), SUBMIT], keep=True)
    bench.run()
    rewound = bench.of("rewind")[0]
    after = bench.of("checkpoint")[3]
    assert bench.driver.load(after.after).parent_id == rewound.after
    with bench.open() as session:
        assert session.checkpointer.last_snapshot_id == bench.of("checkpoint")[-1].after


def test_a_restore_says_what_it_did(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch a"), bash("touch done"), SUBMIT])
    bench.run()
    with bench.open() as session:
        done = session.restore(1)
    assert (done.run_id, done.breakpoint_id, done.verified) == ("bench", 1, "difference")
    assert done.container == done.previous_container == bench.container.name
    assert done.processes.restored == [] and done.restore_ms > 0


def test_daemons_are_started_again_after_a_restore_and_a_lost_one_undoes_it(tmp_path: Path) -> None:
    daemons = [{"name": "d", "start": "exec sleep 60", "ready": "test ! -e broken", "timeout_s": 0.3}]
    replies = [bash("touch broken"), bash("rm broken"), rewind(1), rewind(0), bash("touch done"), SUBMIT]
    bench = Bench(tmp_path, replies, daemons=daemons)
    assert bench.run().status == "succeeded"
    refused = bench.of("tool_call")[2]
    assert refused.result.startswith("error: not rewound") and "daemon d was not ready" in refused.result
    assert [event.breakpoint_id for event in bench.of("rewind")] == [0]
    assert all(event.shared for event in bench.of("tool_call") if event.name == "bash")
