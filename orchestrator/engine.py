"""The one gateway to the container engine: every request that the product makes of it.

Foreign exceptions end in ``engine_connection``: ``HostError`` where there is no usable engine or image, ``EngineError``
where the engine refused or failed. Only requests that change nothing are repeated.

Source: Docker Engine API v1.41.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict

from orchestrator.container_config import LABEL_DATA_DIR, LABEL_ROLE, LABEL_RUN, ImageFacts
from orchestrator.engine_connection import EngineConnection, NoSuchObject, RemovalUnderWay, Unreachable
from orchestrator.engine_stream import AttachedStream, ExecStream
from orchestrator.errors import HostError
from snapshot_drivers.commit.engine import snapshot_of
from snapshot_drivers.errors import ContainerNotRunning

if TYPE_CHECKING:
    from docker import APIClient

__all__ = ["HELD_IMAGES", "Engine", "EngineFacts", "NoSuchObject", "OurContainer", "Unreachable"]

HELD_IMAGES: Final = "orchestrator-run"
"""Repository of the tags that keep the images of runs from being removed."""

_STOP_S: Final = 30
_RUNS: Final = ("running", "paused", "restarting")
_BUILD_S: Final = 3600


class EngineFacts(BaseModel):
    """What kind of engine this is."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    version: str
    api_version: str
    data_root: str
    storage_driver: str
    cgroup_version: str
    """``1`` or ``2``."""
    cgroup_driver: str
    """``cgroupfs``, ``systemd`` or ``none``."""
    runc_version: str | None
    security_options: tuple[str, ...]
    architecture: str


class OurContainer(NamedTuple):
    """A container that carries our labels."""

    container_id: str
    name: str
    run_id: str
    role: str
    data_dir: str
    running: bool


class Engine(EngineConnection):
    """What the product asks of an engine."""

    def __init__(self, api: APIClient) -> None:
        super().__init__(api)
        self._facts: EngineFacts | None = None

    def facts(self) -> EngineFacts:
        """What kind of engine this is; asked once.

        Raises: EngineError.
        """
        if self._facts is None:
            version = self._read("ask for the engine's version", self._api.version)
            info = self._read("ask for the engine's set-up", self._api.info)
            parts = {part.get("Name"): part.get("Version") for part in version.get("Components") or ()}
            self._facts = EngineFacts(
                version=version["Version"],
                api_version=version["ApiVersion"],
                data_root=info["DockerRootDir"],
                storage_driver=info["Driver"],
                cgroup_version=info.get("CgroupVersion") or "1",
                cgroup_driver=info.get("CgroupDriver") or "none",
                runc_version=parts.get("runc"),
                security_options=tuple(info.get("SecurityOptions") or ()),
                architecture=info["Architecture"],
            )
        return self._facts

    def image(self, reference: str, *, pull: bool = False) -> ImageFacts:
        """The image of that name or id; ``pull``: fetched when it is not here.

        Raises: HostError: it is nowhere. EngineError.
        """
        try:
            found = self._read(f"look at image {reference}", self._api.inspect_image, reference)
        except NoSuchObject as error:
            if not pull:
                raise HostError(f"image {reference} is not on this engine: build or pull it first") from error
            self._pull(reference)
            return self.image(reference)
        return ImageFacts(
            image_id=found["Id"],
            layer_ids=tuple(found["RootFS"].get("Layers") or ()),
            architecture=found["Architecture"],
            volumes=tuple(sorted({posixpath.normpath(path) for path in found["Config"].get("Volumes") or ()})),
        )

    def build(self, context: Path, dockerfile: str, args: dict[str, str], tag: str) -> ImageFacts:
        """The image built from a context directory, tagged; its build output only shows in an error.

        Raises: HostError: the build failed.
        """
        lines: list[str] = []
        stream = self._call(
            f"build {context}",
            self._api.build,
            path=str(context),
            dockerfile=dockerfile,
            buildargs=args,
            tag=tag,
            rm=True,
            forcerm=True,
            decode=True,
            timeout=_BUILD_S,
        )
        for message in self._each(f"build {context}", stream):
            lines += str(message.get("stream", "")).splitlines()
            if "error" in message:
                raise HostError("\n".join([f"building {context} failed: {message['error']}", *lines[-20:]]))
        return self.image(tag)

    def hold_image(self, image_id: str, run_id: str) -> None:
        """The image stays until ``release_image``, whatever else is removed. Repeatable.

        Raises: EngineError.
        """
        self._call(f"tag image {image_id}", self._api.tag, image_id, HELD_IMAGES, run_id)

    def release_image(self, run_id: str) -> None:
        """The run's tag is gone; the image goes with it if nothing else names it. Repeatable.

        Raises: EngineError.
        """
        self._gone("remove the run's image tag", self._api.remove_image, f"{HELD_IMAGES}:{run_id}")

    def create(self, name: str, request: dict[str, Any]) -> str:
        """A new container's id.

        Raises: EngineError: also when the name is taken.
        """
        answer = self._call(f"create container {name}", self._api.create_container_from_config, request, name)
        return str(answer["Id"])

    def start(self, container: str) -> None:
        """It runs. Repeatable.

        Raises: EngineError.
        """
        self._call(f"start container {container}", self._api.start, container)

    def kill(self, container: str) -> None:
        """It was sent SIGKILL and does not run any more. Repeatable. Raises: EngineError: see ``wait_for_end``."""
        try:
            self._call(f"kill container {container}", self._api.kill, container)
        except ContainerNotRunning:
            return
        self.wait_for_end(container)

    def wait_for_end(self, container: str, *, timeout_s: int = _STOP_S) -> None:
        """It does not run any more. Raises: EngineError: it still runs after that time, or is not there."""
        self._call(f"wait for the end of container {container}", self._api.wait, container, timeout=timeout_s)

    def remove(self, container: str) -> None:
        """Container and anonymous volumes are gone. Repeatable.

        Raises: EngineError.
        """
        doing = f"remove container {container}"
        try:
            self._gone(doing, self._api.remove_container, container, v=True, force=True)
        except RemovalUnderWay:
            deadline = time.monotonic() + _STOP_S
            while self.find(container) is not None:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def rename(self, container: str, name: str) -> None:
        """It has that name.

        Raises: EngineError: also when the name is taken.
        """
        self._call(f"rename container {container} to {name}", self._api.rename, container, name)

    def inspect(self, container: str) -> dict[str, Any]:
        """What the engine knows of a container.

        Raises: NoSuchObject. EngineError.
        """
        return dict(self._read(f"look at container {container}", self._api.inspect_container, container))

    def find(self, container: str) -> dict[str, Any] | None:
        """Like ``inspect``; ``None`` when there is none.

        Raises: EngineError.
        """
        try:
            return self.inspect(container)
        except NoSuchObject:
            return None

    def add_archive(self, container: str, archive: bytes) -> None:
        """A tar archive was unpacked in the container's root.

        Raises: EngineError.
        """
        self._call(f"write into container {container}", self._api.put_archive, container, "/", archive)

    @contextmanager
    def looking_into(self, container: str) -> Iterator[None]:
        """While the block runs, the engine has the container's root mounted, whether it runs or not.

        Raises: EngineError.
        """
        chunks, _ = self._read(f"look into container {container}", self._api.get_archive, container, "/")
        try:
            yield
        finally:
            chunks.close()

    def has_path(self, container: str, path: str) -> bool:
        """Something stands at ``path`` in the container, running or not.

        Raises: EngineError.
        """
        try:
            chunks, _ = self._read(f"look for {path} in {container}", self._api.get_archive, container, path)
        except NoSuchObject:
            return False
        chunks.close()
        return True

    def exec_create(self, container: str, argv: list[str], *, user: str, env: dict[str, str]) -> str:
        """Id of a command that ``exec_start`` will run in the container, below the root directory.

        Raises: ContainerNotRunning: stopped, paused or gone. EngineError.
        """
        answer = self._call(
            f"run a command in container {container}",
            self._api.exec_create,
            container,
            argv,
            user=user,
            environment=env,
            workdir="/",
        )
        return str(answer["Id"])

    def exec_start(self, exec_id: str) -> ExecStream:
        """The command runs; its output comes from the stream. The caller closes it.

        Raises: EngineError: it was not started.
        """
        return ExecStream(self._call("start a command", self._api.exec_start, exec_id, socket=True))

    def exec_attached(
        self, container: str, argv: list[str], *, user: str, env: dict[str, str], workdir: str, terminal: bool
    ) -> tuple[str, AttachedStream]:
        """A command that the operator talks to runs; its id, and both directions of its talk. The caller closes it.

        Raises: ContainerNotRunning. EngineError.
        """
        doing = f"run a command in container {container}"
        options = {"user": user, "environment": env, "workdir": workdir, "stdin": True, "tty": terminal}
        exec_id = str(self._call(doing, self._api.exec_create, container, argv, **options)["Id"])
        answer = self._call(doing, self._api.exec_start, exec_id, socket=True, tty=terminal)
        return exec_id, AttachedStream(answer, framed=not terminal)

    def exec_resize(self, exec_id: str, *, rows: int, columns: int) -> None:
        """The terminal of a running command has that size.

        Raises: EngineError.
        """
        self._call("resize a terminal", self._api.exec_resize, exec_id, height=rows, width=columns)

    def exec_exit_code(self, exec_id: str) -> int | None:
        """Exit code of an ended command; ``None`` while it runs.

        Raises: EngineError.
        """
        code = self._read("look at a command", self._api.exec_inspect, exec_id)["ExitCode"]
        return None if code is None else int(code)

    def create_volume(self, name: str, labels: dict[str, str]) -> None:
        """A local volume of that name and those labels exists. Repeatable.

        Raises: HostError: a volume of that name is somebody else's. EngineError.
        """
        answer = self._call(f"create volume {name}", self._api.create_volume, name, labels=labels)
        found = answer.get("Labels") or {}
        if any(found.get(label) != labels[label] for label in (LABEL_RUN, LABEL_DATA_DIR)):
            raise HostError(f"volume {name} exists and belongs to another run: remove it (docker volume rm {name})")

    def volume(self, name: str) -> dict[str, Any] | None:
        """What the engine knows of a volume; ``None`` when there is none.

        Raises: EngineError.
        """
        try:
            return dict(self._read(f"look at volume {name}", self._api.inspect_volume, name))
        except NoSuchObject:
            return None

    def remove_volume(self, name: str) -> None:
        """It is gone. Repeatable.

        Raises: EngineError: also when a container still uses it.
        """
        self._gone(f"remove volume {name}", self._api.remove_volume, name)

    def users_of_volume(self, name: str) -> dict[str, bool]:
        """Names of all containers that mount the volume, and whether each runs.

        Raises: EngineError.
        """
        found = self._read("list containers", self._api.containers, all=True, filters={"volume": name})
        return {_name(item): item["State"] in _RUNS for item in found}

    def list_ours(self, *, run_id: str | None = None, data_dir: Path | None = None) -> list[OurContainer]:
        """Containers with our labels, of one run or data directory if given, running or not.

        Raises: EngineError.
        """
        filters = {"label": _label_filters(run_id, data_dir)}
        found = self._read("list containers", self._api.containers, all=True, filters=filters)
        return [
            OurContainer(
                container_id=item["Id"],
                name=_name(item),
                run_id=item["Labels"].get(LABEL_RUN, ""),
                role=item["Labels"].get(LABEL_ROLE, ""),
                data_dir=item["Labels"].get(LABEL_DATA_DIR, ""),
                running=item["State"] in _RUNS,
            )
            for item in found
        ]

    def list_our_volumes(self, *, run_id: str | None = None, data_dir: Path | None = None) -> list[str]:
        """Names of volumes with our labels, of one run or data directory if given.

        Raises: EngineError.
        """
        filters = {"label": _label_filters(run_id, data_dir)}
        answer = self._read("list volumes", self._api.volumes, filters=filters)
        return [str(volume["Name"]) for volume in answer.get("Volumes") or ()]

    def list_our_image_tags(self, *, run_id: str, data_dir: Path) -> list[str]:
        """Names of the images that snapshots of containers with these labels are.

        Raises: EngineError.
        """
        filters = {"label": _label_filters(run_id, data_dir)}
        found = self._read("list images", self._api.images, filters=filters)
        return [str(tag) for image in found for tag in image.get("RepoTags") or () if snapshot_of(tag) is not None]

    def remove_image(self, tag: str) -> None:
        """The image has that name no more, and is gone where nothing else needs it. Repeatable.

        Raises: EngineError.
        """
        self._gone(f"remove image {tag}", self._api.remove_image, tag)

    def _pull(self, reference: str) -> None:
        name = reference if ":" in reference.rsplit("/", 1)[-1] or "@" in reference else f"{reference}:latest"
        doing = f"pull image {reference}"
        try:
            for message in self._each(doing, self._call(doing, self._api.pull, name, stream=True, decode=True)):
                if "error" in message:
                    raise HostError(f"image {reference} cannot be pulled: {message['error']}: build it yourself")
        except NoSuchObject as error:
            raise HostError(f"image {reference} is neither here nor in its registry: build it first") from error


def _label_filters(run_id: str | None, data_dir: Path | None) -> list[str]:
    filters = [LABEL_RUN if run_id is None else f"{LABEL_RUN}={run_id}"]
    return filters if data_dir is None else [*filters, f"{LABEL_DATA_DIR}={data_dir}"]


def _name(item: dict[str, Any]) -> str:
    return str(item["Names"][0]).removeprefix("/") if item["Names"] else str(item["Id"])
