"""The conversations of a harness: what is new in a request, and what is put into it that the harness does not know.

After a rewind the harness comes to the breakpoint with the conversation that it had there. The memory goes into that
request as its last message, and stays at that place in every later request which continues it, so that a provider's
prompt cache fits. The harness's own messages are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.events import Message
from orchestrator.recorded_call import MESSAGES, Input, shared_length
from orchestrator.recording.divergence import differences, tolerable


@dataclass(frozen=True)
class Insert:
    """A message that goes into a request at ``position`` of its messages."""

    position: int
    message: Message


@dataclass(frozen=True)
class _Placed:
    """Messages that stand behind a beginning of a conversation."""

    scope: int | None
    beginning: list[Any]
    messages: list[Message]


class Conversations:
    """Of one execution. Not safe for threads."""

    def __init__(
        self, told_next: Sequence[Message], announced: Sequence[Message] = (), ignore: Sequence[str] = ()
    ) -> None:
        """For the first request that is not answered from the log: what is put into it, and which of its messages the
        log has already.
        """
        self._next = list(told_next)
        self._announced = list(announced)
        self._ignore = ignore
        self._placed: list[_Placed] = []
        self._known: dict[int | None, list[Any]] = {}

    def answered(self, scope: int | None, asked: Input, told: Sequence[Message]) -> None:
        """A request was answered from the log, and ``told`` had been put into it then."""
        if told:
            self._placed.append(_Placed(scope, list(asked[MESSAGES]), list(told)))
        self._known[scope] = list(asked[MESSAGES])

    def inserts(self, scope: int | None, asked: Input, news: Sequence[Message] = ()) -> list[Insert]:
        """What goes into this new request, in the order of its places; ``news`` at its end."""
        told, self._next = [*self._next, *news], []
        if told:
            self._placed.append(_Placed(scope, list(asked[MESSAGES]), told))
        return [
            Insert(len(placed.beginning), message)
            for placed in self._placed
            if placed.scope == scope and self._continues(asked, placed.beginning)
            for message in placed.messages
        ]

    def news(self, scope: int | None, asked: Input) -> list[Message]:
        """The messages that no earlier request of that scope had; the answer that it has already is left out."""
        known = self._known.get(scope, [])
        kept = shared_length(known, asked[MESSAGES])
        self._known[scope] = list(asked[MESSAGES])
        fresh = asked[MESSAGES][kept:]
        if kept and fresh and _is_answer(fresh[0]):
            fresh = fresh[1:]
        announced, self._announced = self._announced, []
        if announced and fresh[: len(announced)] == announced:
            fresh = fresh[len(announced) :]
        return [dict(message) for message in fresh if isinstance(message, dict)]

    def _continues(self, asked: Input, beginning: list[Any]) -> bool:
        now = asked[MESSAGES][: len(beginning)]
        if len(now) < len(beginning):
            return False
        found = list(differences({MESSAGES: beginning}, {MESSAGES: now}))
        return tolerable(found, {MESSAGES: beginning}, self._ignore)


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and (message.get("role") == "assistant" or message.get("type") == "function_call")
