"""The gateway to an engine for those who look at a container from outside: its images, and nothing of its host.

Every request goes over the API, so the engine may be anywhere. Source: Docker Engine API v1.41.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from snapshot_drivers.errors import ContainerNotRunning, EngineError, UnsupportedHost
from snapshot_drivers.pieces import PieceFile

if TYPE_CHECKING:
    from docker import APIClient

T = TypeVar("T")

DEFAULT_ENGINE: Final = "unix:///var/run/docker.sock"
REPOSITORY: Final = "orchestrator-snapshot"
"""Of the tags that keep the images of snapshots."""
FLAT: Final = "-flat"
"""Ends the tag of a snapshot's image of which the layers were put together."""
_HOUR_S: Final = 3600


def snapshot_of(tag: str) -> str | None:
    """The snapshot that an image of that name keeps; ``None``: none."""
    repository, _, name = tag.rpartition(":")
    return name.removesuffix(FLAT) if repository == REPOSITORY else None


class NoImage(EngineError):
    """The engine has no such image or container."""


class Image(NamedTuple):
    """One image."""

    image_id: str
    layer_ids: tuple[str, ...]
    """Lowest first."""
    tags: tuple[str, ...]
    size: int
    """Bytes of all its layers."""


class ImageEngine:
    """Images of one engine. Connects at the first request."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connected: APIClient | None = None

    def close(self) -> None:
        """The connection is closed. Repeatable."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def commit(self, container_id: str, tag: str) -> str:
        """Id of a new image of the container's files, which stood still meanwhile. Its tag: ``REPOSITORY``:``tag``.

        Raises: ContainerNotRunning: it is gone. EngineError.
        """
        doing = f"commit container {container_id[:12]}"
        try:
            answer = self._call(doing, lambda api: api.commit(container_id, REPOSITORY, tag, pause=True))
        except NoImage as error:
            raise ContainerNotRunning(str(error)) from error
        return str(answer["Id"])

    def image(self, reference: str) -> Image:
        """What the engine knows of an image. Raises: NoImage. EngineError."""
        found = self._call(f"look at image {reference}", lambda api: api.inspect_image(reference))
        layers = tuple(found["RootFS"].get("Layers") or ())
        return Image(found["Id"], layers, tuple(found.get("RepoTags") or ()), int(found["Size"]))

    def image_of(self, container_id: str) -> str:
        """Id of the image on which a container was made. Raises: NoImage. EngineError."""
        doing = f"look at container {container_id[:12]}"
        return str(self._call(doing, lambda api: api.inspect_container(container_id))["Image"])

    def changes(self, container_id: str) -> list[tuple[str, int]]:
        """Paths that differ from the container's image: 0 changed, 1 added, 2 deleted. Raises: NoImage. EngineError."""
        found = self._call(f"list changes of {container_id[:12]}", lambda api: api.diff(container_id)) or []
        return [(str(change["Path"]), int(change["Kind"])) for change in found]

    def processes(self, container_id: str) -> list[str]:
        """Command lines of what runs in a container, with the host's process ids in front. Raises: EngineError."""
        doing = f"list processes of {container_id[:12]}"
        found = self._call(doing, lambda api: api.top(container_id, ps_args="-eo pid,args"))
        return [" ".join(row) for row in found.get("Processes") or ()]

    def remove(self, reference: str) -> None:
        """The name is gone, and the image with it where nothing else needs it. Repeatable. Raises: EngineError."""
        try:
            self._call(f"remove image {reference}", lambda api: api.remove_image(reference))
        except NoImage:
            return

    def saved(self, reference: str) -> Iterator[tuple[str, IO[bytes]]]:
        """Names and content of the files of a saved image, in the engine's order. Raises: NoImage. EngineError."""
        doing = f"save image {reference}"
        pieces = self._call(doing, lambda api: api.get_image(reference))
        yield from self._files(doing, pieces)

    def load(self, archive: Iterable[bytes]) -> None:
        """The images of a saved archive are on the engine. Raises: EngineError: it refused them."""
        doing = "load an image"
        for answer in self._each(doing, self._call(doing, lambda api: api.load_image(archive))):
            if "error" in answer:
                raise EngineError(f"the engine could not load an image: {answer['error']}")

    def read_file(self, image_id: str, path: str) -> Iterator[bytes] | None:
        """Content of a regular file in an image, in pieces; ``None``: there is none. Raises: NoImage. EngineError."""
        request = {"Image": image_id, "Cmd": ["-"], "HostConfig": {"NetworkMode": "none"}}
        made = self._call(f"look into image {image_id}", lambda api: api.create_container_from_config(request))
        pieces = self._pieces_of(str(made["Id"]), path)
        first = next(pieces, None)
        return None if first is None else _chained(first, pieces)

    def _pieces_of(self, container_id: str, path: str) -> Iterator[bytes]:
        """Nothing at all where there is no such file; at least one piece else. The container is gone at the end."""
        doing = f"read {path} of an image"
        try:
            try:
                stream, _ = self._call(doing, lambda api: api.get_archive(container_id, path))
            except NoImage:
                return
            for _, content in self._files(doing, stream, only_first=True):
                yield b""
                while piece := content.read(1 << 20):
                    yield piece
        finally:
            self._call("remove a container", lambda api: api.remove_container(container_id, v=True, force=True))

    def _files(
        self, doing: str, pieces: Iterable[bytes], *, only_first: bool = False
    ) -> Iterator[tuple[str, IO[bytes]]]:
        try:
            with tarfile.open(fileobj=cast("IO[bytes]", PieceFile(self._each(doing, pieces))), mode="r|") as tar:
                for member in tar:
                    content = tar.extractfile(member) if member.isreg() else None
                    if content is not None:
                        yield member.name, content
                    if only_first:
                        return
        except tarfile.TarError as error:
            raise EngineError(f"the engine could not {doing}: what it sent is no tar file: {error}") from error

    def _call(self, doing: str, request: Callable[[Any], T]) -> T:
        from docker import APIClient

        with self._translated(doing):
            if self._connected is None:
                self._connected = APIClient(base_url=self._url, version="auto", timeout=_HOUR_S)
            return request(self._connected)

    def _each(self, doing: str, pieces: Iterable[T]) -> Iterator[T]:
        with self._translated(doing):
            yield from pieces

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Foreign exceptions end here."""
        from docker.errors import DockerException, NotFound
        from requests.exceptions import RequestException

        try:
            yield
        except NotFound as error:
            raise NoImage(f"the engine could not {doing}: {error.explanation}") from error
        except (DockerException, RequestException, OSError, ValueError) as error:
            reason = getattr(error, "explanation", None) or error
            if self._connected is None:
                raise UnsupportedHost(f"no engine answers at {self._url}: {reason}") from error
            raise EngineError(f"the engine could not {doing}: {reason}") from error


def _chained(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from rest
