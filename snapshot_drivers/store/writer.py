"""One pack in the making."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from snapshot_drivers.errors import CaptureError
from snapshot_drivers.store.durable import create_temporary, publish
from snapshot_drivers.store.limits import StoreLimits
from snapshot_drivers.store.locations import Locations
from snapshot_drivers.store.pack import SUFFIX, Body
from snapshot_drivers.tree import digest_of

_CHECK_EVERY_BYTES: Final = 4 << 20


class PackWriter:
    """Takes objects that are not stored yet. After an error of the disk nothing more: the pack would be torn."""

    def __init__(self, directory: Path, pack_id: str, locations: Locations, limits: StoreLimits) -> None:
        """Nothing is written before the first new object. The store's lock is held as long as it lives."""
        self._locations = locations
        self._limits = limits
        self._path = directory / (pack_id + SUFFIX)
        self._pack_id = pack_id
        self._temporary: Path | None = None
        self._file: BinaryIO | None = None
        self._body: Body | None = None
        self._failure: OSError | None = None
        self._checked = 0
        """Bytes of new objects when the limits were last looked at."""
        self.stored_bytes = 0
        """Bytes of new objects so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError):  # it writes what is left, which may be what failed
                self._file.close()
        if self._temporary is not None:
            with suppress(OSError):
                self._temporary.unlink()

    def __contains__(self, digest: bytes) -> bool:
        return (self._body is not None and digest in self._body) or self._locations.find(digest) is not None

    def put(self, data: bytes) -> bytes:
        """Store one object unless the store has it; answers its digest. It can be read back after ``commit``.

        Raises: CaptureError: the disk is full or cannot be written. LimitExceeded.
        """
        digest = digest_of(data)
        if digest in self:
            return digest
        with self._writing():
            if self._body is None or self.stored_bytes - self._checked >= _CHECK_EVERY_BYTES:
                self._check_limits(len(data))
            self._opened().add(digest, data)
        self.stored_bytes += len(data)
        return digest

    def commit(self) -> None:
        """The pack is on the disk under its final name, and its objects are found. An empty one leaves no file.

        Raises: CaptureError: the disk is full or cannot be written.
        """
        with self._writing():
            if self._body is None or self._file is None or self._temporary is None:
                return
            self._check_limits(0)
            places = self._body.finish()
            publish(self._temporary, self._file, self._path)
            self._temporary = None
            self._file.close()
            self._locations.add(self._pack_id, places)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            if self._failure is not None:
                raise self._failure
            yield
        except OSError as error:
            self._failure = error
            raise CaptureError(
                f"cannot store the snapshot below {self._path.parent}: {error.strerror}; see to the disk there"
            ) from error

    def _opened(self) -> Body:
        if self._body is None:
            self._temporary, self._file = create_temporary(self._path)
            self._body = Body(self._file)
        return self._body

    def _check_limits(self, size: int) -> None:
        """Another ``size`` bytes may be added; what was written before has left the disk's free room already."""
        if self._file is not None:
            self._file.flush()
        self._checked = self.stored_bytes
        self._limits.check(self._path.parent, self._locations.stored_bytes() + self.stored_bytes, size)
