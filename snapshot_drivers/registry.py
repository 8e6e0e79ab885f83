"""Names of drivers and the classes behind them; imported on demand. Third parties add theirs by an entry point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from snapshot_drivers.base import SnapshotDriver
from snapshot_drivers.errors import UnsupportedHost

ENTRY_POINT_GROUP = "orchestrator.snapshot_drivers"
"""Its entry points name factories: ``(store: Path, **options) -> SnapshotDriver``."""

_BUILT_IN = {
    "overlay": "snapshot_drivers.overlay.driver:OverlayDriver",
    "criu": "snapshot_drivers.criu.driver:CriuDriver",
    "commit": "snapshot_drivers.commit.driver:CommitDriver",
    "git": "snapshot_drivers.git.driver:GitDriver",
    "memory": "snapshot_drivers.memory:MemoryDriver",
}


@dataclass(frozen=True)
class DriverSource:
    """Where a driver comes from."""

    name: str
    path: str
    """``module:attribute`` of the factory."""
    distribution: str | None
    """The package that ships it; ``None`` for our own."""


def known_drivers() -> dict[str, DriverSource]:
    """All drivers by name, none of them imported. Our own names cannot be taken over."""
    found = {
        point.name: DriverSource(point.name, point.value, point.dist.name if point.dist else None)
        for point in entry_points(group=ENTRY_POINT_GROUP)
    }
    return {**found, **{name: DriverSource(name, path, None) for name, path in _BUILT_IN.items()}}


def make_driver(name: str, store: Path, options: Mapping[str, Any] | None = None) -> SnapshotDriver:
    """A driver over the store directory, with the options of the task's ``snapshots.options``.

    Raises: UnsupportedHost: no such driver, it cannot be imported, or it does not take these options.
    """
    drivers = known_drivers()
    if name not in drivers:
        raise UnsupportedHost(f"no snapshot driver {name!r}: choose one of {', '.join(sorted(drivers))}")
    module, _, attribute = drivers[name].path.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UnsupportedHost(f"driver {name} ({drivers[name].path}) cannot be loaded: {error}") from error
    try:
        driver: SnapshotDriver = factory(store, **(options or {}))
    except OSError as error:
        raise UnsupportedHost(
            f"driver {name} cannot use the store {store}: {error.strerror}: see to the disk"
        ) from error
    except TypeError as error:
        raise UnsupportedHost(f"driver {name} does not take the options {sorted(options or {})}: {error}") from error
    return driver
