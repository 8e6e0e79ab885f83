"""The checklist: order, progress, the first failure, and what is not a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from orchestrator.checks import CheckResult, Scratch, run_checklist
from orchestrator.errors import HostError
from orchestrator.launcher import Cut
from orchestrator.task import CheckSpec
from snapshot_drivers.errors import EngineError


def spec(name: str, *, scratch: bool = False) -> CheckSpec:
    command = {"scratch": f"check {name}"} if scratch else {"probe": f"check {name}"}
    return CheckSpec.model_validate({"name": name, "feedback": f"{name} does not hold", **command})


@dataclass
class Runner:
    answers: dict[str, CheckResult]
    asked: list[str] = field(default_factory=list)

    def __call__(self, check: CheckSpec) -> CheckResult:
        self.asked.append(check.name)
        return self.answers.get(check.name, CheckResult(satisfied=True, exit_code=0))


def test_all_criteria_hold() -> None:
    runner = Runner({})
    submission = run_checklist([spec("a"), spec("b")], probe=runner, scratch=runner)
    assert (submission.progress.satisfied, submission.progress.total) == (2, 2)
    assert submission.failed is None
    assert submission.feedback is None
    assert runner.asked == ["a", "b"]
    assert submission.duration_ms >= 0


def test_the_first_unsatisfied_criterion_ends_it_and_only_its_feedback_is_told() -> None:
    runner = Runner({name: CheckResult(satisfied=False, exit_code=1, output=b"hidden") for name in ("b", "c")})
    submission = run_checklist([spec("a"), spec("b"), spec("c")], probe=runner, scratch=runner)
    assert (submission.progress.satisfied, submission.progress.total) == (1, 3)
    assert submission.failed == "b"
    assert submission.feedback == "b does not hold"
    assert runner.asked == ["a", "b"]
    assert len(submission.results) == 2


def test_progress_can_fall_below_an_earlier_one() -> None:
    checks = [spec("a"), spec("b")]
    assert run_checklist(checks, probe=Runner({}), scratch=Runner({})).progress.satisfied == 2
    broken = Runner({"a": CheckResult(satisfied=False, exit_code=1)})
    assert run_checklist(checks, probe=broken, scratch=broken).progress.satisfied == 0


def test_each_criterion_is_run_in_its_own_way() -> None:
    probe, scratch = Runner({}), Runner({})
    run_checklist([spec("a"), spec("b", scratch=True), spec("c")], probe=probe, scratch=scratch)
    assert (probe.asked, scratch.asked) == (["a", "c"], ["b"])


def test_an_empty_checklist_holds() -> None:
    submission = run_checklist([], probe=Runner({}), scratch=Runner({}))
    assert (submission.progress.satisfied, submission.progress.total, submission.failed) == (0, 0, None)


def test_a_failure_of_our_machinery_is_an_error_and_no_verdict() -> None:
    runner = Runner({"a": CheckResult(satisfied=False, error="no helper")})
    with pytest.raises(HostError, match=r"'a' could not be run: no helper"):
        run_checklist([spec("a")], probe=runner, scratch=runner)


@dataclass(frozen=True)
class Ended:
    exit_code: int | None
    output: bytes = b"said"
    timed_out: bool = False


@dataclass
class Forks:
    answer: Ended | Exception
    log: list[str] = field(default_factory=list)

    @contextmanager
    def __call__(self, network: str) -> Iterator[Forks]:
        self.log.append(f"made {network}")
        try:
            yield self
        finally:
            self.log.append("gone")

    def exec(self, command: str, /, *, user: str, timeout_s: float, output_limit_bytes: int, cut: Cut) -> Ended:
        self.log.append(f"{user}: {command} ({timeout_s:.0f} s)")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Ended(0), CheckResult(satisfied=True, exit_code=0, output=b"said")),
        (Ended(3), CheckResult(satisfied=False, exit_code=3, output=b"said")),
        (Ended(137, timed_out=True), CheckResult(satisfied=False, output=b"said", timed_out=True)),
        (EngineError("engine is gone"), CheckResult(satisfied=False, error="engine is gone")),
    ],
)
def test_a_scratch_check_runs_in_a_copy_that_is_gone_afterwards(
    answer: Ended | Exception, expected: CheckResult
) -> None:
    forks = Forks(answer)
    assert Scratch(forks).run(spec("a", scratch=True)) == expected
    assert forks.log == ["made none", "root: check a (60 s)", "gone"]
