"""The directory of one run: where its files are, who drives it, and how its small files are written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from orchestrator.context_log import sync_directory
from orchestrator.errors import Busy, HostError, LogDamaged, UsageError

if TYPE_CHECKING:
    from orchestrator.run_record import RunRecord

TASK_FILE, RECORD_FILE, EVENTS_FILE, LOCK_FILE = "task.yaml", "run.json", "events.jsonl", "lock"

_LOCK_TRIES = 5
_LOCK_PAUSE_S = 0.02
"""``is_locked`` holds the lock for an instant; a few tries tell that apart from an owner."""


class RunDir:
    """The directory of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name

    @property
    def task_path(self) -> Path:
        """The task as it was launched, secrets redacted."""
        return self.path / TASK_FILE

    @property
    def events_path(self) -> Path:
        """The context log."""
        return self.path / EVENTS_FILE

    @property
    def record_path(self) -> Path:
        """``run.json``."""
        return self.path / RECORD_FILE

    def read_record(self) -> RunRecord:
        """``run.json`` as it stands.

        Raises: LogDamaged: it is missing (the launch did not get that far) or cannot be understood.
        """
        # A function's import: it builds the models of task and container, which most commands of the CLI never need.
        from orchestrator.run_record import RunRecord

        try:
            return RunRecord.model_validate_json(read_file(self.record_path))
        except FileNotFoundError as error:
            raise LogDamaged(
                f"run {self.run_id}: {self.record_path} is missing: its launch did not get far enough to be taken up "
                f"again; remove it with: orchestrator rm {self.run_id}"
            ) from error
        except (OSError, ValidationError) as error:
            raise LogDamaged(
                f"run {self.run_id}: {self.record_path} cannot be understood: {_first_line(error)}"
            ) from error

    def write_record(self, record: RunRecord) -> None:
        """``run.json`` holds ``record``; at every moment it is the old or the new one.

        Raises: HostError.
        """
        text = json.dumps(record.model_dump(mode="json"), ensure_ascii=True, indent=1) + "\n"
        write_file(self.record_path, text.encode("ascii"))

    def created_at(self) -> str:
        """When the run was made, ISO 8601: from its record, else from its directory."""
        try:
            return str(json.loads(read_file(self.record_path))["created_at"])
        except (OSError, ValueError, KeyError, TypeError):
            modified = datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
            return modified.isoformat(timespec="milliseconds")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """The run is ours alone while the block runs; the lock goes with the process, however it ends.

        Raises: Busy: another process drives the run. UsageError: the run was removed meanwhile.
        """
        descriptor = self._open_lock()
        try:
            for attempt in range(_LOCK_TRIES):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if attempt == _LOCK_TRIES - 1:
                        raise Busy(self._busy_message(descriptor)) from None
                    time.sleep(_LOCK_PAUSE_S)
            if os.fstat(descriptor).st_nlink == 0:
                raise UsageError(f"run {self.run_id} was removed meanwhile")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
            yield
        finally:
            os.close(descriptor)

    def is_locked(self) -> bool:
        """Some process, this one included, holds the lock."""
        try:
            descriptor = os.open(self.path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def remove(self) -> None:
        """The run's directory is gone; at once for every reader. Call it with the lock held.

        Raises: HostError.
        """
        grave = self.path.with_name(f".removed-{self.run_id}-{secrets.token_hex(4)}")
        try:
            self.path.rename(grave)
            sync_directory(grave.parent)
            shutil.rmtree(grave)
        except OSError as error:
            raise HostError(f"run {self.run_id}: {error.filename} cannot be removed: {error.strerror}") from error

    def _open_lock(self) -> int:
        try:
            return os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            raise UsageError(f"run {self.run_id} was removed meanwhile") from None
        except OSError as error:
            raise HostError(f"run {self.run_id}: its lock cannot be opened: {error.strerror}") from error

    def _busy_message(self, descriptor: int) -> str:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        by = f"process {owner}" if owner.isdigit() else "another process"
        return f"run {self.run_id} is busy, {by} has it: wait for it, or end it: orchestrator stop {self.run_id}"


def read_file(path: Path) -> bytes:
    """The content of a regular file; no link is followed and no pipe waited for.

    Raises: OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return stream.read()


def write_file(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """The file at ``path`` holds ``data``, on disk; at every moment it is the old or the new one.

    Raises: HostError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fchmod(stream.fileno(), mode)
                os.fsync(stream.fileno())
            temporary.rename(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    except OSError as error:
        raise HostError(f"{path}: cannot be written: {error.strerror}") from error


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return str(error)
