"""The connection to the container engine and the border at which the Docker SDK's exceptions end.

The SDK is imported when a connection is made, not before: commands that need no engine start fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from orchestrator.errors import HostError
from snapshot_drivers.errors import ContainerNotRunning, EngineError

if TYPE_CHECKING:
    from docker import APIClient

T = TypeVar("T")

DEFAULT_URL: Final = "unix:///var/run/docker.sock"

_REQUEST_S: Final = 60
_NOT_RUNNING: Final = ("is not running", "is paused")


class NoSuchObject(EngineError):
    """The engine has no container, image or volume of that name."""


class Unreachable(EngineError):
    """The engine did not answer at all."""


class RemovalUnderWay(EngineError):
    """Somebody else is removing it."""


class EngineConnection:
    """A connection to one engine. May be used from several threads."""

    request_s: ClassVar[int] = _REQUEST_S
    """How long the engine may be silent."""

    def __init__(self, api: APIClient) -> None:
        from docker.errors import DockerException, NotFound
        from requests.exceptions import ConnectionError as NoConnection
        from requests.exceptions import RequestException, Timeout

        self._api = api
        self._not_found = NotFound
        self._no_answer = (NoConnection, Timeout)
        self._foreign = (DockerException, RequestException, OSError)

    @classmethod
    def connect(cls, base_url: str | None = None) -> Self:
        """An engine answers at ``base_url`` (``None``: the local socket).

        Raises: HostError: none does.
        """
        from docker import APIClient
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        url = base_url or DEFAULT_URL
        try:
            return cls(APIClient(base_url=url, version="auto", timeout=cls.request_s))
        except (DockerException, RequestException, OSError, ValueError) as error:
            raise HostError(
                f"no container engine answers at {url} ({_reason(error)}): start it (systemctl start docker), "
                "run as a user who may use it, or see: orchestrator doctor"
            ) from error

    def close(self) -> None:
        """The connections are closed."""
        self._api.close()

    def _gone(self, doing: str, function: Callable[..., object], *args: Any, **options: Any) -> None:
        """Something was removed, or was not there."""
        try:
            self._call(doing, function, *args, **options)
        except NoSuchObject:
            return

    def _read(self, doing: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """A request that changes nothing: repeated while the engine does not answer (it may be restarting)."""
        for attempt in Retrying(
            retry=retry_if_exception_type(Unreachable),
            stop=stop_after_attempt(3),
            wait=wait_exponential(multiplier=0.2),
            reraise=True,
        ):
            with attempt:
                return self._call(doing, function, *args, **options)
        raise AssertionError("tenacity ends with an answer or an exception")

    def _call(self, doing: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        try:
            return function(*args, **options)
        except self._foreign as error:
            raise self._translated(doing, error) from error

    def _each(self, doing: str, stream: Iterable[T]) -> Iterator[T]:
        try:
            yield from stream
        except self._foreign as error:
            raise self._translated(doing, error) from error

    def _translated(self, doing: str, error: Exception) -> EngineError:
        reason = _reason(error)
        message = f"the engine could not {doing}: {reason}"
        if isinstance(error, self._no_answer):
            return Unreachable(f"{message}: is it running? See: orchestrator doctor")
        if any(text in reason for text in _NOT_RUNNING):
            return ContainerNotRunning(message)
        if "already in progress" in reason:
            return RemovalUnderWay(message)
        return NoSuchObject(message) if isinstance(error, self._not_found) else EngineError(message)


def _reason(error: Exception) -> str:
    """The engine's own words, else the exception's."""
    return str(getattr(error, "explanation", None) or error)
