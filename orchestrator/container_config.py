"""Everything that is needed to make a run's container again.

It is recorded in the run's directory, so it holds no secrets and nothing of the moment (ids, addresses).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from orchestrator.policy import DEFAULT_CAPABILITIES
from orchestrator.task import TaskSpec

LABEL_RUN = "orchestrator.run"
LABEL_ROLE = "orchestrator.role"
LABEL_DATA_DIR = "orchestrator.data-dir"

Role = Literal["workload", "network", "scratch"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ImageFacts(_Part):
    """What the engine knows of one image."""

    image_id: str
    layer_ids: tuple[str, ...]
    """Content addresses of its layers, lowest first."""
    architecture: str
    volumes: tuple[str, ...] = ()
    """Paths of its ``VOLUME`` list."""


class VolumeMount(_Part):
    """A volume of the engine, mounted by name: an anonymous one could not be found again."""

    path: str
    name: str
    own: bool
    """Made for this run, and removed with it."""
    restore: bool
    """Captured and restored."""
    read_only: bool = False


class BindMount(_Part):
    """A directory or file of the host."""

    source: str
    path: str
    read_only: bool
    restore: bool = False
    """Captured and restored (``snapshots.include_binds``)."""


class TmpfsMount(_Part):
    """Memory mounted as a directory."""

    path: str
    size_bytes: int
    mode: str
    """Octal."""


class ContainerConfig(_Part):
    """The configuration of a run's container. It holds no secrets: those are given to single commands only."""

    run_id: str
    role: Literal["workload", "scratch"] = "workload"
    name: str
    """Of the workload; the network holder's follows from it."""
    data_dir: str
    helpers: str
    """Host directory with ``init`` and ``launch``, mounted read-only."""
    image: ImageFacts
    env: dict[str, str]
    """The task's, without its secrets; the image's own comes with the image."""
    user: str
    """Default user of commands: name or uid, optionally with group."""
    workdir: str
    hostname: str
    network: Literal["none", "bridge"]
    capabilities: tuple[str, ...]
    """All that the container has, without ``CAP_``."""
    security_options: tuple[str, ...]
    memory_bytes: int
    cpus: float | None
    pids: int
    volumes: tuple[VolumeMount, ...]
    binds: tuple[BindMount, ...]
    tmpfs: tuple[TmpfsMount, ...]
    cgroup_parent: str

    @property
    def holder_name(self) -> str:
        """Name of the network holder."""
        return f"{self.name}-net"

    def labels(self, role: Role) -> dict[str, str]:
        """Labels of everything of this run: by them it is found after a crash."""
        return {LABEL_RUN: self.run_id, LABEL_ROLE: role, LABEL_DATA_DIR: self.data_dir}

    def scratch(self, suffix: str, network: Literal["none", "bridge"] = "none") -> ContainerConfig:
        """Configuration of a throw-away copy: volumes of its own for what is captured, everything shared read-only."""
        name = f"{self.name}.{suffix}"
        volumes = tuple(
            volume.model_copy(update={"name": f"{name}-{number}", "own": True})
            if volume.restore
            else volume.model_copy(update={"read_only": True})
            for number, volume in enumerate(self.volumes, 1)
        )
        binds = tuple(bind.model_copy(update={"read_only": True, "restore": False}) for bind in self.binds)
        parent = self.cgroup_parent.removesuffix(".slice")
        changes = {
            "role": "scratch",
            "name": name,
            "network": network,
            "volumes": volumes,
            "binds": binds,
            "cgroup_parent": f"{parent}.{suffix}{self.cgroup_parent[len(parent) :]}",
        }
        return self.model_copy(update=changes)


def config_of(
    spec: TaskSpec, image: ImageFacts, *, run_id: str, data_dir: Path, helpers: Path, cgroup_driver: str
) -> ContainerConfig:
    """The configuration of a task's container in a run of that id."""
    name = f"orchestrator-{run_id}"
    return ContainerConfig(
        run_id=run_id,
        name=name,
        data_dir=str(data_dir),
        helpers=str(helpers),
        image=image,
        env=spec.env_for_exec({}),
        user=spec.user,
        workdir=spec.workdir,
        hostname=run_id[:63].strip("-"),
        network=spec.network,
        capabilities=_capabilities(spec),
        security_options=spec.security_options,
        memory_bytes=spec.resources.memory,
        cpus=spec.resources.cpus,
        pids=spec.resources.pids,
        volumes=_volumes(spec, image, name),
        binds=tuple(
            BindMount(
                source=bind.source,
                path=bind.path,
                read_only=bind.read_only,
                restore=bind.path in spec.snapshots.include_binds,
            )
            for bind in spec.binds
        ),
        tmpfs=tuple(TmpfsMount(path=item.path, size_bytes=item.size, mode=item.mode) for item in spec.tmpfs),
        cgroup_parent=_cgroup_parent(run_id, cgroup_driver),
    )


def _capabilities(spec: TaskSpec) -> tuple[str, ...]:
    drop = set(spec.capabilities.drop)
    base = set() if "ALL" in drop else set(DEFAULT_CAPABILITIES)
    return tuple(sorted((base | set(spec.capabilities.add)) - drop))


def _volumes(spec: TaskSpec, image: ImageFacts, name: str) -> tuple[VolumeMount, ...]:
    """The task's volumes, and one for each path of the image's ``VOLUME`` list that the task puts nothing on."""
    wanted = [(volume.path, volume.name, volume.restore) for volume in spec.volumes]
    taken = {mount.path for group in (spec.volumes, spec.binds, spec.tmpfs) for mount in group}
    wanted += [(path, None, True) for path in image.volumes if path not in taken]
    return tuple(
        VolumeMount(path=path, name=given or f"{name}-{number}", own=given is None, restore=restore or given is None)
        for number, (path, given, restore) in enumerate(wanted, 1)
    )


def _cgroup_parent(run_id: str, cgroup_driver: str) -> str:
    if cgroup_driver != "systemd":
        return f"/orchestrator/{run_id}"
    # A dash nests slices. Run ids have no underscore, so two of them never share a slice.
    return f"orchestrator-{run_id.replace('-', '_')}.slice"
