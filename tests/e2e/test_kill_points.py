"""Killed at any moment, a run goes on as if nothing had been: same conversation, same files, every effect once.

``ORCHESTRATOR_RANDOM_KILLS``: how many runs are killed at random times (10). ``ORCHESTRATOR_KILL_ALL``: every line of
the log is a point. ``ORCHESTRATOR_KILL_TABLE``: a file for the table of results.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.data_dir import DataDir
from orchestrator.engine import Engine
from orchestrator.events import ModelCallEvent, NoteEvent, ResumeEvent, ToolCallEvent
from orchestrator.resume_point import RESTARTED
from orchestrator.totals import totals
from tests.e2e.kill_harness import EFFECTS, KILLED, Bench, Outcome

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ALL = bool(os.environ.get("ORCHESTRATOR_KILL_ALL"))
RANDOM_KILLS = int(os.environ.get("ORCHESTRATOR_RANDOM_KILLS") or 10)

# Where the launch is killed, and where the first resume is; the second goes on to the end.
POINTS: list[tuple[str, str | None]] = [
    ("frozen:2", "restore-staged"),
    ("after-pack:2", "restore-killed"),
    ("after-manifest:2", "restore-tree-moved"),
    ("before-model-call:4", "restore-before-start"),
    ("after-model-call:1", "restore-started"),
    ("before-tool-call:2", "before-tool-call"),
    ("in-tool-call:3", "in-tool-call"),
    ("after-tool-call:3", "frozen"),
    ("between-calls:0", "between-calls"),
    ("restore-staged", "after-manifest"),
    ("restore-intent-line", "restore-killed"),
    ("restore-killed", "restore-tree-moved"),
    ("restore-tree-moved", "restore-before-start"),
    ("restore-tree-moved:1", "restore-started"),
    ("restore-before-start", "restore-before-commit-line"),
    ("restore-started", None),
    ("restore-before-commit-line", "after-resume-line"),
    ("in-check", "in-check"),
    ("copy-made", "copy-made"),
    ("after-submission-line", None),
    ("after-log-line:0", None),
    ("after-log-line:8", None),
]
if ALL:
    POINTS += [
        ("after-manifest:3", "restore-tree-moved:1"),
        ("before-model-call:0", None),
        ("in-tool-call:2", None),
        ("in-tool-call:4", "after-resume-line"),
        ("between-calls:2", None),
        *((f"after-log-line:{line}", None) for line in range(45) if line not in (0, 8)),
    ]


@pytest.fixture(scope="module")
def bench(engine: Engine, base_image: str, helpers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A data directory in which the runs of this module live."""
    directory = tmp_path_factory.mktemp("kill")
    data_dir = DataDir(directory / "data").open()
    for file in helpers.iterdir():
        shutil.copy2(file, data_dir.bin / file.name)
        (data_dir.bin / file.name).chmod(0o755)
    made = Bench.make(data_dir, engine, base_image, directory)
    yield made
    for run_id in made.runs:
        made.forget(run_id)


@pytest.fixture(scope="module")
def quiet(bench: Bench) -> Outcome:
    """What the run comes to when nobody disturbs it."""
    run_id, ended = bench.launch()
    assert ended.code == 0, ended.output
    found = bench.outcome(run_id)
    assert sorted(found.effects) == sorted(EFFECTS)
    assert bench.left_behind(run_id) == []
    bench.forget(run_id)
    return found


class Table:
    """One line for each kill: point, resumed, aligned; also in a file, if one is named, as soon as it is known."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def append(self, row: str) -> None:
        self.rows.append(row)
        if path := os.environ.get("ORCHESTRATOR_KILL_TABLE"):
            with open(path, "a", encoding="utf-8") as file:
                file.write(row + "\n")


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """Printed at the end."""
    found = Table()
    found.append("point | resumed | aligned")
    yield found
    print("\n".join(found.rows))


def finish(bench: Bench, run_id: str, quiet: Outcome, table: Table, point: str) -> None:
    """Resumed once more, the run succeeds, and is what a quiet one is; a further resume changes nothing."""
    row = f"{point} | no | no"
    try:
        ended = bench.command("resume", run_id)
        assert ended.code == 0, ended.output
        row = f"{point} | yes | no"
        lines = len(bench.events(run_id))
        again = bench.command("resume", run_id)
        assert again.code == 0 and "has succeeded" in again.output, again.output
        assert len(bench.events(run_id)) == lines
        found = bench.outcome(run_id)
        assert found.context == quiet.context
        assert found.effects == quiet.effects
        assert found.results == quiet.results
        assert found.tree == quiet.tree
        verified = bench.command("verify", run_id, "--content")
        assert verified.code == 0, verified.output
        assert bench.left_behind(run_id) == []
        row = f"{point} | yes | yes"
    finally:
        table.append(row)
        bench.forget(run_id)


@pytest.mark.parametrize(("point", "second"), POINTS, ids=[f"{first}+{second}" for first, second in POINTS])
def test_killed_at_a_point_and_resumed_it_is_as_if_undisturbed(
    bench: Bench, quiet: Outcome, table: Table, point: str, second: str | None
) -> None:
    run_id, ended = bench.launch(crash_at=point)
    if ended.code == 0 and point.startswith("after-log-line"):
        bench.forget(run_id)
        pytest.skip("the log has fewer lines")
    assert ended.code == KILLED, ended.output
    bench.thawed_after_s(run_id)
    name = point
    if second is not None:
        assert bench.command("resume", run_id, crash_at=second).code == KILLED, "the second point was not reached"
        bench.thawed_after_s(run_id)
        name = f"{point}, then {second}"
    finish(bench, run_id, quiet, table, name)


@pytest.mark.parametrize("number", range(RANDOM_KILLS))
def test_killed_at_random_times_and_resumed_it_is_as_if_undisturbed(
    bench: Bench, quiet: Outcome, table: Table, number: int
) -> None:
    chance = random.Random(number)
    after_s = [chance.uniform(0.05, 4.0)]
    run_id, ended = bench.launch(kill_after_s=after_s[0])
    if ended.code == KILLED:
        bench.thawed_after_s(run_id)
        if chance.random() < 0.5:
            after_s.append(chance.uniform(0.05, 2.5))
            bench.command("resume", run_id, kill_after_s=after_s[1])
            bench.thawed_after_s(run_id)
    name = "random, after " + " and ".join(f"{value:.2f} s" for value in after_s)
    if not (bench.data_dir.root / "runs" / run_id / "run.json").exists():
        table.append(f"{name} | nothing had begun | yes")
        assert bench.command("resume", run_id).code in (2, 4)
        assert bench.left_behind(run_id) == []
        return
    finish(bench, run_id, quiet, table, name)


def test_what_was_cut_off_is_counted_and_the_agent_is_told_of_its_programs(bench: Bench) -> None:
    run_id, ended = bench.launch(crash_at="after-model-call:1")
    assert ended.code == KILLED
    assert bench.command("resume", run_id, crash_at="in-tool-call:1").code == KILLED
    assert bench.command("resume", run_id).code == 0
    events = bench.events(run_id)
    calls = [event for event in events if isinstance(event, ModelCallEvent)]
    assert [call.attempts for call in calls[:3]] == [1, 2, 1], "the lost request was sent again and counted"
    assert totals(events).requests_lost == 1
    tools = [event for event in events if isinstance(event, ToolCallEvent)]
    assert [tool.attempt for tool in tools[:4]] == [1, 1, 2, 1], "the call that was running ran again"
    assert len([event for event in events if isinstance(event, NoteEvent) and event.text == RESTARTED]) == 1
    bench.forget(run_id)


def _stop(engine: Engine, run_id: str) -> None:
    engine.kill(f"orchestrator-{run_id}")
    engine.kill(f"orchestrator-{run_id}-net")


def _remove_workload(engine: Engine, run_id: str) -> None:
    engine.remove(f"orchestrator-{run_id}")


def _remove_holder(engine: Engine, run_id: str) -> None:
    engine.remove(f"orchestrator-{run_id}-net")


def _remove_all(engine: Engine, run_id: str) -> None:
    _remove_workload(engine, run_id)
    _remove_holder(engine, run_id)
    engine.remove_volume(f"orchestrator-{run_id}-1")


@pytest.mark.parametrize(
    ("point", "damage"),
    [
        ("in-tool-call:3", _stop),
        ("in-tool-call:3", _remove_workload),
        ("in-tool-call:3", _remove_holder),
        ("restore-tree-moved", _stop),
        ("restore-tree-moved", _remove_all),
    ],
)
def test_after_an_engine_restart_the_same_or_a_new_container_goes_on(
    bench: Bench, quiet: Outcome, table: Table, damage: Any, point: str
) -> None:
    run_id, ended = bench.launch(crash_at=point)
    assert ended.code == KILLED
    found = bench.engine.find(f"orchestrator-{run_id}")
    assert found is not None
    damage(bench.engine, run_id)
    if damage is not _stop:
        assert bench.command("resume", run_id, crash_at="container-made").code == KILLED
    resumed = bench.command("resume", run_id, "--json", crash_at="in-check")
    assert resumed.code == KILLED
    event = next(event for event in bench.events(run_id) if isinstance(event, ResumeEvent))
    assert event.previous_container_id == found["Id"]
    assert (event.container_id == found["Id"]) == (damage is _stop)
    finish(bench, run_id, quiet, table, f"{point}, {damage.__name__.strip('_')}")


def test_a_launch_that_came_to_nothing_is_said_and_cleaned(bench: Bench) -> None:
    run_id, ended = bench.launch(crash_at="container-made")
    assert ended.code == KILLED
    ended = bench.command("resume", run_id)
    assert ended.code == 4 and "orchestrator rm" in ended.output
    assert bench.left_behind(run_id) == []
    bench.forget(run_id)


def test_the_answer_names_both_containers(bench: Bench) -> None:
    run_id, _ = bench.launch(crash_at="before-tool-call:1")
    found = bench.engine.find(f"orchestrator-{run_id}")
    assert found is not None
    _remove_workload(bench.engine, run_id)
    ended = bench.command("resume", run_id, "--json")
    assert ended.code == 0, ended.output
    answer = json.loads(ended.output[ended.output.index("\n{") :])
    assert answer["status"] == "succeeded"
    assert answer["previous_container_id"] == found["Id"] != answer["container_id"]
    bench.forget(run_id)


def test_a_run_that_ended_at_a_limit_goes_on_with_a_higher_one(bench: Bench, quiet: Outcome, table: Table) -> None:
    text = bench.task.read_text(encoding="utf-8")
    bench.task.write_text(text + "limits: {steps: 3}\n", encoding="utf-8")
    try:
        run_id, ended = bench.launch()
    finally:
        bench.task.write_text(text, encoding="utf-8")
    assert ended.code == 1
    refused = bench.command("resume", run_id)
    assert refused.code == 2 and "--raise-limit steps=" in refused.output
    assert bench.command("resume", run_id, "--raise-limit", "steps=3").code == 2
    assert bench.command("resume", run_id, "--raise-limit", "luck=3").code == 2
    assert bench.command("resume", run_id, "--raise-limit", "steps=30", crash_at="in-check").code == KILLED
    finish(bench, run_id, quiet, table, "limit, then in-check")
