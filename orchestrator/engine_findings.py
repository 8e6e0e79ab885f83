"""What ``doctor`` finds out about the container engine. A throw-away container is made, never started, and removed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from orchestrator import host
from orchestrator.container_config import LABEL_DATA_DIR, LABEL_ROLE, LABEL_RUN
from orchestrator.engine import Engine, EngineFacts
from orchestrator.errors import HostError
from orchestrator.finding import Finding
from orchestrator.mounts import layers_hint
from snapshot_drivers import beneath
from snapshot_drivers.errors import SnapshotError

BASE_IMAGE: Final = "orchestrator-base:latest"
"""What ``deploy/base-image`` makes."""

_WAY_OUT: Final = "launch with --driver commit: slower, without volumes, and only scratch checks"
"""For engines of which this host cannot reach the layers."""
_LEAST_FREE_BYTES: Final = 2 * 2**30
_NO_ENGINE: Final = "not looked at: no engine answers"


def engine_findings(data_dir: Path, connect: Callable[[], Engine]) -> list[Finding]:
    """How the engine that ``connect`` reaches stands; without one, a finding says so and the rest is not looked at."""
    try:
        engine = connect()
        facts = engine.facts()
    except (HostError, SnapshotError) as error:
        names = (
            "engine mode",
            "storage driver",
            "control groups",
            "upper directory",
            "runc",
            "free space",
            "base image",
        )
        rest = [Finding(name=name, ok=None, found=_NO_ENGINE) for name in names]
        return [Finding(name="engine", ok=False, found=str(error), remedy="run deploy/engine"), *rest]
    with closing(engine):
        return [
            Finding(name="engine", ok=True, found=f"version {facts.version}, API {facts.api_version}"),
            _mode(facts),
            _storage(facts),
            _cgroups(facts),
            _tried("upper directory", lambda: _upper_directory(engine, facts, data_dir)),
            _runc(facts),
            _free_space(data_dir, Path(facts.data_root)),
            _tried("base image", lambda: _base_image(engine)),
        ]


def _tried(name: str, trial: Callable[[], Finding]) -> Finding:
    """What the trial finds; an engine that fails in the middle of it is a finding, too."""
    try:
        return trial()
    except SnapshotError as error:
        return Finding(name=name, ok=False, found=str(error), remedy="read the engine's log")


def _mode(facts: EngineFacts) -> Finding:
    options = ", ".join(facts.security_options) or "none"
    for option, remedy in (
        ("rootless", f"use an engine that runs as root, or {_WAY_OUT}"),
        ("userns", f"start the engine without userns-remap, or {_WAY_OUT}"),
    ):
        if any(f"name={option}" in text or text == option for text in facts.security_options):
            return Finding(name="engine mode", ok=False, found=f"security options: {options}", remedy=remedy)
    return Finding(name="engine mode", ok=True, found=f"runs as root; security options: {options}")


def _storage(facts: EngineFacts) -> Finding:
    found = f"{facts.storage_driver} in {facts.data_root}"
    if facts.storage_driver in ("overlay2", "overlayfs"):
        return Finding(name="storage driver", ok=True, found=found)
    remedy = (
        "put the engine's data root on ext4 or xfs (not on an overlay) and start it with --storage-driver overlay2, or "
        f"{_WAY_OUT}"
    )
    return Finding(name="storage driver", ok=False, found=found, remedy=remedy)


def _cgroups(facts: EngineFacts) -> Finding:
    found = f"version {facts.cgroup_version}, driver {facts.cgroup_driver}"
    if facts.cgroup_driver in ("cgroupfs", "systemd"):
        return Finding(name="control groups", ok=True, found=found)
    return Finding(
        name="control groups",
        ok=False,
        found=found,
        remedy="start the engine with native.cgroupdriver=systemd or cgroupfs: without one nothing can be frozen",
    )


def _upper_directory(engine: Engine, facts: EngineFacts, data_dir: Path) -> Finding:
    """Makes a container, never starts it, and looks for its upper directory on this host as a driver would."""
    name = "upper directory"
    here = "run the orchestrator as root on the engine's own host, with the engine's data root visible"
    try:
        engine.image(BASE_IMAGE)
    except HostError:
        return Finding(
            name=name, ok=None, found=f"cannot be tried without {BASE_IMAGE}", remedy="run deploy/base-image"
        )
    label = f"doctor-{os.getpid()}"
    labels = {LABEL_RUN: label, LABEL_ROLE: "scratch", LABEL_DATA_DIR: str(data_dir)}
    request = {"Image": BASE_IMAGE, "Cmd": ["true"], "Labels": labels, "HostConfig": {"NetworkMode": "none"}}
    container = engine.create(f"orchestrator-{label}", request)
    try:
        stated, lower = layers_hint(engine, engine.inspect(container))
        if stated is None:
            return Finding(name=name, ok=False, found="the engine does not state it", remedy="see: storage driver")
        os.close(beneath.open_below(Path("/") if lower else Path(facts.data_root), stated))
    except OSError as error:
        return Finding(name=name, ok=False, found=f"{stated}: {error.strerror}", remedy=here)
    finally:
        engine.remove(container)
    return Finding(name=name, ok=True, found=f"a container's was found: {stated}")


def _base_image(engine: Engine) -> Finding:
    try:
        image = engine.image(BASE_IMAGE)
    except HostError as error:
        return Finding(name="base image", ok=False, found=str(error), remedy="run deploy/base-image", needed=False)
    found = f"{BASE_IMAGE} ({image.architecture}), for the examples and tests"
    return Finding(name="base image", ok=True, found=found, needed=False)


def _runc(facts: EngineFacts) -> Finding:
    version = facts.runc_version or "of unknown version"
    fixed = host.runc_is_fixed(version)
    remedy = None
    if not fixed:
        remedy = (
            f"use runc {', '.join(host.FIXED_RUNC.values())} or newer, or your distribution's fix of {host.FIXED_CVE}"
        )
    if fixed is None:
        remedy = f"ask your distribution whether this package has the fix of {host.FIXED_CVE}; else {remedy}"
    return Finding(name="runc", ok=fixed, found=f"runc {version}", remedy=remedy, needed=False)


def _free_space(data_dir: Path, data_root: Path) -> Finding:
    try:
        rooms = [(place, host.space(place)) for place in (data_dir, data_root)]
    except OSError as error:
        return Finding(name="free space", ok=None, found=str(error), remedy="run as root on the engine's own host")
    same = rooms[0][1].device == rooms[1][1].device
    found = "; ".join(f"{room.free_bytes / 2**30:.1f} GiB for {place}" for place, room in rooms)
    found += "; one filesystem" if same else "; two filesystems"
    short = [str(place) for place, room in rooms if room.free_bytes < _LEAST_FREE_BYTES]
    if not short:
        return Finding(name="free space", ok=True, found=found)
    remedy = f"free at least {_LEAST_FREE_BYTES // 2**30} GiB for {' and '.join(short)}; rm runs that are not needed"
    return Finding(name="free space", ok=False, found=found, remedy=remedy)
