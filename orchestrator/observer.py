"""Who watches a run: the base class does nothing; the command line's live view and plain lines implement it."""

from __future__ import annotations

from orchestrator.events import Event


class Observer:
    """Told what happens in a run, in order. May be called from the capture's thread; must not raise and not block."""

    def event(self, event: Event) -> None:
        """``event`` stands in the log, synced."""

    def thinking(self, step: int) -> None:
        """The model request of ``step`` (counted from 1) is about to go out."""

    def status(self, text: str) -> None:
        """What is being done right now, in a few words (set-up, restore, removal)."""
