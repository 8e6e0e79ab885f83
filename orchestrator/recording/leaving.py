"""How a harness's loop is left from inside one of its calls: exceptions that ``except Exception`` does not catch.

Agents of other frameworks take any ``Exception`` of a tool for its result, and retry one of a model. These are for the
driver of the run; a harness that swallows them all the same meets the same one again at its next call.
"""

from __future__ import annotations

from orchestrator.ending import Ending


class LeaveHarness(BaseException):
    """The harness does not go on."""


class Rewound(LeaveHarness):
    """The run stands at an earlier breakpoint: the harness runs again from its beginning."""


class StateUnfit(LeaveHarness):
    """The harness was put back by a state of its own, which does not lead to where the run stands: it runs again from
    its beginning.
    """


class RunOver(LeaveHarness):
    """A limit is reached, or the operator stopped the run."""

    def __init__(self, end: Ending) -> None:
        super().__init__(end.text)
        self.end = end


class RecorderFailed(LeaveHarness):
    """A call could not be recorded, or not be answered from the log: ``error`` says why."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
