"""A restored tree is compared with what it was, and with the container it is in, while it still stands still."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snapshot_drivers.criu.trees import NAMESPACES, RIGHTS, Running, descriptors, namespace, status_of
from snapshot_drivers.errors import RestoreError


def compare(running: Running, wanted: Mapping[str, Mapping[str, Any]], init_pid: int) -> None:
    """Nothing differs. ``wanted``: by number in the container, as ``trees.facts`` told.

    Raises: RestoreError: names the first difference; nothing of the tree may go on.
    """
    found = {str(one.inner): one for one in (*running.tree, *running.foreign)}
    if found.keys() != wanted.keys():
        raise RestoreError(f"processes {sorted(wanted)} were to come back, {sorted(found)} did")
    groups = Path(f"/proc/{init_pid}/cgroup").read_text()
    shared = {namespace(one.pid, "ipc") for one in found.values()}
    if len(shared) != 1 or shared == {namespace(1, "ipc")}:
        raise RestoreError("the restored processes are in the wrong ipc namespace")
    for number, one in found.items():
        status = status_of(one.pid) or {}
        for name in RIGHTS:
            if status.get(name, "").split() != list(wanted[number][name]):
                raise RestoreError(
                    f"{one.label} came back with {name} {status.get(name)} instead of {' '.join(wanted[number][name])}"
                )
        if Path(f"/proc/{one.pid}/cgroup").read_text() != groups:
            raise RestoreError(f"{one.label} came back in other cgroups than the container's")
        for kind in NAMESPACES:
            if namespace(one.pid, kind) != namespace(init_pid, kind):
                raise RestoreError(f"{one.label} came back in another {kind} namespace than the container's")
        if descriptors(one.pid) != wanted[number]["fds"]:
            raise RestoreError(f"{one.label} came back with other open descriptors")
