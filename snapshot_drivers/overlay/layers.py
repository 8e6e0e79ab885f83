"""Where the engine keeps a container's layers: its own word, proven by the host's mounts; never the container's."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from snapshot_drivers import beneath
from snapshot_drivers.base import Target
from snapshot_drivers.errors import EngineError, UnsupportedHost
from snapshot_drivers.mountinfo import MountLine, own_mounts


@dataclass(frozen=True)
class Layers:
    """A container's overlay: the writable directory and what lies below it."""

    upper: Path
    lower: tuple[Path, ...]
    """Topmost first; the topmost is the engine's own for this container, the others are the image's."""
    mount_point: Path
    """Where the engine mounts it on the host."""

    @property
    def image(self) -> tuple[str, ...]:
        """The layers of the image alone, topmost first."""
        return tuple(str(path) for path in self.lower[1:])


def find_layers(target: Target) -> Layers:
    """The layers of ``target``.

    The engine's word must be borne out by the host's own mount line where the container runs, and the upper directory
    must lie in a directory that root alone can change.

    Raises: UnsupportedHost: another storage driver; EngineError: two sources disagree or it is not reachable.
    """
    if target.storage_driver == "overlay2":
        layers = _of_overlay2(target)
    elif target.storage_driver == "overlayfs":
        layers = _of_containerd(target)
    else:
        raise UnsupportedHost(
            f"unsupported storage driver: {target.storage_driver}; the overlay driver needs an engine on overlay2 or "
            "overlayfs (`docker info`); --driver commit works on any"
        )
    if not layers.lower:
        raise EngineError(f"the overlay of container {target.container_id[:12]} has no layers below {layers.upper}")
    return layers


def _of_overlay2(target: Target) -> Layers:
    """Docker's own store: the engine states the upper directory, below its data root."""
    upper = target.upper_hint
    if upper is None:
        raise EngineError(
            f"the engine does not say where container {target.container_id[:12]} keeps its upper directory"
        )
    identity = _identity(target.engine_root, upper)
    mount_point = upper.parent / "merged"
    line = overlay_at(mount_point)
    if line is None:
        if target.init_pid is not None:
            raise EngineError(f"no overlay is mounted on {mount_point} though the container runs")
        return Layers(upper, _lower_of_stopped(upper.parent), mount_point)
    # Relative paths, which images of many layers have, start at the store's directory.
    mounted = upper.parent.parent / _upper(line)
    try:
        same = mounted.stat()
    except OSError as error:
        raise EngineError(f"cannot reach {mounted}: {error.strerror}") from error
    if (same.st_dev, same.st_ino) != identity:
        raise EngineError(f"the engine states {upper} as the upper directory, the host has mounted {mounted}")
    return Layers(upper, _lower(line, upper.parent.parent), mount_point)


def _of_containerd(target: Target) -> Layers:
    """With containerd's image store only the mount tells, while the container runs or the engine looks into it."""
    mount_point = containerd_mount_point(target.engine_root, target.container_id)
    line = overlay_at(mount_point)
    if line is not None:
        upper, lower = Path(_upper(line)), _lower(line, mount_point)
    elif target.init_pid is None and target.upper_hint is not None:
        upper, lower = target.upper_hint, target.lower_hint
    else:
        raise EngineError(f"no overlay is mounted on {mount_point}: the engine's mounts are not visible here")
    if upper.name != "fs" or upper.parents[1].name != "snapshots":
        raise EngineError(f"{upper} is no snapshot of containerd's overlayfs snapshotter; refusing to work on it")
    _identity(upper.parents[2], upper)
    return Layers(upper, lower, mount_point)


def containerd_mount_point(engine_root: Path, container_id: str) -> Path:
    """Where an engine with containerd's image store mounts a container's root on the host."""
    return engine_root / "rootfs/overlayfs" / container_id


def mounted_layers(mount_point: Path) -> tuple[Path, tuple[Path, ...]] | None:
    """Upper directory and lower ones of the overlay that is mounted there; ``None``: none is."""
    line = overlay_at(mount_point)
    if line is None:
        return None
    return Path(_upper(line)), _lower(line, mount_point)


def _identity(top: Path, upper: Path) -> tuple[int, int]:
    """Device and inode of the upper directory, which is reached from ``top`` over no link, and root's alone."""
    try:
        with beneath.closing(beneath.open_below(top, upper)) as found:
            identity = os.fstat(found)
        with beneath.closing(beneath.open_below(top, upper.parent)) as parent:
            owner = os.fstat(parent)
    except OSError as error:
        raise EngineError(
            f"cannot reach the upper directory {upper}: {error.strerror}; is the engine on this host?"
        ) from error
    if owner.st_uid != 0 or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise EngineError(f"{upper.parent} does not belong to root alone; refusing to work on it")
    return identity.st_dev, identity.st_ino


def is_mounted(mount_point: Path) -> bool:
    """True while an overlay is mounted there in the host's mount namespace."""
    return overlay_at(mount_point) is not None


def overlay_at(mount_point: Path) -> MountLine | None:
    """The overlay that is mounted there; ``None``: none is.

    Raises: UnsupportedHost: one whose state the driver cannot know.
    """
    for line in own_mounts("overlay"):
        if line.fs_type == "overlay" and line.mount_point == str(mount_point):
            options = line.super_options.split(",")
            if "userxattr" in options:
                raise UnsupportedHost(
                    "the engine is rootless (overlay with userxattr), which the overlay driver does not do: "
                    "--driver commit works on any"
                )
            if "index=on" in options:
                raise UnsupportedHost(
                    "the overlay is mounted with index=on: a part of its state lies outside of the upper directory"
                )
            return line
    return None


def _upper(line: MountLine) -> str:
    values = line.super_values("upperdir")
    if len(values) != 1:
        raise EngineError(f"the overlay on {line.mount_point} has no writable directory")
    return values[0]


def _lower(line: MountLine, base: Path) -> tuple[Path, ...]:
    """Those given in one option, or in an option each (``lowerdir+``, since Linux 6.8)."""
    return _resolved(base, ":".join([*line.super_values("lowerdir"), *line.super_values("lowerdir+")]))


def _lower_of_stopped(directory: Path) -> tuple[Path, ...]:
    """overlay2 keeps the layers below a container in the file ``lower`` as short names relative to its directory."""
    try:
        text = (directory / "lower").read_text(encoding="utf-8")
    except OSError as error:
        raise EngineError(f"cannot read {directory / 'lower'}: {error.strerror}") from error
    return _resolved(directory.parent, text)


@lru_cache(maxsize=64)
def _resolved(base: Path, text: str) -> tuple[Path, ...]:
    """The links of layers' short names are made with the layers and stay as they are."""
    return tuple(Path(os.path.realpath(base / part)) for part in text.strip().split(":"))
