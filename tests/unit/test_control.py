"""A run that is changed while it is driven: by its socket, with the driver's thread alone moving it."""

from __future__ import annotations

import shutil
import socket
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.control import Unattended, ask
from orchestrator.desk import Closed, Desk
from orchestrator.errors import Busy, HostError, UsageError
from orchestrator.guests import Guests
from orchestrator.lineage import checkpoints
from orchestrator.memory import is_rewind_message
from orchestrator.wishes import (
    SOCKET_FILE,
    CheckpointWish,
    ExecWish,
    Failure,
    Lines,
    Request,
    RestoreWish,
    RewindWish,
    StatusWish,
    StopWish,
    VisitWish,
    socket_address,
)
from snapshot_drivers.errors import RestoreRefused, SnapshotError
from tests.unit.directory_container import SUBMIT, Bench, bash, call
from tests.unit.driven_bench import DEAD_S, HELD, driven, in_background


def test_after_a_restore_the_run_goes_on_from_there_and_the_answer_of_the_old_path_is_dropped(tmp_path: Path) -> None:
    late = bash("echo late > a", delay_s=0.7, cost=0.25)
    bench = Bench(tmp_path, [bash("echo 1 > a", cost=0.5), late, bash("cat a; touch done"), SUBMIT])
    with driven(bench) as it:
        it.thinking(2)
        assert (it.root / "a").exists()
        answer = it.ask(RestoreWish(breakpoint_id=0))
        assert (answer["breakpoint_id"], answer["verified"]) == (0, "difference")
        it.until(lambda: any(event.kind == "restore" for event in it.events()))
    assert it.result is not None and it.result.status == "succeeded"
    assert bench.requests[2] == bench.requests[0], "the context of the breakpoint, byte for byte"
    restored = bench.of("restore")[0]
    after = [event for event in bench.events if event.seq > restored.seq]
    dropped = next(event for event in after if event.kind == "engine_error")
    assert dropped.cost_usd == 0.25 and it.result.cost_usd == pytest.approx(0.75)
    assert not any("late" in str(event.messages) for event in bench.events), "it never becomes part of a path"


def test_siblings_stay_listed_and_restorable(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("echo 1 > a"), bash(HELD), bash("touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        thread, answers = in_background(lambda: it.ask(RestoreWish(breakpoint_id=0)))
        it.go()
        thread.join()
        assert answers[0]["breakpoint_id"] == 0
    rows = {row.breakpoint_id: row for row in checkpoints(bench.events)}
    assert not rows[1].live and rows[1].snapshot_id is not None
    with bench.open() as session:
        session.restore(1)
    assert (it.root / "a").read_text() == "1\n"
    assert {row.breakpoint_id for row in checkpoints(bench.events) if row.live} == {0, 1}


def test_a_rewind_by_hand_is_the_agents_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch a"), bash(HELD), bash("ls; touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        thread, answers = in_background(lambda: it.ask(RewindWish(breakpoint_id=0, memory="a <b> is wrong")))
        it.go()
        thread.join()
    assert answers[0]["memory"] == "a <b> is wrong"
    assert it.result is not None and (it.result.status, it.result.rewinds) == ("succeeded", 1)
    asked = bench.requests[2]
    assert asked[:-1] == bench.requests[0] and is_rewind_message(asked[-1])
    own = Bench(agents(tmp_path), [bash("touch a"), rewinding(), bash("touch done"), SUBMIT])
    own.run()
    assert own.requests[2][-1] == asked[-1]


def agents(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


def rewinding() -> dict[str, Any]:
    return {"calls": [call("backtrack_commit", breakpoint_id=0, memory_summary="a <b> is wrong")]}


def test_the_rest_of_a_step_is_not_run_and_nothing_of_it_reaches_the_new_path(tmp_path: Path) -> None:
    calls = {"calls": [call("bash", command=f"{HELD}; echo late"), call("bash", command="touch never")]}
    bench = Bench(tmp_path, [bash("touch a"), calls, bash("touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        thread, _ = in_background(lambda: it.ask(RestoreWish(breakpoint_id=1)))
        it.until(lambda: it.ask(StatusWish())["waiting"] == 1)
        it.go()
        thread.join()
    first, second = [event for event in bench.of("tool_call") if event.step == 2]
    assert first.result == "late\nexit code 0" and first.after is not None
    assert second.error == "not run" and "operator" in second.result
    assert bench.requests[2] == bench.requests[1], "no result of the call that was under way"
    assert not (it.root / "never").exists() and not (it.root / "begun").exists()


def test_a_checkpoint_is_taken_between_steps_and_while_the_model_thinks(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash(HELD), bash("touch done", delay_s=1.0), SUBMIT])
    with driven(bench) as it:
        it.begun()
        thread, answers = in_background(lambda: it.ask(CheckpointWish(note="between")))
        it.until(lambda: it.ask(StatusWish())["waiting"] == 1)
        it.go()
        thread.join()
        assert answers[0]["note"] == "between" and answers[0]["kind"] == "manual"
        it.thinking(2)
        during = it.ask(CheckpointWish(note="during"))
    assert it.result is not None and it.result.status == "succeeded"
    asked = bench.of("model_call")[1]
    assert asked.breakpoint_id == during["breakpoint_id"] and asked.before == asked.after
    rows = checkpoints(bench.events)
    assert [row.kind for row in rows if row.live][:4] == ["model", "manual", "model", "manual"]
    assert bench.requests[1] == [*bench.requests[0], *asked_and_answered(bench)]


def asked_and_answered(bench: Bench) -> list[Any]:
    return [*bench.of("model_call")[0].messages, *bench.of("tool_call")[0].messages]


def test_a_wish_that_is_not_begun_in_time_is_withdrawn(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash(HELD), bash("touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        with pytest.raises(Busy, match=r"running the tool bash.*--wait.*orchestrator stop bench"):
            it.ask(RestoreWish(breakpoint_id=0), wait_s=0.2)
        assert it.ask(StatusWish())["waiting"] == 0
        it.go()
    assert bench.of("restore") == []


def test_a_client_that_has_gone_away_wants_nothing_any_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash(HELD), bash("touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        with socket.socket(socket.AF_UNIX) as connection, socket_address(tmp_path) as address:
            connection.connect(address)
            Lines(connection).send(Request(wish=RestoreWish(breakpoint_id=0), wait_s=60))
            it.until(lambda: it.ask(StatusWish())["waiting"] == 1)
        it.until(lambda: it.ask(StatusWish())["waiting"] == 0)
        it.go()
    assert bench.of("restore") == []


def test_wishes_are_served_one_after_the_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch a"), bash(HELD), bash("touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        first, one = in_background(lambda: it.ask(CheckpointWish(note="one")))
        it.until(lambda: it.ask(StatusWish())["waiting"] == 1)
        second, two = in_background(lambda: it.ask(RestoreWish(breakpoint_id=0)))
        it.until(lambda: it.ask(StatusWish())["waiting"] == 2)
        it.go()
        first.join()
        second.join()
    assert one[0]["note"] == "one" and two[0]["breakpoint_id"] == 0
    made = next(event for event in bench.of("checkpoint") if event.note == "one")
    assert made.seq < bench.of("rewind_intent")[0].seq


def test_a_refused_wish_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash(HELD), bash("touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        thread, answers = in_background(lambda: it.ask(RestoreWish(breakpoint_id=99)))
        it.until(lambda: it.ask(StatusWish())["waiting"] == 1)
        it.go()
        thread.join()
    assert isinstance(answers[0], UsageError) and "no breakpoint 99" in str(answers[0])
    assert it.result is not None and it.result.status == "succeeded"


def test_a_restore_that_fails_moves_neither_half(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch a"), bash(HELD), bash("ls a; touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        bench.container.fail_next_start = SnapshotError("the engine is ill")
        thread, answers = in_background(lambda: it.ask(RestoreWish(breakpoint_id=0)))
        it.until(lambda: it.ask(StatusWish())["waiting"] == 1)
        it.go()
        thread.join()
    assert isinstance(answers[0], SnapshotError) and "the run stands where it stood" in str(answers[0])
    assert it.result is not None and it.result.status == "succeeded"
    assert bench.of("tool_call")[2].result == "a\nexit code 0" and len(bench.requests[2]) > len(bench.requests[1])


def test_an_operators_command_moves_nothing_and_marks_the_tool_call_beside_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash("touch first"), bash(HELD), bash("touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        before = len(it.events())
        done = it.ask(ExecWish(command=["sh", "-c", "touch mine; printf 'out\\377'; exit 7"]))
        assert (done["exit_code"], done["output"]) == (7, "out\udcff")
        assert len(it.events()) == before
        it.go()
    own, beside, later = bench.of("tool_call")[:3]
    assert (own.shared, beside.shared, later.shared) == (False, True, False)
    assert "/mine" in [change.path for change in beside.files_changed]


def test_an_operators_command_ends_with_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash(HELD), bash("touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        thread, answers = in_background(lambda: it.ask(ExecWish(command=["sleep", "60"])))
        it.until(lambda: bench.container.other_processes() > 1)
        it.ask(StopWish())
        thread.join()
    assert isinstance(answers[0], HostError) and "the run ended" in str(answers[0])


def test_no_capture_begins_while_a_visitor_comes_in(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash(HELD), bash("touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()

        def enter() -> None:
            it.go()
            time.sleep(0.3)
            assert bench.of("tool_call") == [], "its line waits for the capture"

        ask(tmp_path, VisitWish(), wait_s=DEAD_S, when_begun=enter)
    assert bench.of("tool_call")[0].shared


def test_after_the_end_nobody_listens(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash(HELD), bash("touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        mode = (tmp_path / SOCKET_FILE).lstat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
        it.go()
    assert not (tmp_path / SOCKET_FILE).exists()
    with pytest.raises(Unattended):
        it.ask(StatusWish())


def test_a_wish_that_lies_there_at_the_end_is_given_back(tmp_path: Path) -> None:
    desk = Desk()
    ticket = desk.hand_in(CheckpointWish())
    desk.close()
    assert isinstance(ticket.error, Closed)
    with pytest.raises(Closed):
        desk.hand_in(CheckpointWish())


def test_a_dead_owners_socket_is_harmless(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / SOCKET_FILE))
    with pytest.raises(Unattended):
        ask(tmp_path, StatusWish(), wait_s=1)
    bench = Bench(tmp_path, [bash(HELD), bash("touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        assert it.ask(StatusWish())["doing"] == "running the tool bash"
        it.go()


def test_the_path_of_the_data_directory_may_be_long(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120) / ("e" * 120)
    directory.mkdir(parents=True)
    bench = Bench(directory, [bash(HELD), bash("touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        assert it.ask(StatusWish())["step"] == 1
        it.go()
    shutil.rmtree(tmp_path / ("d" * 120))


def test_what_is_no_request_is_answered_in_words(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [bash(HELD), bash("touch done"), SUBMIT])
    with driven(bench) as it:
        it.begun()
        for line in (b"{}\n", b"no json\n", b'{"wish": {"kind": "fly"}, "wait_s": 1}\n'):
            with socket.socket(socket.AF_UNIX) as connection, socket_address(tmp_path) as address:
                connection.connect(address)
                connection.sendall(line)
                answer = Lines(connection).receive()
            assert answer["state"] == "failed" and answer["error"]["type"] == "UsageError"
        it.go()
    assert it.result is not None and it.result.status == "succeeded"


def test_errors_keep_their_kind_and_exit_code_over_the_socket() -> None:
    refused = Failure(type="RestoreRefused", message="no").error()
    assert isinstance(refused, RestoreRefused) and refused.exit_code == 3 and str(refused) == "no"
    assert isinstance(Failure(type="annotations", message="x").error(), HostError)


def test_who_stays_is_seen_by_every_snapshot() -> None:
    guests = Guests()
    assert not guests.seen()
    with guests.visit():
        assert guests.seen() and guests.seen()
    assert guests.seen() and not guests.seen()
