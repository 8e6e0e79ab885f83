"""Mounts that a driver does not take, as a coverage names them."""

from __future__ import annotations

from snapshot_drivers.base import CoverageItem, CoverageState, Mount, StateKind


def mount_left_out(mount: Mount, *, in_memory: str, otherwise: str) -> CoverageItem:
    """Missing where the task wants it restored, and why: a memory file system is empty after a start in any case."""
    if not mount.capture:
        state, reason = CoverageState.EXCLUDED, mount.reason or "not captured"
    elif mount.kind is StateKind.TMPFS:
        state, reason = CoverageState.EXCLUDED, in_memory
    else:
        state, reason = CoverageState.MISSING, otherwise
    return CoverageItem(kind=mount.kind, path=mount.path, state=state, reason=reason)
