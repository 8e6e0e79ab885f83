"""How a command answers: one JSON document on standard output, or text for a person; errors with code and remedy."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from pydantic import BaseModel

from orchestrator.cli.render import visible

INTERRUPTED = 130
INTERNAL = 6
"""Exit code of an error that nobody foresaw."""


def print_json(data: object) -> None:
    """``data`` (models, dicts, lists) stands on standard output as one JSON document, ASCII only."""
    sys.stdout.write(json.dumps(_plain(data), ensure_ascii=True, indent=2) + "\n")
    sys.stdout.flush()


def print_json_line(data: object) -> None:
    """Like ``print_json``, on one line of several."""
    sys.stdout.write(json.dumps(_plain(data), ensure_ascii=True) + "\n")
    sys.stdout.flush()


def _plain(data: object) -> object:
    # From Python values, since pydantic's own JSON refuses lone surrogates.
    if isinstance(data, BaseModel):
        return data.model_dump(mode="python")
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [_plain(item) for item in data]
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    return data


def say(text: str = "") -> None:
    """A line for a person on standard output; foreign text in it is made visible."""
    sys.stdout.write(visible(text) + "\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    """A warning on standard error."""
    sys.stderr.write(f"warning: {visible(text)}\n")
    sys.stderr.flush()


def fail(error_type: str, message: str, exit_code: int, *, as_json: bool) -> int:
    """The error is told; answers ``exit_code``."""
    if as_json:
        print_json({"error": {"type": error_type, "message": message, "exit_code": exit_code}})
    else:
        sys.stderr.write(f"error: {visible(message)}\n")
        sys.stderr.flush()
    return exit_code
