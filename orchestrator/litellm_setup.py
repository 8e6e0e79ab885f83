"""LiteLLM, quiet, calling nobody but the provider, and with our HTTP client; imported when the first model is made."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.wire import report

if TYPE_CHECKING:
    from types import ModuleType

_LOGGERS = ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy", "litellm", "httpx", "httpcore", "openai")
_OWN_CLIENT = ("anthropic",)
"""Providers that take an HTTP client as an argument; those on the OpenAI SDK find it in ``litellm.client_session``."""


class LiteLLM(NamedTuple):
    """The library, the SDK whose error tree it extends, and the HTTP handler that reports to ``wire``."""

    litellm: ModuleType
    openai: ModuleType
    handler: Any

    def client_for(self, model_name: str) -> dict[str, Any]:
        """The parameters that make a call of this model go through our client."""
        return {"client": self.handler} if model_name.split("/")[0] in _OWN_CLIENT else {}


def prepare_import() -> None:
    """LiteLLM may be imported: it fetches nothing and says nothing then. Repeatable."""
    # LiteLLM reads this at import and fetches a price list from the network without it.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    # Its own types make pydantic warn about them, at import and at the first call; a run's output is no place for that.
    warnings.filterwarnings("ignore", message=r".*TypedDict class .*`ReadOnly` qualifier", category=UserWarning)


@functools.cache
def import_litellm() -> LiteLLM:
    """LiteLLM, set up once a process. The import takes seconds."""
    prepare_import()
    import litellm
    import openai
    from litellm.llms.custom_httpx.http_handler import HTTPHandler

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    # It raises when a model repeats itself; a row of equal lines is an answer like any other.
    setattr(litellm, "REPEATED_STREAMING_CHUNK_LIMIT", sys.maxsize)  # noqa: B010 - not exported, says mypy
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [logging.NullHandler()]
        logger.propagate = False
    # No redirects: a conversation and its key go to the address that the operator named, and nowhere else.
    handler = HTTPHandler(follow_redirects=False)
    report(handler.client)
    litellm.client_session = handler.client
    return LiteLLM(litellm, openai, handler)
