"""Says what works on this host and what to do about what does not. Each finding is tried where trying is possible.

Nothing is left behind: the throw-away container and cgroup are removed. It runs with no engine, too.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from orchestrator import host
from orchestrator.engine import Engine
from orchestrator.engine_findings import engine_findings
from orchestrator.finding import Finding
from snapshot_drivers.cgroups import Hierarchy, hierarchies
from snapshot_drivers.criu import probe
from snapshot_drivers.criu.gateway import DEFAULT_PREFIX
from snapshot_drivers.errors import SnapshotError
from snapshot_drivers.freezer import Freezer
from snapshot_drivers.git.repository import PATH as GIT_PATH

HELPERS: Final = ("launch", "enter", "tracker")
HELPERS_DIR: Final = Path("/usr/local/lib/orchestrator")
"""Where ``deploy/helpers`` puts them; a launch copies them into the data directory."""

_ARCHITECTURES: Final = ("x86_64", "aarch64")


def examine(data_dir: Path, *, connect: Callable[[], Engine] = Engine.connect) -> list[Finding]:
    """How this host stands, most basic things first. Raises nothing that a host can cause; takes about a second."""
    return [
        _platform(),
        _rights(),
        _kernel_calls(),
        _freezer(),
        _helpers(data_dir),
        _data_directory(data_dir),
        *engine_findings(data_dir, connect),
        _criu(),
        _git(),
    ]


def _platform() -> Finding:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}"
    fits = sys.platform == "linux" and platform.machine() in _ARCHITECTURES
    remedy = None if fits else f"use Linux on {' or '.join(_ARCHITECTURES)}"
    return Finding(name="platform", ok=fits, found=found, remedy=remedy)


def _rights() -> Finding:
    try:
        missing = host.missing_capabilities()
    except OSError as error:
        return Finding(name="rights", ok=None, found=f"cannot be read: {error.strerror}", remedy="mount /proc")
    if not missing:
        return Finding(name="rights", ok=True, found=f"uid {os.geteuid()} with every capability that is needed")
    return Finding(
        name="rights",
        ok=False,
        found=f"uid {os.geteuid()} lacks {', '.join(missing)}",
        remedy="run as root of the host (sudo), not in an unprivileged container",
    )


def _kernel_calls() -> Finding:
    refused = host.refused_kernel_calls()
    if not refused:
        return Finding(name="kernel calls", ok=True, found=f"{', '.join(host.KERNEL_CALLS)} work")
    return Finding(
        name="kernel calls",
        ok=False,
        found="; ".join(f"{name}: {reason}" for name, reason in refused.items()),
        remedy="run as root on kernel 5.12 or newer, and let no seccomp filter refuse these calls",
    )


def _freezer() -> Finding:
    remedy = "mount the cgroup file systems (cgroup2 on /sys/fs/cgroup), writable for root"
    try:
        hierarchy = _freezing_hierarchy()
        if hierarchy is None:
            return Finding(name="freezer", ok=False, found="no cgroup tree with a freezer is mounted", remedy=remedy)
        with _sleeper_in_a_group(hierarchy) as group, Freezer(group, hierarchy=hierarchy) as freezer:
            with freezer.frozen() as freeze:
                pass
            thawed = not freezer.is_frozen()
    except (OSError, SnapshotError) as error:
        return Finding(name="freezer", ok=False, found=f"cannot be tried: {error}", remedy=remedy)
    where = f"cgroup version {hierarchy.version} at {hierarchy.mount_point}"
    if freeze.held and thawed:
        found = f"a process was held for {freeze.frozen_ms:.1f} ms and went on; {where}"
        return Finding(name="freezer", ok=True, found=found)
    found = f"{freeze.reason or 'the process did not stand still, or did not go on'}; {where}"
    return Finding(
        name="freezer", ok=False, found=found, remedy="look for another program that freezes or moves cgroups"
    )


def _freezing_hierarchy() -> Hierarchy | None:
    able = [tree for tree in hierarchies() if tree.version == 2 or "freezer" in tree.controllers]
    return min(able, key=lambda tree: tree.version, default=None)


@contextmanager
def _sleeper_in_a_group(hierarchy: Hierarchy) -> Iterator[str]:
    """Name of a new cgroup with one process of ours in it; both are gone afterwards."""
    group = f"/orchestrator-doctor-{os.getpid()}"
    directory = hierarchy.directory(group)
    directory.mkdir()
    try:
        with subprocess.Popen(["/bin/sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as sleeper:
            try:
                (directory / "cgroup.procs").write_text(str(sleeper.pid), encoding="ascii")
                yield group
            finally:
                sleeper.kill()
    finally:
        directory.rmdir()


def _helpers(data_dir: Path) -> Finding:
    remedy = "run deploy/helpers"
    faults, places = [], set()
    for name in HELPERS:
        places_of_one = [place / name for place in (data_dir / "bin", HELPERS_DIR)]
        path = next((path for path in places_of_one if path.exists()), places_of_one[-1])
        places.add(str(path.parent))
        fault = host.fault_of_static_program(path)
        if fault:
            faults.append(f"{path} {fault}")
    if faults:
        return Finding(name="helpers", ok=False, found="; ".join(faults), remedy=remedy)
    return Finding(name="helpers", ok=True, found=f"{', '.join(HELPERS)} in {' and '.join(sorted(places))}")


def _data_directory(data_dir: Path) -> Finding:
    name = "data directory"
    try:
        found = data_dir.stat()
    except FileNotFoundError:
        return Finding(name=name, ok=True, found=f"{data_dir}: will be made")
    except OSError as error:
        found_text = f"{data_dir}: {error.strerror}"
        return Finding(name=name, ok=False, found=found_text, remedy="choose another with --data-dir")
    mode = stat.S_IMODE(found.st_mode)
    text = f"{data_dir}: owner uid {found.st_uid}, mode {mode:04o}"
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return Finding(name=name, ok=False, found=text, remedy="choose another with --data-dir")
    if mode & 0o077:
        return Finding(name=name, ok=False, found=text, remedy=f"run: chmod 0700 {data_dir}")
    return Finding(name=name, ok=True, found=text)


def _criu() -> Finding:
    try:
        version = probe.works()
    except (OSError, SnapshotError) as error:
        remedy = "run deploy/criu; `driver: overlay` does not need it"
        return Finding(name="criu", ok=None, found=f"processes are not captured: {error}", remedy=remedy, needed=False)
    found = f"CRIU {version} in {DEFAULT_PREFIX}: a round trip passed twice"
    if "SYS_RESOURCE" in host.missing_capabilities(also={"SYS_RESOURCE": 24}):
        found += "; root lacks CAP_SYS_RESOURCE, so processes of other users are not captured"
    return Finding(name="criu", ok=True, found=found, needed=False)


def _git() -> Finding:
    place = shutil.which("git", path=GIT_PATH)
    if place is None:
        remedy = "install git (deploy/packages git); only `driver: git` needs it"
        return Finding(name="git", ok=None, found=f"not in {GIT_PATH}", remedy=remedy, needed=False)
    return Finding(name="git", ok=True, found=f"{place}, for `driver: git`", needed=False)
