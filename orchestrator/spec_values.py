"""Values that several parts of a task have: sizes, paths."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from orchestrator.policy import container_path

_SIZE = re.compile(r"([0-9]{1,15})([kmgt]?)b?", re.IGNORECASE)
_FACTORS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(value: object) -> int:
    """Bytes of ``"512m"``, ``"2g"``, ``"65536"`` or a plain number; k, m, g, t are powers of 1024.

    Raises: ValueError: it is none of these, or 0.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{value!r} is not a size: write a number of bytes, or a text such as '512m' or '2g'")
    return int(match[1]) * _FACTORS[match[2].lower()]


def _no_root(path: str) -> str:
    if path == "/":
        raise ValueError("'/' would leave nothing: name a directory below it")
    return path


Size = Annotated[int, BeforeValidator(parse_size)]
PathBelowRoot = Annotated[str, AfterValidator(container_path), AfterValidator(_no_root)]
