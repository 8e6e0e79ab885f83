"""Hooks into everything that is installed: one call, before or after the frameworks are imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from orchestrator.errors import UsageError

ADAPTERS = ("litellm", "openai", "langchain", "mini_swe_agent")


def instrument(*names: str) -> list[str]:
    """The frameworks of these adapters (all unless named) are hooked; answers which were found. Repeatable.

    A framework that is installed but not imported yet is imported: the hooks are on its classes. Outside of recorded
    runs they do nothing.

    Raises: UsageError: there is no such adapter.
    """
    found = []
    for name in names or ADAPTERS:
        if name not in ADAPTERS:
            raise UsageError(f"there is no adapter {name!r}; there are: {', '.join(ADAPTERS)}")
        adapter = importlib.import_module(f"orchestrator.adapters.{name}")
        if adapter.PACKAGE in sys.modules or importlib.util.find_spec(adapter.PACKAGE) is not None:
            adapter.install()
            found.append(name)
    return found
