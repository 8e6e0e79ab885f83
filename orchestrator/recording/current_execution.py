"""Which execution the code that runs belongs to: how a hook on a class finds the run of its caller.

By a context variable, which tasks and the threads of most frameworks inherit. A plain thread inherits nothing: it
belongs to the only execution that there is, and stays with it, so what an abandoned one left behind stays abandoned.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary

from orchestrator.errors import UsageError
from orchestrator.recording.execution import Execution
from orchestrator.recording.harness_call import in_model_call
from orchestrator.recording.leaving import RecorderFailed

_CURRENT: ContextVar[Execution | None] = ContextVar("execution", default=None)
_ACTIVE: list[Execution] = []
_THREADS: WeakKeyDictionary[threading.Thread, Execution] = WeakKeyDictionary()
_LOCK = threading.Lock()


@contextmanager
def executing(execution: Execution) -> Iterator[None]:
    """Calls of the block's code, and of the threads and tasks that it starts, belong to ``execution``."""
    with _LOCK:
        _ACTIVE.append(execution)
    token = _CURRENT.set(execution)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        with _LOCK:
            _ACTIVE.remove(execution)


def current_execution() -> Execution | None:
    """The execution to which a call that begins here belongs; ``None``: to none, or to a call that is recorded.

    Raises: RecorderFailed: the thread inherited no context, and several runs are driven in this process.
    """
    if in_model_call():
        return None
    found = _CURRENT.get()
    if found is not None:
        return found
    with _LOCK:
        thread = threading.current_thread()
        if thread in _THREADS:
            return _THREADS[thread]
        active = [one for one in _ACTIVE if one.over is None]
        if len(active) > 1:
            text = "start the thread with contextvars.copy_context().run"
            raise RecorderFailed(UsageError(f"this thread could belong to any of {len(active)} runs: {text}"))
        if not active:
            return None
        _THREADS[thread] = active[0]
        return active[0]
