"""A plain container of the engine with a volume and a tmpfs, driven by the overlay driver; no orchestrator code."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import docker.errors

from snapshot_drivers import beneath
from snapshot_drivers.base import Mount, Snapshot, StateKind, Target
from snapshot_drivers.overlay.driver import OverlayDriver
from snapshot_drivers.overlay.layers import containerd_mount_point, find_layers, mounted_layers
from snapshot_drivers.removal import remove
from tests.built_helpers import built_helpers
from tests.contract.suite import Subject
from tests.groups import remove_groups
from tests.tree_walker import ENGINE_OWNED, walk

IMAGES = ("orchestrator-base:latest",)


class OverlaySubject(Subject):
    """See ``Subject``. ``volume``: mounted on /vol; a tmpfs on /tm."""

    pristine: Snapshot
    tracker_from_entries: int | None = None
    """``None``: every entry is looked at in every capture."""
    _seen: tuple[Path | None, tuple[Path, ...]] = (None, ())

    def __init__(self, directory: Path, image: str = IMAGES[0]) -> None:
        self.client = docker.from_env()
        self.name = f"contract-{uuid.uuid4().hex[:12]}"
        self.directory = directory
        self.driver = OverlayDriver(self._install_helpers() / "store", tracker_from_entries=self.tracker_from_entries)
        self._client_api: Any = self.client.api
        self.client.volumes.create(self.name)
        common: dict[str, Any] = {
            "image": image,
            "entrypoint": ["/.init", "hold", "65533"],
            "user": "65533:65533",
            "detach": True,
            "volumes": {str(directory / "bin/launch"): {"bind": "/.init", "mode": "ro"}},
            "cgroup_parent": f"/orchestrator/{self.name}",
        }
        self.holder = self.client.containers.run(name=f"{self.name}-net", network_mode="none", **common)
        common["volumes"] = {**common["volumes"], self.name: {"bind": "/vol", "mode": "rw"}}
        self.container = self.client.containers.run(
            name=self.name,
            network_mode=f"container:{self.holder.id}",
            tmpfs={"/tm": "size=64m,mode=1777"},
            cap_drop=["MKNOD"],
            **common,
        )
        self.sh("mkdir -p /w")

    def _install_helpers(self) -> Path:
        shutil.copytree(built_helpers(), self.directory / "bin")
        return self.directory

    def close(self) -> None:
        self.driver.close()
        self.empty_out()
        for container in (self.container, self.holder):
            with contextlib.suppress(docker.errors.APIError):
                container.remove(force=True, v=True)
        with contextlib.suppress(docker.errors.APIError):
            self.client.volumes.get(self.name).remove()
        remove_groups(f"/orchestrator/{self.name}")
        self.client.close()

    def empty_out(self) -> None:
        """The engine cannot remove a tree that is too deep for its descriptors, or that holds something immutable."""
        places = [self.upper, *(mount.source for mount in self.target().mounts if mount.source is not None)]
        self.kill()
        for place in places:
            with beneath.closing(os.open(place, os.O_RDONLY | os.O_DIRECTORY)) as root:
                for name, _ in beneath.list_directory(root):
                    remove(root, name)

    @property
    def upper(self) -> Path:
        return find_layers(self.target()).upper

    def _layers_hint(self, engine_root: Path) -> tuple[Path | None, tuple[Path, ...]]:
        """With containerd's image store only the mount of a running container tells."""
        data = self.container.attrs["GraphDriver"]["Data"]
        if data is not None:
            return Path(data["UpperDir"]), ()
        seen = mounted_layers(containerd_mount_point(engine_root, self.container.id))
        self._seen = seen or self._seen
        return self._seen

    @property
    def root(self) -> str:
        self.container.reload()
        return f"/proc/{self.container.attrs['State']['Pid']}/root"

    def target(self) -> Target:
        self.container.reload()
        attrs = self.container.attrs
        image = self.client.images.get(attrs["Image"]).attrs
        info = self.client.info()
        engine_root = Path(info["DockerRootDir"])
        upper, lower = self._layers_hint(engine_root)
        return Target(
            run_id="contract",
            container_id=attrs["Id"],
            init_pid=attrs["State"]["Pid"] or None,
            engine_root=engine_root,
            storage_driver=info["Driver"],
            upper_hint=upper,
            lower_hint=lower,
            freeze_group=f"/orchestrator/{self.name}",
            image_id=attrs["Image"],
            layer_ids=tuple(image["RootFS"]["Layers"]),
            architecture=image["Architecture"],
            mounts=(
                Mount(StateKind.VOLUME, "/vol", engine_root / "volumes" / self.name / "_data", self.name),
                Mount(StateKind.TMPFS, "/dev", None),
                Mount(StateKind.TMPFS, "/tm", None),
                Mount(StateKind.TMPFS, "/dev/shm", None),
            ),
            etc_files=(
                ("/etc/hosts", Path(attrs["HostsPath"])),
                ("/etc/resolv.conf", Path(attrs["ResolvConfPath"])),
                ("/etc/hostname", Path(attrs["HostnamePath"])),
            ),
            etc_is_new=False,
            lifecycle=self,
        )

    def kill(self) -> None:
        """See ``Lifecycle``."""
        with contextlib.suppress(docker.errors.APIError):
            self.container.kill()
        self.container.wait()

    def start(self) -> int:
        """See ``Lifecycle``."""
        self.container.start()
        self.container.reload()
        return int(self.container.attrs["State"]["Pid"])

    def sh(self, command: str) -> str:
        code, output = self.container.exec_run(["sh", "-c", command], user="0", environment={"R": ""})
        assert code == 0, output
        return str(output.decode("utf-8", "surrogateescape"))

    def spawn(self, command: str) -> None:
        """Runs a command in the background; it must daemonise or redirect by itself."""
        self.container.exec_run(["sh", "-c", command], user="0", detach=True)
        time.sleep(0.3)

    def tree(self) -> list[str]:
        others = (b"/shm", b"/pts", b"/mqueue")  # mounts of their own
        dev = [line for line in walk(f"{self.root}/dev", others) if not line.startswith("b'/console'")]
        return walk(self.root, ENGINE_OWNED) + dev + walk(f"{self.root}/dev/shm") + walk(f"{self.root}/etc", [])

    def reopen(self) -> None:
        self.driver.close()
        self.driver = OverlayDriver(self.directory / "store", tracker_from_entries=self.tracker_from_entries)

    def damage_content(self) -> None:
        for pack in (self.directory / "store/packs").glob("*.pack"):
            data = bytearray(pack.read_bytes())
            for position in range(8, len(data) - 200, 50):
                data[position] ^= 1
            pack.write_bytes(data)


class TrackedOverlaySubject(OverlaySubject):
    """One whose captures and restores go by what a tracker reports."""

    tracker_from_entries = 0


@contextlib.contextmanager
def overlay_subject(
    directory: Path, image: str = IMAGES[0], kind: type[OverlaySubject] = OverlaySubject
) -> Iterator[OverlaySubject]:
    """A running subject, removed afterwards."""
    subject = kind(directory, image)
    try:
        yield subject
    finally:
        subject.close()


def is_engine_there() -> bool:
    """True when the engine answers and the base image is there."""
    try:
        client = docker.from_env()
        return bool(client.images.list(IMAGES[0]))
    except (docker.errors.DockerException, OSError):
        return False


def assert_ci_has_engine() -> None:
    """In CI an absent engine is a failure, not a reason to skip."""
    assert not os.environ.get("CI"), "the engine or the base image is missing in CI"
