"""The calls that are under way, and the threads and tasks that make calls: the lanes."""

from __future__ import annotations

import asyncio
import threading

from orchestrator.recording.harness_call import Call, around


class InFlight:
    """Of one execution. Not safe for threads: the execution holds its lock."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._lanes: dict[object, int] = {}

    def add(self, call: Call) -> None:
        """The call is under way; those beside it know that it was."""
        for number in call.recorded.beside:
            if number in self._calls:
                self._calls[number].shared = True
        self._calls[call.number] = call

    def ends(self, call: Call) -> bool:
        """It ends now; false: it had ended before."""
        if call.ended:
            return False
        call.ended = True
        self._calls.pop(call.number, None)
        return True

    def beside(self) -> list[int]:
        """Numbers of the calls beside one that begins here: those around it are left out."""
        return [number for number in self._calls if number not in around()]

    def lane(self) -> int:
        """The thread or task that is running, as a number in the order of their first calls."""
        try:
            task = asyncio.current_task()
        except RuntimeError:
            task = None
        # The task itself, not its address, which the next one may get.
        return self._lanes.setdefault(task or threading.current_thread(), len(self._lanes))

    def leave_streams(self, lane: int | None) -> None:
        """Streams that this lane (``None``: any) has read in part, and turned away from, get their line."""
        for call in [*self._calls.values()]:
            if call.left is not None and (lane is None or (call.recorded.lane == lane and call.pieces)):
                call.left()
