"""Where a run stands, kept up to date while its log grows: every event is looked at once, however long the log is."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.events import CheckpointEvent, Event
from orchestrator.live_path import HeadSearch, back_from
from orchestrator.totals import Tally, Totals


class Standing:
    """What the functions of ``live_path`` and ``totals`` say of a log's events. May be asked from several threads."""

    def __init__(self, events: Sequence[Event]) -> None:
        """``events`` is the log's own list, which only grows."""
        self._events = events
        self._seen = 0
        self._head = HeadSearch()
        self._tally = Tally()
        self._newest = (-1, -1)
        self._lock = threading.Lock()

    @property
    def head(self) -> Event | None:
        """As ``live_path.head``."""
        return self._caught_up()._head.at

    @property
    def by_seq(self) -> Mapping[int, Event]:
        """All events by their numbers."""
        return self._caught_up()._head.by_seq

    @property
    def newest_checkpoint(self) -> tuple[int, int]:
        """The largest number of a breakpoint, and that of its event; -1: there is none."""
        return self._caught_up()._newest

    def totals(self) -> Totals:
        """As ``totals.totals``."""
        self._caught_up()
        return self._tally.totals()

    def requests_lost_now(self) -> int:
        """As ``totals.requests_lost_now``."""
        self._caught_up()
        return self._tally.requests_lost_now

    def way_back(self, seq: int) -> Iterator[Event]:
        """As ``live_path.way_back``."""
        return back_from(self.by_seq, seq)

    def _caught_up(self) -> Standing:
        with self._lock:
            while self._seen < len(self._events):
                event = self._events[self._seen]
                self._head.add(event)
                self._tally.add(event)
                if isinstance(event, CheckpointEvent):
                    self._newest = max(self._newest, (event.breakpoint_id, event.seq))
                self._seen += 1
        return self
