"""Where the engine keeps a container's layers: its own word, proven by the host's mounts; never the container's."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from snapshot_drivers import beneath
from snapshot_drivers.base import Target
from snapshot_drivers.errors import EngineError, UnsupportedHost

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Layers:
    """A container's overlay: the writable directory and the image's below it, topmost first."""

    upper: Path
    lower: tuple[Path, ...]


def find_layers(target: Target) -> Layers:
    """The layers of ``target``.

    The engine's word for the upper directory must lie below its data root, in a directory that root owns, and where the
    container runs, the host's own mount line of the overlay must name the same inode.

    Raises: UnsupportedHost: another storage driver; EngineError: the two sources disagree or it is not reachable.
    """
    if target.storage_driver != "overlay2":
        raise UnsupportedHost(
            f"unsupported storage driver: {target.storage_driver}; the overlay driver needs an engine on overlay2 "
            "(`docker info`), or choose another driver with --driver"
        )
    upper = target.upper_hint
    if upper is None:
        raise EngineError(
            f"the engine does not say where container {target.container_id[:12]} keeps its upper directory"
        )
    try:
        with beneath.closing(beneath.open_below(target.engine_root, upper)) as found:
            identity = os.fstat(found)
        with beneath.closing(beneath.open_below(target.engine_root, upper.parent)) as parent:
            owner = os.fstat(parent)
    except OSError as error:
        raise EngineError(
            f"cannot reach the upper directory {upper}: {error.strerror}; is the engine on this host?"
        ) from error
    if owner.st_uid != 0 or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise EngineError(f"{upper.parent} does not belong to root alone; refusing to work on it")
    options = _mount_options(upper.parent / "merged")
    if options is None:
        if target.init_pid is not None:
            raise EngineError(f"no overlay is mounted on {upper.parent / 'merged'} though the container runs")
        return Layers(upper, _lower_of_stopped(upper.parent))
    if "userxattr" in options:
        raise UnsupportedHost("the engine is rootless (overlay with userxattr), which the overlay driver does not do")
    mounted = upper.parent.parent / options["upperdir"]
    try:
        same = mounted.stat()
    except OSError as error:
        raise EngineError(f"cannot reach {mounted}: {error.strerror}") from error
    if (same.st_dev, same.st_ino) != (identity.st_dev, identity.st_ino):
        raise EngineError(f"the engine states {upper} as the upper directory, the host has mounted {mounted}")
    return Layers(upper, _resolved(upper.parent.parent, options["lowerdir"]))


def is_mounted(merged: Path) -> bool:
    """True while the overlay of this merged directory is mounted in the host's mount namespace."""
    return _mount_options(merged) is not None


def _mount_options(merged: Path) -> dict[str, str] | None:
    with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.split()
            if unescape(fields[4]) != str(merged):
                continue
            rest = fields[fields.index("-") + 1 :]
            if rest[0] == "overlay":
                pairs = (option.partition("=") for option in rest[2].split(","))
                return {key: unescape(value) for key, _, value in pairs}
    return None


def _lower_of_stopped(directory: Path) -> tuple[Path, ...]:
    """overlay2 keeps the layers below a container in the file ``lower`` as short names relative to its directory."""
    try:
        text = (directory / "lower").read_text(encoding="utf-8")
    except OSError as error:
        raise EngineError(f"cannot read {directory / 'lower'}: {error.strerror}") from error
    return _resolved(directory.parent, text)


def _resolved(base: Path, text: str) -> tuple[Path, ...]:
    return tuple(Path(os.path.realpath(base / part)) for part in text.strip().split(":"))


def image_layers(lower: tuple[Path, ...]) -> tuple[str, ...]:
    """The layers of the image alone: the topmost one is the engine's own for this container (``…-init``)."""
    return tuple(str(path) for path in lower if not path.parent.name.endswith("-init"))


def unescape(text: str) -> str:
    """Undo the octal escapes of ``/proc`` mount tables."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
