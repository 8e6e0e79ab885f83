"""Which writable state of a container lies outside its root filesystem, and what of it is captured.

Everything is taken from the engine's answer to ``inspect`` and from the run's configuration, nothing from inside.
"""

from __future__ import annotations

import posixpath
import time
from pathlib import Path
from typing import Any, Final

from orchestrator.container_config import ContainerConfig, VolumeMount
from orchestrator.engine import Engine
from orchestrator.policy import SHARED_MEMORY
from snapshot_drivers.base import Mount, Sharer, StateKind
from snapshot_drivers.overlay.layers import containerd_mount_point, is_mounted, mounted_layers

_ETC: Final = (
    ("/etc/hosts", "HostsPath"),
    ("/etc/hostname", "HostnamePath"),
    ("/etc/resolv.conf", "ResolvConfPath"),
)
_UNMOUNT_S: Final = 5.0
_QUEUES: Final = "message queues live in the kernel and end with the container"


def etc_files(inspected: dict[str, Any]) -> tuple[tuple[str, Path], ...]:
    """The files that the engine mounts writable below ``/etc``, with their places on the host."""
    return tuple((path, Path(inspected[key])) for path, key in _ETC if inspected.get(key))


def layers_hint(engine: Engine, inspected: dict[str, Any]) -> tuple[Path | None, tuple[Path, ...]]:
    """Upper directory as the engine states it, and the layers below where only a mount tells both.

    Raises: EngineError.
    """
    stated = ((inspected.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
    if stated or inspected["State"]["Pid"] or inspected.get("Driver") != "overlayfs":
        return (Path(stated) if stated else None), ()
    mount_point = containerd_mount_point(Path(engine.facts().data_root), inspected["Id"])
    with engine.looking_into(inspected["Id"]):
        found = mounted_layers(mount_point)
    deadline = time.monotonic() + _UNMOUNT_S
    while is_mounted(mount_point) and time.monotonic() < deadline:  # the engine unmounts it a moment later
        time.sleep(0.002)
    return found or (None, ())


def mounts(engine: Engine, config: ContainerConfig, inspected: dict[str, Any]) -> tuple[Mount, ...]:
    """Every writable mount below the root, ``/dev`` and ``/dev/shm`` included, ordered by path.

    Raises: EngineError.
    """
    tmpfs = {posixpath.normpath(path) for path in inspected["HostConfig"].get("Tmpfs") or ()} | {SHARED_MEMORY, "/dev"}
    found = [Mount(kind=StateKind.TMPFS, path=path, source=None) for path in tmpfs]
    found.append(Mount(kind=StateKind.TMPFS, path="/dev/mqueue", source=None, capture=False, reason=_QUEUES))
    for item in inspected["Mounts"]:
        if not item["RW"]:
            continue
        path = posixpath.normpath(item["Destination"])
        if item["Type"] == "tmpfs":
            found.append(Mount(kind=StateKind.TMPFS, path=path, source=None))
        elif item["Type"] == "volume":
            found.append(_volume(engine, config, item, path))
        else:
            found.append(_bind(config, item, path))
    return tuple(sorted(found, key=lambda mount: mount.path))


def _volume(engine: Engine, config: ContainerConfig, item: dict[str, Any], path: str) -> Mount:
    name = str(item["Name"])
    declared = next((volume for volume in config.volumes if volume.name == name), None)
    reason = _why_not_captured(engine, declared, name)
    return Mount(
        kind=StateKind.VOLUME,
        path=path,
        source=Path(item["Source"]),
        name=name,
        capture=reason is None,
        reason=reason,
        shared_with=_sharers(engine, config, name) if reason is None else (),
    )


def _why_not_captured(engine: Engine, declared: VolumeMount | None, name: str) -> str | None:
    if declared is None:
        return "the task does not name this volume"
    if not declared.restore:
        return "it was not made for this run, and the task does not say restore: true"
    if declared.own:
        return None
    found = engine.volume(name) or {}
    if found.get("Driver") != "local" or found.get("Options"):
        return "only plain local volumes are captured; what of it outlives a restart is its driver's matter"
    return None


def _sharers(engine: Engine, config: ContainerConfig, name: str) -> tuple[Sharer, ...]:
    users = engine.users_of_volume(name)
    return tuple(Sharer(user, running) for user, running in sorted(users.items()) if user != config.name)


def _bind(config: ContainerConfig, item: dict[str, Any], path: str) -> Mount:
    captured = any(bind.restore and bind.path == path for bind in config.binds)
    return Mount(
        kind=StateKind.BIND,
        path=path,
        source=Path(item["Source"]),
        capture=captured,
        reason=None if captured else "a directory of the host, not named in snapshots.include_binds",
    )
