"""The events of a run as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator

from orchestrator.cli.run_view import RunView
from orchestrator.errors import HostError
from orchestrator.events import Event
from orchestrator.lineage import status
from orchestrator.log_line import BadLine, decode

LOOK_S = 0.1


def later_events(view: RunView) -> Iterator[Event]:
    """The events that are there, then those that come, until the run has ended or nobody drives it any more."""
    events = list(view.events)
    yield from events
    known = {event.seq for event in events}
    path = view.run.events_path
    offset = 0
    while True:
        # Asked before the file is read: what the last driver wrote is read after it has gone.
        goes_on = status(events, view.run.is_locked()).status == "running"
        try:
            with path.open("rb") as stream:
                stream.seek(offset)
                data = stream.read()
        except OSError as error:
            raise HostError(
                f"{path}: the log cannot be read any more ({error.strerror}): was the run removed?"
            ) from error
        whole, newline, _ = data.rpartition(b"\n")
        offset += len(whole) + len(newline)
        for line in whole.split(b"\n") if newline else []:
            event = _event(line, view.run.run_id)
            if event is not None and event.seq not in known:
                known.add(event.seq)
                events.append(event)
                yield event
        if not goes_on:
            return
        time.sleep(LOOK_S)


def _event(line: bytes, run_id: str) -> Event | None:
    """``None``: a damaged line, which reading the whole log tells of."""
    try:
        return decode(line, run_id)
    except BadLine:
        return None
