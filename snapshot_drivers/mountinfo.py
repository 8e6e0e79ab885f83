"""Lines of ``/proc/<pid>/mountinfo``, see proc_pid_mountinfo(5)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_OCTAL: Final = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True)
class MountLine:
    """One mount. Paths are decoded, with bytes that are no UTF-8 as surrogate escapes."""

    mount_id: int
    parent_id: int
    device: str
    """``major:minor`` of the filesystem."""
    root: str
    """Which directory of the filesystem is mounted."""
    mount_point: str
    """Relative to the root of the process whose table it is."""
    options: str
    """Of this mount, comma separated."""
    fs_type: str
    source: str
    super_options: str
    """Of the filesystem, comma separated, octal escapes left in (a value may hold an escaped comma)."""

    def super_values(self, name: str) -> list[str]:
        """Decoded values of a filesystem option (``lowerdir``), in order; empty where it is not given."""
        pairs = (option.partition("=") for option in self.super_options.split(","))
        return [_decoded(os.fsencode(value)) for key, _, value in pairs if key == name]


def parse_mountinfo(text: bytes) -> list[MountLine]:
    """Every line of a mount table.

    Raises: ValueError: it is none.
    """
    return [_parse_line(line) for line in text.split(b"\n") if line]


def own_mounts(fs_type: str = "") -> list[MountLine]:
    """The mount table of this process, or what it says of one type of file system."""
    lines = Path("/proc/self/mountinfo").read_bytes().split(b"\n")
    mark = os.fsencode(f" - {fs_type} " if fs_type else " - ")
    return [_parse_line(line) for line in lines if mark in line]


def _parse_line(line: bytes) -> MountLine:
    fields = line.split(b" ")
    dash = fields.index(b"-", 6)  # between the options and the dash stand any number of optional fields
    fs_type, source, super_options = fields[dash + 1 : dash + 4]
    return MountLine(
        mount_id=int(fields[0]),
        parent_id=int(fields[1]),
        device=fields[2].decode("ascii"),
        root=_decoded(fields[3]),
        mount_point=_decoded(fields[4]),
        options=os.fsdecode(fields[5]),
        fs_type=os.fsdecode(fs_type),
        source=_decoded(source),
        super_options=os.fsdecode(super_options),
    )


def _decoded(field: bytes) -> str:
    if b"\\" not in field:
        return os.fsdecode(field)
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))
