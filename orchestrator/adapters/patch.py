"""Puts hooks in the place of a library's functions, once, and for those who have imported them by name already."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

_HOOKED = "__orchestrator_hook__"


def hook_method(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    """The class's own method ``name`` is what ``make`` makes of it. Repeatable; absent in this version: nothing."""
    original = vars(owner).get(name)
    if original is None or hasattr(original, _HOOKED):
        return
    setattr(owner, name, _marked(make(original), original))


def hook_function(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """The module's function ``name`` is what ``make`` makes of it, wherever it has been imported by that name.

    The library's own modules keep theirs: what they call is a part of the call that the hook saw.
    """
    original = getattr(module, name, None)
    if original is None or hasattr(original, _HOOKED):
        return
    hook = _marked(make(original), original)
    setattr(module, name, hook)
    package = module.__name__.split(".")[0]
    for other in list(sys.modules.values()):
        if other.__name__.split(".")[0] != package and vars(other).get(name) is original:
            setattr(other, name, hook)


def _marked(hook: Any, original: Any) -> Any:
    hook = functools.wraps(original)(hook)
    setattr(hook, _HOOKED, True)
    return hook
