"""The two containers of a run on the engine: made together, removed together with all that belongs to them.

Nothing is touched that does not carry the labels of the same run and the same data directory.
"""

from __future__ import annotations

import glob
import io
import posixpath
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from orchestrator.container_config import LABEL_DATA_DIR, LABEL_RUN, ContainerConfig
from orchestrator.container_request import holder_request, workload_request
from orchestrator.engine import Engine
from orchestrator.errors import HostError
from snapshot_drivers import beneath
from snapshot_drivers.cgroups import hierarchies
from snapshot_drivers.crash_points import reached
from snapshot_drivers.errors import ContainerNotRunning, EngineError
from snapshot_drivers.removal import remove

_HELPER_NAMES: Final = ("launch",)


def make(engine: Engine, config: ContainerConfig) -> str:
    """Network holder and workload run on pristine layers; the workload's id. Older ones of the run are gone.

    Volumes that the run owns keep their content where they exist.

    Raises: HostError: image, helpers, a volume or a name cannot be had. EngineError.
    """
    _check_helpers(Path(config.helpers))
    _check_capabilities(config)
    engine.image(config.image.image_id)
    for name in (config.name, config.holder_name):
        _make_way(engine, config, name)
    try:
        engine.hold_image(config.image.image_id, config.run_id)
        for volume in config.volumes:
            if volume.own:
                engine.create_volume(volume.name, config.labels(config.role))
            elif engine.volume(volume.name) is None:
                raise HostError(f"no volume {volume.name}: make it (docker volume create {volume.name})")
        holder_id = engine.create(config.holder_name, holder_request(config))
        engine.start(holder_id)
        container_id = engine.create(config.name, workload_request(config, holder_id))
        reached("container-made")
        _make_directory(engine, container_id, config.workdir)
        engine.start(container_id)
    except BaseException:
        with suppress(EngineError, HostError):
            remove_containers(engine, config)
        raise
    return container_id


def replace(engine: Engine, config: ContainerConfig, container_id: str, image_id: str) -> str:
    """A workload of that image, not started yet, has the place of the present one, which is gone; its id.

    Raises: HostError: a name cannot be had. ContainerNotRunning: the network holder is gone. EngineError: the present
        one is still there, unless the message says otherwise.
    """
    holder = engine.find(config.holder_name)
    if holder is None:
        raise ContainerNotRunning(f"{config.holder_name} is gone: orchestrator restore makes both again")
    beside = f"{config.name}.next"
    _make_way(engine, config, beside)
    image = config.image.model_copy(update={"image_id": image_id})
    made = engine.create(beside, workload_request(config.model_copy(update={"image": image}), holder["Id"]))
    try:
        engine.kill(container_id)
        remove_container(engine, container_id)
    except BaseException:
        with suppress(EngineError):
            engine.remove(made)
        raise
    reached("restore-killed")
    engine.rename(made, config.name)
    return made


def find(engine: Engine, config: ContainerConfig) -> dict[str, Any] | None:
    """The engine's answer about the workload, if it is there and the run's.

    Raises: EngineError.
    """
    found = engine.find(config.name)
    return found if found is not None and _is_ours(found["Config"], config) else None


def remove_containers(engine: Engine, config: ContainerConfig) -> None:
    """Both containers and their cgroups are gone. Repeatable.

    Raises: EngineError.
    """
    for name in (config.name, config.holder_name):
        found = engine.find(name)
        if found is not None and _is_ours(found["Config"], config):
            remove_container(engine, found["Id"])
    remove_cgroups(config.cgroup_parent)


def remove_container(engine: Engine, container_id: str) -> None:
    """The container is gone, whatever tree it made. Repeatable.

    Raises: EngineError.
    """
    found = engine.find(container_id) or {}
    upper = ((found.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
    _remove(engine, partial(engine.remove, container_id), upper)


def remove_volume(engine: Engine, name: str) -> None:
    """The volume is gone, whatever a container made in it. Repeatable.

    Raises: EngineError: also when a container still uses it.
    """
    found = engine.volume(name) or {}
    mine = found.get("Driver") == "local" and not found.get("Options") and not engine.users_of_volume(name)
    _remove(engine, partial(engine.remove_volume, name), found.get("Mountpoint") if mine else None)


def _remove(engine: Engine, call: Callable[[], None], directory: str | None) -> None:
    """The engine holds a descriptor a level and knows no inode flags: where it gives up, it is given an empty tree."""
    try:
        call()
    except EngineError as error:
        if directory is None:
            raise
        try:
            with beneath.closing(beneath.open_below(Path(engine.facts().data_root), Path(directory))) as root:
                for name, _ in beneath.list_directory(root):
                    remove(root, name)
        except OSError:
            raise error from None
        call()


def remove_cgroups(parent: str) -> None:
    """The cgroups of that name, as given to the engine, are gone where nothing runs in them. Repeatable."""
    for hierarchy in hierarchies():
        with suppress(OSError):  # busy, or not there
            hierarchy.directory(parent).rmdir()


def remove_copies(engine: Engine, config: ContainerConfig) -> None:
    """The throw-away copies that a dead process left are gone, with their volumes and cgroups. Repeatable.

    Raises: EngineError.
    """
    data_dir, beginning = Path(config.data_dir), f"{config.name}."
    for container in engine.list_ours(run_id=config.run_id, data_dir=data_dir):
        if container.name.startswith(beginning):
            remove_container(engine, container.container_id)
    for volume in engine.list_our_volumes(run_id=config.run_id, data_dir=data_dir):
        if volume.startswith(beginning):
            remove_volume(engine, volume)
    parent = config.cgroup_parent.removesuffix(".slice")
    for hierarchy in hierarchies():
        directory = hierarchy.directory(config.cgroup_parent)
        for copy in directory.parent.glob(f"{glob.escape(Path(parent).name)}.*"):
            if copy != directory and copy.is_dir():
                with suppress(OSError):
                    copy.rmdir()


def remove_volumes(engine: Engine, config: ContainerConfig) -> None:
    """The volumes that the run owns are gone. Repeatable.

    Raises: EngineError.
    """
    for volume in config.volumes:
        found = engine.volume(volume.name) if volume.own else None
        if found is not None and _is_ours(found, config):
            remove_volume(engine, volume.name)


def _check_helpers(directory: Path) -> None:
    """PID 1 is nobody special, so others must be able to look into the directory that is mounted for it."""
    for path, wanted in ((directory, 0o005), *((directory / name, 0o005) for name in _HELPER_NAMES)):
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise HostError(f"{path}: {error.strerror}: run deploy/helpers") from error
        if mode & wanted != wanted:
            raise HostError(f"{path}: the container's init may not run it: run: chmod 0755 {path}")


def _check_capabilities(config: ContainerConfig) -> None:
    missing = sorted({"SETUID", "SETGID"} - set(config.capabilities))
    if not missing:
        return
    names = " and ".join(missing)
    if config.capabilities:
        raise HostError(f"capabilities.drop: PID 1 needs {names} to take a user of its own: drop ALL, or keep them")
    if config.user not in ("root", "0"):
        raise HostError(f"capabilities.drop: the launcher needs {names} to run commands as {config.user}: keep them")


def _make_directory(engine: Engine, container_id: str, path: str) -> None:
    """``path`` and its missing parents exist in the container. It need not run, nor have a shell."""
    missing = []
    while path != "/" and not engine.has_path(container_id, path):
        missing.append(path)
        path = posixpath.dirname(path)
    if not missing:
        return
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in reversed(missing):
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, 0o755, int(time.time())
            tar.addfile(entry)
    engine.add_archive(container_id, archive.getvalue())


def _is_ours(found: dict[str, Any], config: ContainerConfig) -> bool:
    labels = found.get("Labels") or {}
    return labels.get(LABEL_RUN) == config.run_id and labels.get(LABEL_DATA_DIR) == config.data_dir


def _make_way(engine: Engine, config: ContainerConfig, name: str) -> None:
    """No container has that name.

    Raises: HostError: it is somebody else's.
    """
    found = engine.find(name)
    if found is None:
        return
    if not _is_ours(found["Config"], config):
        raise HostError(f"container {name} belongs to another run or data directory: choose another --run-id")
    remove_container(engine, found["Id"])
