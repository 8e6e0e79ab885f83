"""How a command reaches a run: through its driver while one lives, else with the run's lock in its own hands."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from pydantic import BaseModel

from orchestrator.cli.options import connect
from orchestrator.data_dir import DataDir
from orchestrator.errors import Busy
from orchestrator.run_dir import RunDir

if TYPE_CHECKING:
    from orchestrator.session import Session
    from orchestrator.wishes import Wish

T = TypeVar("T", bound=BaseModel)

Wait = Annotated[
    float, typer.Option("--wait", min=0, help="Seconds to wait while the run is busy (exit code 5 after that).")
]
WAIT_S = 30.0
_LOOK_S = 0.05


def reach(
    place: DataDir,
    run: RunDir,
    wish: Wish,
    answer: type[T],
    alone: Callable[[Session], T],
    *,
    wait_s: float,
    recreate: bool = False,
    when_begun: Callable[[], None] = lambda: None,
) -> T:
    """What the run's driver answers to ``wish``; where nobody drives it, what ``alone`` does with it opened.

    ``recreate``: with a container, should it be gone. ``when_begun``: see ``control.ask``.

    Raises: Busy: neither was possible within ``wait_s``. Otherwise as what is asked for.
    """
    from orchestrator.control import Unattended, ask
    from orchestrator.session import Session

    deadline = time.monotonic() + wait_s
    while True:
        if run.is_locked():
            try:
                left_s = max(0.0, deadline - time.monotonic())
                return answer.model_validate(ask(run.path, wish, wait_s=left_s, when_begun=when_begun))
            except Unattended:
                pass  # another command has the lock, or a driver that is just beginning or ending
        else:
            try:
                with Session.open(place, run.run_id, connect(), environ=os.environ, recreate=recreate) as session:
                    return alone(session)
            except Busy:
                pass  # somebody was quicker
        if time.monotonic() >= deadline:
            with run.lock():  # says who has it
                pass
            raise Busy(f"run {run.run_id} was busy until now: try again")
        time.sleep(_LOOK_S)
