"""What a capture may add to a store: up to a quota of the store, and not into the last room of the disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from snapshot_drivers.errors import LimitExceeded


@dataclass(frozen=True)
class StoreLimits:
    """The limits of one capture. What is stored is never hurt by them: they refuse what would be added."""

    quota_bytes: int | None = None
    """For the packs of all runs together."""
    min_free_bytes: int = 0
    """Room on the disk that a capture leaves to others."""

    def check(self, directory: Path, stored_bytes: int, more_bytes: int) -> None:
        """``more_bytes`` may be added to the ``stored_bytes`` below ``directory``.

        Raises: LimitExceeded: the message says which limit and what to do. OSError.
        """
        if self.quota_bytes is not None and stored_bytes + more_bytes > self.quota_bytes:
            raise LimitExceeded(
                f"the store would hold {stored_bytes + more_bytes} bytes of content, its quota is {self.quota_bytes} "
                "(store_quota_bytes): make room with: orchestrator gc"
            )
        if not self.min_free_bytes:
            return
        disk = os.statvfs(directory)
        free = disk.f_bavail * disk.f_frsize - more_bytes
        if free < self.min_free_bytes:
            raise LimitExceeded(
                f"only {max(0, free)} bytes would be left on the disk of {directory}, {self.min_free_bytes} have to "
                "stay free (min_free_bytes): make room there, or with: orchestrator gc"
            )
