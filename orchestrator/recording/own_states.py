"""States of a harness that its own framework can put back: kept at breakpoints, for as long as the process lives.

A harness that is put back does not repeat itself. That holds only if the first request that it makes from the state is
the one that was made at the breakpoint, by the rules of ``divergence``; otherwise it repeats itself as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.recorded_call import Input
from orchestrator.recording.divergence import differences, tolerable
from orchestrator.recording.replay import Kind

_LOG = logging.getLogger("orchestrator")


class Stateful(Protocol):
    """A harness in its framework's terms. Both are asked where a call of it begins, by the code that makes the call."""

    def mark(self) -> Hashable | None:
        """Names the state from which the running code has come: equal for all calls from it. ``None``: not known."""

    def state(self) -> Any | None:
        """What puts the harness back there; ``None``: nothing does."""


@dataclass(frozen=True)
class Kept:
    """What stands at one breakpoint."""

    state: Any
    api: str
    input: Input
    """Of the request that was made there."""


class OwnStates:
    """What one pass makes of them. Not safe for threads: the execution holds its lock."""

    def __init__(self, kept: dict[int, Kept], breakpoint_id: int | None, ignore: Sequence[str]) -> None:
        """``kept``: by breakpoint, of all passes of this process. ``breakpoint_id``: where this one begins."""
        self._kept = kept
        self._begins_at = breakpoint_id
        self._ignore = ignore
        self._harness: Stateful | None = None
        self._unproven: Kept | None = None
        self._marks: set[Hashable] = set()
        self._doubt = False

    @property
    def watched(self) -> bool:
        """States are kept in this pass."""
        return self._harness is not None

    @property
    def unproven(self) -> bool:
        """The harness has been put back, and has not made its first request yet."""
        return self._unproven is not None

    def here(self) -> Any | None:
        """The state of the breakpoint at which the pass begins."""
        kept = self._kept.get(self._begins_at) if self._begins_at is not None else None
        return None if kept is None else kept.state

    def watch(self, harness: Stateful, *, put_back: bool) -> None:
        """States are kept from now on. ``put_back``: the harness has got the one that is ``here``."""
        self._harness = harness
        if put_back and self._begins_at is not None:
            # It is there again once it has been proven.
            self._unproven = self._kept.pop(self._begins_at)

    def proven(self, kind: Kind, api: str, scope: int | None, now: Input) -> str | None:
        """The first call from the state is the request of the breakpoint; otherwise why it is not."""
        kept, self._unproven = self._unproven, None
        if kept is None or self._begins_at is None:
            return None
        if (kind, api, scope) != ("model", kept.api, None):
            return f"it began with {api} ({now.get('name') or now.get('model')})"
        found = list(differences(kept.input, now))
        if not tolerable(found, kept.input, self._ignore):
            return f"its request differs at {found[0]}"
        if found:
            _LOG.warning("the harness was put back by its own state although its request differs: %s", found[0])
        self._kept[self._begins_at] = kept
        return None

    def called(self, scope: int | None) -> bool:
        """The harness makes a call; whether it is the first one from its state, so that this would lead to it again."""
        if self._harness is None or scope is not None:
            return False
        mark, doubt = self._harness.mark(), self._doubt
        self._doubt = mark is None
        first = mark is not None and mark not in self._marks
        self._marks.add(mark)
        return first and not doubt

    def now(self, api: str, given: Input) -> Kept | None:
        """What is to be kept of this first call from a state."""
        state = None if self._harness is None else self._harness.state()
        return None if state is None else Kept(state, api, given)

    def keep(self, breakpoint_id: int, kept: Kept | None) -> None:
        """The call that has been looked at stands at that breakpoint."""
        if kept is not None:
            self._kept[breakpoint_id] = kept
