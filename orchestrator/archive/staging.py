"""Where an archive is taken in: a directory beside the runs that no reader sees, until its run is moved into place.

A staging directory is locked while it is filled. One that a dead process left is removed by the next.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from orchestrator.context_log import sync_directory
from orchestrator.data_dir import RUNS, DataDir
from orchestrator.errors import HostError, UsageError
from orchestrator.run_dir import RunDir

PREFIX: Final = ".unpack-"
_LOCK: Final = "lock"
_HERE: Final = -100  # AT_FDCWD
_RENAME_NOREPLACE: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Staging:
    """A staging directory. What is made in it is new, private, and below its descriptor."""

    def __init__(self, path: Path, run_id: str) -> None:
        self.path = path
        self.run = RunDir(path / run_id)
        """The directory that will be the run's."""
        self.store = path / "store"
        """A store of its own, so that nothing unchecked comes into the one of the runs."""
        self.layers = path / "layers"
        for directory in (self.run.path, self.store, self.layers):
            directory.mkdir(mode=0o700)

    def write(self, relative: str, pieces: Iterable[bytes]) -> None:
        """A new file holds the pieces, on disk. Its directory is made where it is missing.

        Raises: OSError: also where such a file exists.
        """
        directory, _, name = relative.rpartition("/")
        place = self.path / directory
        place.mkdir(mode=0o700, exist_ok=True)
        parent = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb", buffering=1 << 20) as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.fsync(parent)
        finally:
            os.close(parent)

    def settle(self, place: DataDir) -> RunDir:
        """The run is one of the data directory's, for every reader at once.

        Raises: UsageError: there is one of that id. OSError.
        """
        final = place.root / RUNS / self.run.run_id
        sync_directory(self.run.path)
        # Unlike rename(2), which would replace the empty directory of a launch that has just begun.
        if _libc.renameat2(_HERE, os.fsencode(self.run.path), _HERE, os.fsencode(final), _RENAME_NOREPLACE) != 0:
            code = ctypes.get_errno()
            if os.path.lexists(final):
                raise taken(self.run.run_id)
            raise OSError(code, os.strerror(code), str(final))
        sync_directory(final.parent)
        return RunDir(final)


def taken(run_id: str) -> UsageError:
    """The word for a run id that is in use."""
    return UsageError(f"run {run_id} exists: give the unpacked one another id with --as, or: orchestrator rm {run_id}")


@contextmanager
def staging(place: DataDir, run_id: str) -> Iterator[Staging]:
    """A staging directory, gone when the block ends.

    Raises: UsageError: there is a run of that id. HostError: it cannot be made.
    """
    runs = place.root / RUNS
    if os.path.lexists(runs / run_id):
        raise taken(run_id)
    try:
        for abandoned in runs.glob(f"{PREFIX}*"):
            _remove_abandoned(abandoned)
        path, lock = _locked_directory(runs)
        try:
            yield Staging(path, run_id)
        finally:
            shutil.rmtree(path)
            os.close(lock)
    except OSError as error:
        raise HostError(f"{runs}: the archive cannot be taken in: {error.strerror}") from error


def _locked_directory(runs: Path) -> tuple[Path, int]:
    """A new staging directory and its lock, which is held; another process may take it for abandoned until then."""
    while True:
        path = runs / f"{PREFIX}{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return path, lock
            os.close(lock)


def _remove_abandoned(path: Path) -> None:
    with suppress(FileNotFoundError):
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        except BlockingIOError:
            return
        finally:
            os.close(lock)
