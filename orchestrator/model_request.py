"""One request to the model, under way in a thread of its own, so that the driver can do without its answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from orchestrator.model import Completion


class ModelRequest:
    """A request whose answer comes, comes too late, or never."""

    def __init__(self, complete: Callable[[Callable[[], bool]], Completion], come: Callable[[], None]) -> None:
        """It has been sent. ``come`` is called, in its thread, when it has ended.

        ``complete`` gets a function that tells whether the request was dropped, so that it does not try again.
        """
        self._complete = complete
        self._dropped = threading.Event()
        self._come = come
        self._answer: Completion | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        # A daemon: a provider that does not answer must not keep a process that has ended the run.
        threading.Thread(target=self._ask, name="model", daemon=True).start()

    @property
    def ended(self) -> bool:
        """The answer, or an error, is there."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> None:
        """It has ended, or the time is up."""
        self._ended.wait(timeout_s)

    def answer(self) -> Completion:
        """The model's answer, waited for.

        Raises: ModelError: there is none.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def drop(self) -> None:
        """Nobody waits for the answer any more; if it comes after all, it still has its cost. Repeatable."""
        self._dropped.set()

    def late_answer(self) -> Completion | None:
        """What came after all; ``None``: nothing yet, or nothing at all."""
        return self._answer if self.ended else None

    def _ask(self) -> None:
        try:
            self._answer = self._complete(self._dropped.is_set)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for the answer
            self._error = error
        finally:
            self._ended.set()
            self._come()
