"""Where the input of a repeated call differs from the recorded one, and whether that may be overlooked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.recorded_call import MESSAGES, Input

_SHOWN_CHARS = 160
_SYSTEM_ROLES = ("system", "developer")
_SYSTEM_PARAMETERS = ("parameters.instructions", "parameters.system")
_MAY_DIFFER = (f"{MESSAGES}[", "arguments", *_SYSTEM_PARAMETERS)
"""Model, tools and all other parameters are always the recorded ones."""
_ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    """One place at which two inputs differ."""

    path: str
    """Such as ``messages[2].content``."""
    old: Any
    new: Any
    only_text: bool
    """Both are texts; anything else is a difference in shape or number."""

    def __str__(self) -> str:
        return f"{self.path}: recorded {_shown(self.old)}, now {_shown(self.new)}"


def differences(old: Any, new: Any, path: str = "") -> Iterator[Difference]:
    """All places at which the JSON values differ, in the order of the old one."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{path}.{key}" if path else key
            if key in old and key in new:
                yield from differences(old[key], new[key], inner)
            else:
                yield Difference(inner, old.get(key, _ABSENT), new.get(key, _ABSENT), False)
    elif isinstance(old, list) and isinstance(new, list):
        for index, (one, other) in enumerate(zip(old, new, strict=False)):
            yield from differences(one, other, f"{path}[{index}]")
        if len(old) != len(new):
            at = min(len(old), len(new))
            one, other = (item[at] if at < len(item) else _ABSENT for item in (old, new))
            yield Difference(f"{path}[{at}]", one, other, False)
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        yield Difference(path, old, new, isinstance(old, str) and isinstance(new, str))


def tolerable(found: Sequence[Difference], recorded: Input, ignore: Sequence[str]) -> bool:
    """Whether every difference is a text in the system prompt or under one of the declared paths.

    Paths are written as in messages of divergence; ``[*]`` stands for any index, ``*`` for any key.
    """
    declared = [_pattern(path) for path in ignore]
    return all(
        one.only_text
        and not _is_identity(one.path)
        and one.path.startswith(_MAY_DIFFER)
        and (_in_system_prompt(one.path, recorded) or any(pattern.match(one.path) for pattern in declared))
        for one in found
    )


def _is_identity(path: str) -> bool:
    """Roles and the ids that tie tool results to calls: a conversation that differs there is another one."""
    return bool(re.search(r"^messages\[\d+\](\.role|\.tool_call_id|\.call_id|\.tool_calls\[\d+\]\.id)$", path))


def _in_system_prompt(path: str, recorded: Input) -> bool:
    if any(_under(path, name) for name in _SYSTEM_PARAMETERS):
        return True
    found = re.match(r"messages\[(\d+)\]\.content", path)
    if found is None:
        return False
    message = recorded[MESSAGES][int(found[1])]
    return isinstance(message, dict) and message.get("role") in _SYSTEM_ROLES


def _under(path: str, above: str) -> bool:
    return path.startswith(above) and path[len(above) : len(above) + 1] in ("", ".", "[")


def _pattern(declared: str) -> re.Pattern[str]:
    escaped = re.escape(declared).replace(r"\[\*\]", r"\[\d+\]").replace(r"\*", r"[^.\[]+")
    return re.compile(rf"{escaped}(?![^.\[])")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}… ({len(text)} characters)"
