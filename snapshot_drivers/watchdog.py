"""Thaws a cgroup when its owner dies or freezes it for too long. Run as a program of its own, never imported.

    python -I -S watchdog.py STATE_FILE FROZEN_WORD THAWED_WORD  < pipe

The owner writes a line before it freezes, the seconds until it is too long, and an empty one after it has thawed. The
end of the pipe, which the kernel closes when the owner dies of whatever, thaws if armed and ends this program; nothing
else ends it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

_TRIES = 20
_PAUSE_S = 0.05


def main(state_file: Path, frozen_word: str, thawed_word: str) -> None:
    """The pipe on standard input has ended and nothing of its owner's is frozen."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    thaw_at: float | None = None
    while True:
        wait_s = None if thaw_at is None else max(0.0, thaw_at - time.monotonic())
        if not select.select([0], [], [], wait_s)[0]:
            thaw(state_file, frozen_word, thawed_word)
            thaw_at = None
            continue
        orders = os.read(0, 4096)
        if not orders:
            break
        last = orders.splitlines()[-1]
        thaw_at = time.monotonic() + float(last) if last else None
    if thaw_at is not None:
        thaw(state_file, frozen_word, thawed_word)


def thaw(state_file: Path, frozen_word: str, thawed_word: str) -> None:
    """The cgroup is thawed or gone; tried for a second."""
    for _ in range(_TRIES):
        try:
            with state_file.open("r+b", buffering=0) as file:
                file.write(thawed_word.encode("ascii"))
            if state_file.read_text(encoding="ascii").strip() != frozen_word:
                return
        except FileNotFoundError:
            return
        except OSError:
            pass  # ENODEV, EINTR, EBUSY: the next try decides
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
