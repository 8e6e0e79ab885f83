"""The progress of a run: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from orchestrator.cli.event_lines import event_line
from orchestrator.cli.render import console, money, one_line, seconds, size, styled
from orchestrator.events import (
    CheckpointEvent,
    EngineErrorEvent,
    Event,
    ModelCallEvent,
    Progress,
    RewindEvent,
    SubmissionEvent,
)
from orchestrator.observer import Observer

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

_BAR_CELLS = 24
_REFRESHES_PER_S = 4


class Tally:
    """What the live view counts while events come in. Written by the run's threads, read by the view's."""

    def __init__(self, criteria: int, step_limit: int | None) -> None:
        self.criteria = criteria
        self.step_limit = step_limit
        self.steps = 0
        self.tokens = 0
        self.tokens_unknown = 0
        self.cost_usd = 0.0
        self.cost_unknown = 0
        self.rewinds = 0
        self.progress: Progress | None = None
        self.checkpoint: CheckpointEvent | None = None

    def add(self, event: Event) -> None:
        """The event is counted."""
        if isinstance(event, ModelCallEvent):
            self.steps += 1
            known = event.usage.total_tokens if event.usage else None
            self.tokens += known or 0
            self.tokens_unknown += known is None
            self.cost_usd += event.cost_usd or 0.0
            self.cost_unknown += event.cost_usd is None
        elif isinstance(event, EngineErrorEvent):
            self.cost_usd += event.cost_usd or 0.0
        elif isinstance(event, RewindEvent):
            self.rewinds += 1
        elif isinstance(event, SubmissionEvent):
            self.progress = event.progress
        elif isinstance(event, CheckpointEvent):
            self.checkpoint = event

    def lines(self) -> list[str]:
        """The numbers for a person."""
        of = f" of {self.step_limit}" if self.step_limit is not None else ""
        tokens = f"{self.tokens:,} tokens" + (f" + {self.tokens_unknown} unknown" if self.tokens_unknown else "")
        found = [
            f"step {self.steps}{of} · {tokens} · {money(self.cost_usd, self.cost_unknown)} · rewinds {self.rewinds}",
            f"checklist {self.bar()}",
        ]
        if (last := self.checkpoint) is not None:
            found.append(
                f"checkpoint {last.breakpoint_id}: captured in {last.capture_ms:.0f} ms, frozen "
                f"{last.frozen_ms:.0f} ms, waited {last.waited_ms:.0f} ms, {size(last.stored_bytes)} stored"
            )
        return found

    def bar(self) -> str:
        """The checklist's longest satisfied prefix as a bar."""
        total = self.progress.total if self.progress else self.criteria
        done = self.progress.satisfied if self.progress else 0
        if not total:
            return "none"
        filled = round(_BAR_CELLS * done / total)
        state = f"{done}/{total}" if self.progress else f"nothing submitted, {total} criteria"
        return f"{'█' * filled}{'░' * (_BAR_CELLS - filled)} {state}"


class PlainProgress(Observer):
    """One flushed line for each event."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def event(self, event: Event) -> None:
        """See ``Observer``."""
        line = event_line(event)
        self._print(f"{event.at[11:19]} {event.step:>3}  {line.label:<10} {line.text}")

    def status(self, text: str) -> None:
        """See ``Observer``."""
        self._print(f"{time.strftime('%H:%M:%S', time.gmtime())}   -  {'…':<10} {one_line(text)}")

    def _print(self, line: str) -> None:
        # A reader that has gone away must not end the run.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()


class LiveProgress(Observer):
    """Events scroll by; below them stand the numbers and what is being done right now."""

    def __init__(self, out: Console, tally: Tally) -> None:
        self._out = out
        self._tally = tally
        self._doing = "starting"
        self._since = time.monotonic()
        self._lock = threading.Lock()

    def event(self, event: Event) -> None:
        """See ``Observer``."""
        with self._lock:
            self._tally.add(event)
        line = event_line(event)
        with contextlib.suppress(OSError, ValueError):
            self._out.print(styled(f"{event.at[11:19]} {event.step:>3}  {line.label:<10} {line.text}", line.style))

    def thinking(self, step: int) -> None:
        """See ``Observer``."""
        self._do(f"step {step}: the model is thinking")

    def status(self, text: str) -> None:
        """See ``Observer``."""
        self._do(text)

    def __rich__(self) -> Group:
        """What stands below the events now."""
        from rich.console import Group
        from rich.rule import Rule

        with self._lock:
            lines = self._tally.lines()
            doing = f"{self._doing} ({seconds(time.monotonic() - self._since)})"
        return Group(Rule(style="dim"), *(styled(line, "bold") for line in lines), styled(one_line(doing), "dim"))

    def view(self) -> Live:
        """The live display; a context manager."""
        from rich.live import Live

        return Live(self, console=self._out, refresh_per_second=_REFRESHES_PER_S, transient=True)

    def _do(self, text: str) -> None:
        with self._lock:
            self._doing = text
            self._since = time.monotonic()


@contextmanager
def progress(*, as_json: bool, criteria: int = 0, step_limit: int | None = None) -> Iterator[Observer]:
    """An observer that shows the run while the block runs; on standard error when the answer is JSON."""
    stream = sys.stderr if as_json else sys.stdout
    if as_json or not stream.isatty():
        yield PlainProgress(stream)
        return
    out = console(stream)
    out.soft_wrap = False
    live = LiveProgress(out, Tally(criteria, step_limit))
    with live.view():
        yield live
