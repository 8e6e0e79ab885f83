"""The options that a dump and a restore are asked for with."""

from __future__ import annotations

from typing import Final

from snapshot_drivers.criu import rpc

_IGNORE_CGROUPS: Final = 0
_GHOST_BYTES: Final = 2**31 - 1
_SLOWEST_BYTES_S: Final = 20 * 2**20


def patience_s(timeout_s: float, memory_bytes: int) -> float:
    """How long a step may take that moves so much memory: ended half-way, CRIU could leave a process broken."""
    return timeout_s + memory_bytes / _SLOWEST_BYTES_S


def dump_options(pid: int, *, tcp: str, timeout_s: float, watched: tuple[str, ...] = ()) -> dict[str, rpc.Value]:
    """Options of a dump of the tree below ``pid`` (its number in the container); it runs on afterwards.

    ``watched``: directories in which to look for what inotify watches.
    """
    return {
        "pid": pid,
        "leave_running": 1,
        "ghost_limit": _GHOST_BYTES,
        "network_lock": rpc.NETWORK_LOCK_SKIP,
        "tcp_skip_in_flight": 1,
        "timeout": max(1, int(timeout_s)),
        "irmap_scan_paths": watched,
        **_common(tcp),
    }


def restore_options(*, tcp: str) -> dict[str, rpc.Value]:
    """Options of a restore."""
    return {"network_lock": rpc.NETWORK_LOCK_SKIP, **_common(tcp)}


def _common(tcp: str) -> dict[str, rpc.Value]:
    return {
        "shell_job": 1,
        "file_locks": 1,
        "notify_scripts": 1,
        "force_irmap": 1,
        "manage_cgroups": 1,
        "manage_cgroups_mode": _IGNORE_CGROUPS,
        "tcp_close" if tcp == "close" else "tcp_established": 1,
    }
