"""What CRIU's log says about a failure, in words that a user can do something with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

LOG: Final = "criu.log"
_REASONS: Final = (
    (r"io_uring", "it uses io_uring, which CRIU cannot take"),
    (r"external stream socket|external socket|Can't dump half of stream unix", "a unix socket's peer is outside"),
    (r"Can't dump that handle|inotify|irmap", "what it watches (inotify) was not found by a path"),
    (r"ctty inheritance", "it holds /dev/tty open, and another process the other end of that terminal"),
    (r"ghost file .* of \d+ size", "a deleted file that it holds open is larger than the limit"),
    (r"Connected TCP socket", "it has an established TCP connection"),
    (r"RLIMIT|rlimit|CAP_SYS_RESOURCE", "root lacks CAP_SYS_RESOURCE on this host"),
    (r"leaked out of the session|session leader", "its session's leader is outside of what is captured"),
    (r"Link remap", "a file that it holds open has lost the name by which it was opened"),
)


def log_reason(work: Path) -> str:
    """Why it failed, from the log in ``work``; empty: it does not say. Foreign text is left as it is."""
    try:
        lines = (work / LOG).read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    errors = [
        re.sub(r"^\([\d.]+\)\s*(\d+: )?", "", line) for line in lines if "Error" in line and "for self" not in line
    ]
    text = "; ".join(errors[:3])[:400]
    for pattern, meaning in _REASONS:
        if re.search(pattern, "\n".join(errors)):
            return f"{meaning} (CRIU: {text})"
    return text
