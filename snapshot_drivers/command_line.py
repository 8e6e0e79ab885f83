"""A process's command line as the coverage shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_SHOWN_BYTES: Final = 200


def command_line(pid: int) -> str:
    """Its words, separated by blanks, cut: the text is the container's. Empty for a kernel thread or a zombie.

    Raises: OSError: it is gone.
    """
    argv = Path(f"/proc/{pid}/cmdline").read_bytes()[:_SHOWN_BYTES]
    return " ".join(argv.replace(b"\0", b" ").decode("utf-8", "replace").split())
