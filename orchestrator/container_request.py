"""What the engine is asked for when a run's two containers are made: the bodies of its ``create`` requests.

A run has two containers of one image. The *network holder* owns network namespace, hostname and the three files that
the engine writes below ``/etc``; the *workload* joins its network, so that address and ports outlive a restore of the
workload. PID 1 of both is the launcher's holder, a user of its own without capabilities: the container's root can
neither trace it, read it nor end it. Everything else is started in the workload by exec.

The workload's PID 1 starts as root and takes that user itself: in a container that is created with another user, the
engine (20.10) gives root no capabilities on exec either.

Source: Docker Engine API v1.41, "Create a container".
"""

from __future__ import annotations

from typing import Any

from orchestrator.container_config import BindMount, ContainerConfig, Role
from orchestrator.policy import OWN_DIRECTORY

LAUNCH = f"{OWN_DIRECTORY}/launch"

INIT_UID = 65533
"""Owner of PID 1. No image uses it, and it has no capabilities."""

_INIT = {"Entrypoint": [LAUNCH, "hold", str(INIT_UID)], "Cmd": []}
_INIT_AS_USER = {**_INIT, "User": f"{INIT_UID}:{INIT_UID}"}
_INIT_FROM_ROOT = {**_INIT, "User": "0:0"}

HOLDER_PIDS = 16
SHM_BYTES = 64 * 2**20


def holder_request(config: ContainerConfig) -> dict[str, Any]:
    """Body of the engine's request that creates the network holder."""
    # A tmpfs over each path of the image's VOLUME list: the engine would make an anonymous volume for it.
    covers = [{"Type": "tmpfs", "Target": path} for path in config.image.volumes]
    host = {
        "NetworkMode": "none" if config.network == "none" else "bridge",
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "PidsLimit": HOLDER_PIDS,
        "Mounts": [_helpers_mount(config), *covers],
    }
    return {**_request(config, "network", host), **_INIT_AS_USER, "Hostname": config.hostname}


def workload_request(config: ContainerConfig, holder_id: str) -> dict[str, Any]:
    """Body of the engine's request that creates the workload beside that network holder."""
    covered = set(config.image.volumes)
    tmpfs = {
        mount.path: f"rw,nosuid,nodev,exec,size={mount.size_bytes},mode={mount.mode}"
        for mount in config.tmpfs
        if mount.path not in covered
    }
    options = [option for option in config.security_options if not option.startswith("no-new-privileges")]
    if "no-new-privileges:false" not in config.security_options:
        options.append("no-new-privileges")
    host = {
        "NetworkMode": f"container:{holder_id}",
        "CapDrop": ["ALL"],
        "CapAdd": list(config.capabilities),
        "SecurityOpt": options,
        "PidsLimit": config.pids,
        "Memory": config.memory_bytes,
        "MemorySwap": config.memory_bytes,
        "NanoCpus": int((config.cpus or 0) * 1e9),
        "ShmSize": SHM_BYTES,
        "Tmpfs": tmpfs,
        "Mounts": [_helpers_mount(config), *_volume_mounts(config), *_bind_mounts(config), *_covering_tmpfs(config)],
    }
    init = _INIT_FROM_ROOT if config.capabilities else _INIT_AS_USER
    env = [f"{name}={value}" for name, value in config.env.items()]
    return {**_request(config, config.role, host), **init, "Env": env}


def _request(config: ContainerConfig, role: Role, host: dict[str, Any]) -> dict[str, Any]:
    always = {
        "CgroupParent": config.cgroup_parent,
        "CgroupnsMode": "private",
        "IpcMode": "private",
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "none"},
    }
    return {
        "Image": config.image.image_id,
        # Not the task's: PID 1 must not depend on what a restored tree has there (CVE-2024-21626).
        "WorkingDir": "/",
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",  # PID 1 handles no other
        "Labels": config.labels(role),
        "HostConfig": {**always, **host},
    }


def _helpers_mount(config: ContainerConfig) -> dict[str, Any]:
    return _bind(BindMount(source=config.helpers, path=OWN_DIRECTORY, read_only=True))


def _volume_mounts(config: ContainerConfig) -> list[dict[str, Any]]:
    return [
        {"Type": "volume", "Source": volume.name, "Target": volume.path, "ReadOnly": volume.read_only}
        for volume in config.volumes
    ]


def _bind_mounts(config: ContainerConfig) -> list[dict[str, Any]]:
    return [_bind(bind) for bind in config.binds]


def _covering_tmpfs(config: ContainerConfig) -> list[dict[str, Any]]:
    """A tmpfs over a path of the ``VOLUME`` list keeps an anonymous volume away only if it is given as a mount."""
    return [
        {
            "Type": "tmpfs",
            "Target": mount.path,
            "TmpfsOptions": {"SizeBytes": mount.size_bytes, "Mode": int(mount.mode, 8)},
        }
        for mount in config.tmpfs
        if mount.path in config.image.volumes
    ]


def _bind(bind: BindMount) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": bind.source,
        "Target": bind.path,
        "ReadOnly": bind.read_only,
        "BindOptions": {"Propagation": "rprivate"},
    }
