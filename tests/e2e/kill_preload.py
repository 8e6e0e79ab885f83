"""Imported once by the server from which the killed processes are forked: all that a run needs."""

from __future__ import annotations

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import docker  # noqa: F401
import litellm  # noqa: F401

import orchestrator.control
import orchestrator.model
import orchestrator.resume  # noqa: F401
import tests.e2e.kill_harness  # noqa: F401
