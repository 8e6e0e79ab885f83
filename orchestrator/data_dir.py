"""The data directory: where runs and the store live, and who may see them.

::

    <data dir>/                  0700, owned by who runs this
      runs/<run id>/             task.yaml (secrets redacted), run.json, events.jsonl, lock
      store/                     the snapshot drivers' (shared by all runs)
      bin/                       0755: static helpers, mounted read-only into containers, whose init is nobody special
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from orchestrator.context_log import sync_directory
from orchestrator.errors import HostError, UsageError
from orchestrator.run_dir import RunDir, write_file

RUNS, STORE, BIN = "runs", "store", "bin"
ROOT_VARIABLE = "ORCHESTRATOR_DATA_DIR"

HELPERS = ("launch", "enter", "tracker")
"""The static helpers: the launcher, which is PID 1 of the containers too, and the host-side namespace helper."""
INSTALLED_HELPERS = Path("/usr/local/lib/orchestrator")
"""Where ``deploy/helpers`` puts them."""

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


class DataDir:
    """The data directory as a whole."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).resolve()

    @property
    def store(self) -> Path:
        """The snapshot drivers' directory."""
        return self.root / STORE

    @property
    def bin(self) -> Path:
        """The helpers that are mounted into containers."""
        return self.root / BIN

    def open(self) -> DataDir:
        """The directory and its parts exist, belong to us, and nobody else can look in. Repeatable.

        Raises: HostError: it is somebody else's, open to others, a symbolic link among its parts, or cannot be made.
        """
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            _own_directory(self.root, follow=True)
            for name in (RUNS, STORE):
                _own_directory(self.root / name)
            _own_directory(self.bin, mode=0o755)
        except OSError as error:
            raise HostError(
                f"data directory {self.root}: cannot be made or read: {error.strerror}: choose another with --data-dir"
            ) from error
        return self

    def install_helpers(self, source: Path = INSTALLED_HELPERS) -> None:
        """The helpers in ``bin`` are those of ``source``, where it has any. Repeatable.

        Raises: HostError: a helper is in neither place, or cannot be copied.
        """
        for name in HELPERS:
            here = self.bin / name
            try:
                wanted = (source / name).read_bytes() if (source / name).exists() else None
                present = here.read_bytes() if here.exists() else None
            except OSError as error:
                raise HostError(f"{error.filename}: cannot be read: {error.strerror}") from error
            if wanted is None and present is None:
                raise HostError(f"{source / name}: the helper is missing: run deploy/helpers")
            if wanted is not None and wanted != present:
                # By a rename: a running container may hold the old one.
                write_file(here, wanted, mode=0o755)

    def runs(self) -> list[RunDir]:
        """All runs, oldest first."""
        try:
            entries = [entry.name for entry in os.scandir(self.root / RUNS) if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        found = [RunDir(self.root / RUNS / name) for name in entries if _RUN_ID.fullmatch(name)]
        return sorted(found, key=lambda run: (run.created_at(), run.run_id))

    def run(self, run_id: str) -> RunDir:
        """The run of exactly that id.

        Raises: UsageError: there is none.
        """
        path = self.root / RUNS / run_id
        if not _RUN_ID.fullmatch(run_id) or path.is_symlink() or not path.is_dir():
            raise UsageError(f"no run {run_id!r} in {self.root} (see: orchestrator runs)")
        return RunDir(path)

    def find(self, name: str) -> RunDir:
        """The run that ``name`` means: its id, the beginning of exactly one id, or ``last``.

        Raises: UsageError: none or several.
        """
        found = self.runs()
        for run in found:
            if run.run_id == name:
                return run
        if name == "last":
            if not found:
                raise UsageError(f"there are no runs in {self.root} (start one with: orchestrator launch TASK)")
            return found[-1]
        matching = [run for run in found if name and run.run_id.startswith(name)]
        if len(matching) > 1:
            names = ", ".join(run.run_id for run in matching[:5]) + (", …" if len(matching) > 5 else "")
            raise UsageError(f"{name!r} begins {len(matching)} run ids ({names}): give more of it")
        if not matching:
            raise UsageError(f"no run {name!r} in {self.root} (see: orchestrator runs)")
        return matching[0]

    def create_run(self, run_id: str, *, task_text: str) -> RunDir:
        """A new run's directory with its ``task.yaml``; ``task_text`` holds no secrets. The caller locks it.

        Raises: UsageError: the id is taken or malformed. HostError.
        """
        run = RunDir(self.root / RUNS / checked_run_id(run_id))
        try:
            run.path.mkdir(mode=0o700)
            sync_directory(run.path.parent)
        except FileExistsError as error:
            raise UsageError(f"run {run_id} exists: choose another --run-id, or: orchestrator rm {run_id}") from error
        except OSError as error:
            raise HostError(f"run {run_id}: {run.path} cannot be made: {error.strerror}") from error
        write_file(run.task_path, task_text.encode())
        return run


def default_root(environ: Mapping[str, str]) -> Path:
    """Where runs are kept unless it is said otherwise: what the variable names, else the user's state directory."""
    if named := environ.get(ROOT_VARIABLE):
        return Path(named)
    state = environ.get("XDG_STATE_HOME") or ""
    # The XDG specification: a relative path there is to be ignored.
    base = Path(state) if state.startswith("/") else Path("~/.local/state").expanduser()
    return base / "orchestrator"


def checked_run_id(run_id: str) -> str:
    """``run_id``, which a run may have.

    Raises: UsageError.
    """
    if not _RUN_ID.fullmatch(run_id) or run_id == "last":
        raise UsageError(f"{run_id!r} cannot be a run id: 1 to 63 of a-z, 0-9 and '-', not beginning with '-'")
    return run_id


def new_run_id(task_name: str) -> str:
    """An id for a run of that task which no other run has (48 random bits)."""
    return f"{task_name[:50]}-{secrets.token_hex(6)}"


def _own_directory(path: Path, *, follow: bool = False, mode: int = 0o700) -> None:
    """``path`` is a directory of ours that others have no more rights to than ``mode`` gives; made when it is missing.

    Raises: HostError: it is not ours alone. OSError.
    """
    try:
        path.mkdir(mode=mode)
    except FileExistsError:
        pass
    else:
        path.chmod(mode)
        sync_directory(path.parent)
    found = path.stat() if follow else path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise HostError(f"{path}: is not a directory: choose another with --data-dir")
    if found.st_uid != os.geteuid():
        raise HostError(f"{path}: belongs to uid {found.st_uid}, not to us ({os.geteuid()}): choose another --data-dir")
    if found.st_mode & 0o077 & ~mode:
        raise HostError(
            f"{path}: others have rights to it (mode {stat.S_IMODE(found.st_mode):04o}): run: chmod {mode:04o} {path}"
        )
