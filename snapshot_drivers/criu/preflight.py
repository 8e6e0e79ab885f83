"""What is known beforehand not to work, found before a process is touched, with the reason in words."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from snapshot_drivers.criu.trees import NAMESPACES, Process, Running, namespace, status_of

_SYS_RESOURCE: Final = 24
_ANONYMOUS: Final = frozenset({"eventfd", "eventpoll", "signalfd", "timerfd", "inotify", "fanotify", "pidfd"})
_GPU: Final = re.compile(r"^/dev/(nvidia|kfd|dri/)")


def obstacle(running: Running, init_pid: int) -> str | None:
    """Why the launcher's tree cannot be taken as it is; ``None``: nothing is known against it."""
    able = _has_sys_resource()
    for one in running.tree:
        if reason := _obstacle(one, init_pid, able=able):
            return f"{one.label} {reason}"
    return None


def _obstacle(one: Process, init_pid: int, *, able: bool) -> str | None:
    status = status_of(one.pid) or one.status
    if not able and set(status.get("Uid", "").split()) - {"0"}:
        return f"runs as uid {status['Uid'].split()[0]}, and root lacks CAP_SYS_RESOURCE on this host"
    if status.get("TracerPid", "0") != "0":
        return "is traced by another process"
    # One that is ending has none any more.
    if any(namespace(one.pid, kind) not in ("", namespace(init_pid, kind)) for kind in NAMESPACES):
        return "runs in namespaces of its own"
    with suppress(OSError):
        for name in (path.name for path in Path(f"/proc/{one.pid}/fd").iterdir()):
            with suppress(FileNotFoundError):
                link = str(Path(f"/proc/{one.pid}/fd/{name}").readlink())
                if link.startswith("anon_inode:"):
                    kind = link.removeprefix("anon_inode:").strip("[]")
                    if kind not in _ANONYMOUS:
                        return f"uses {kind}, which CRIU cannot take"
                if _GPU.match(link):
                    return f"has the GPU device {link} open"
    return None


def _has_sys_resource() -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> _SYS_RESOURCE & 1)
