"""A container started with plain Docker as the product would start it, for tests of the lower layer alone."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest

from snapshot_drivers.base import Target
from snapshot_drivers.freezer import Freezer
from tests.built_helpers import built_helpers
from tests.groups import remove_groups

REPOSITORY = Path(__file__).parents[2]
IMAGES = ("orchestrator-base:latest", "base:test")


class NoLifecycle:
    """These tests neither kill nor start through the driver's contract."""

    def kill(self) -> None:
        raise NotImplementedError

    def start(self) -> int:
        raise NotImplementedError


@dataclass(frozen=True)
class PlainContainer:
    name: str
    group: str
    handle: Any
    engine_root: Path

    @property
    def container_id(self) -> str:
        return str(self.handle.id)

    @property
    def init_pid(self) -> int:
        self.handle.reload()
        return int(self.handle.attrs["State"]["Pid"])

    def target(self) -> Target:
        attrs = self.handle.attrs
        return Target(
            run_id=self.name,
            container_id=self.container_id,
            init_pid=self.init_pid,
            engine_root=self.engine_root,
            storage_driver=attrs["Driver"],
            upper_hint=Path(data["UpperDir"]) if (data := attrs["GraphDriver"]["Data"]) else None,
            freeze_group=self.group,
            image_id=attrs["Image"],
            layer_ids=(),
            architecture="amd64",
            mounts=(),
            etc_files=(),
            etc_is_new=False,
            lifecycle=NoLifecycle(),
        )

    def run(self, command: str, *, user: str = "root") -> tuple[int, str]:
        """Exit code and output of a shell command in the container."""
        ended = self.handle.exec_run(["/bin/sh", "-c", command], user=user)
        return ended.exit_code, ended.output.decode(errors="replace")

    def must(self, command: str) -> str:
        code, output = self.run(command)
        assert code == 0, output
        return output

    def leave_running(self, command: str) -> None:
        self.handle.exec_run(["/bin/sh", "-c", command], user="root", detach=True)


def engine() -> Any:
    """A client of the engine; skips the test where there is none."""
    try:
        client = docker.from_env()
        client.ping()
    except docker.errors.DockerException as error:
        pytest.skip(f"no container engine answers: {error}")
    return client


@contextmanager
def plain_container(kind: str, **options: Any) -> Iterator[PlainContainer]:
    """A running container in a parent cgroup of its own; both are gone afterwards."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    client = engine()
    name = f"pchk-{kind}-{secrets.token_hex(3)}"
    slices = client.info()["CgroupDriver"] == "systemd"
    group = f"orchestrator-{name.replace('-', '')}.slice" if slices else f"/orchestrator/{name}"
    image = options.pop("image", None) or next(tag for tag in IMAGES if client.images.list(tag))
    settings: dict[str, Any] = {
        "entrypoint": ["/.init", "hold", "65533"],
        "user": "65533:65533",
        "volumes": {str(built_helpers() / "launch"): {"bind": "/.init", "mode": "ro"}},
        "cgroup_parent": group,
        "network_mode": "none",
        "cap_drop": ["MKNOD"],
    }
    handle = client.containers.run(image, name=name, detach=True, **{**settings, **options})
    try:
        handle.reload()
        yield PlainContainer(name, group, handle, Path(client.info()["DockerRootDir"]))
    finally:
        Freezer.thaw_group(group)
        handle.remove(force=True, v=True)
        remove_groups(group)


@contextmanager
def below_another_root() -> Iterator[PlainContainer]:
    """A container with a tmpfs on ``/fast``, whose first process has changed its root to ``/fake``."""
    hostile = "mkdir '/fake'; mkdir '/fake/fast'; chroot '/fake' or die; chdir '/'; sleep 100000"
    options = {"entrypoint": ["perl", "-e", hostile], "command": [], "user": "root", "tmpfs": {"/fast": ""}}
    with plain_container("chroot", **options) as container:
        pid = container.init_pid
        while not os.readlink(f"/proc/{pid}/root").endswith("/fake"):
            assert Path(f"/proc/{pid}").exists()
        yield container


def build_enter(directory: Path) -> Path:
    """The helper, built from the source tree."""
    if shutil.which("make") is None or shutil.which("gcc") is None:
        pytest.skip("needs make and a C compiler")
    built = directory / "enter"
    subprocess.run(["make", "-s", "-C", REPOSITORY / "images" / "enter", f"OUT={built}"], check=True)
    return built
