"""The gateway to the ``git`` program, on a bare repository of our own.

Git is handed bytes and hands back bytes; it never opens a path that a container controls. So nothing that lies in a
workspace (attributes, filters, hooks, submodules, links, a ``.git`` with a configuration of its own) is read as
anything but content. No configuration outside of the repository counts, no hook runs, nothing is asked of a user.

Objects are named by SHA-256: who can make two files of one SHA-1 could have one restored for the other.

Source: git-fast-import(1), git-cat-file(1), git(1) "Environment Variables", git-config(1) ``core.fsync``.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final, NamedTuple

from snapshot_drivers.errors import CaptureError, EngineError, StoreDamaged, UnsupportedHost
from snapshot_drivers.git.importer import Importer, object_id
from snapshot_drivers.store.lock import StoreLock

_REPOSITORY: Final = "objects.git"
_REFS: Final = "refs/snapshots/"
_SNAPSHOT_ID: Final = re.compile(r"s-[0-9a-v]{26}")
PATH: Final = "/usr/local/bin:/usr/bin:/bin"
"""Where the program is looked for."""
_ENVIRONMENT: Final = {
    "PATH": PATH,
    "HOME": "/nonexistent",
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
}
_SETTINGS: Final = (
    "core.hooksPath=/dev/null",
    "core.fsync=all",
    "core.compression=1",
    "core.maxTreeDepth=65536",
    "gc.autoDetach=false",
    "maintenance.auto=false",
)
_GIT: Final = ("git", *(word for setting in _SETTINGS for word in ("-c", setting)))
_MOST_PACKS: Final = 50
_MOST_LOOSE: Final = 4000


class GitObject(NamedTuple):
    """One object of the repository."""

    kind: str
    """``blob``, ``tree`` or ``commit``."""
    data: bytes


class Repository:
    """Objects and the refs that name snapshots. Many processes may write at once; ``collect`` waits for all of them."""

    def __init__(self, directory: Path) -> None:
        """``directory``: where repository and lock lie; it is made, the repository at its first use."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._path = directory / _REPOSITORY
        self.lock = StoreLock(directory)
        self._readers: dict[str, subprocess.Popen[bytes]] = {}

    def close(self) -> None:
        """No process of git is left. Repeatable."""
        while self._readers:
            reader = self._readers.popitem()[1]
            reader.kill()
            reader.communicate()

    def ref(self, snapshot_id: str) -> str:
        """The ref that makes a snapshot exist."""
        return _REFS + snapshot_id

    def resolve(self, snapshot_id: str) -> str | None:
        """Hex name of the commit of a snapshot; ``None``: there is none.

        Raises: UnsupportedHost: git cannot be run.
        """
        if not _SNAPSHOT_ID.fullmatch(snapshot_id) or not self._path.is_dir():
            return None
        done = self._run("rev-parse", "--verify", "--quiet", "--end-of-options", self.ref(snapshot_id))
        return done.stdout.decode().strip() or None

    def read(self, object_name: str) -> GitObject:
        """The object of that hex name, checked against it.

        Raises: StoreDamaged: it is missing, or its bytes differ.
        """
        head = self._ask("--batch", object_name)
        words = head.split()
        if len(words) != 3:
            raise StoreDamaged(f"object {object_name} is not in {self._path}: {head or 'git could not read it'}")
        kind, size = words[1], int(words[2])
        data = self._answer("--batch", size + 1)[:-1]
        if object_id(kind, size, [data]).hex() != object_name:
            raise StoreDamaged(f"object {object_name} in {self._path} is not what was stored")
        return GitObject(kind, data)

    def has(self, object_name: str) -> bool:
        """An object of that hex name is there; its bytes are not looked at."""
        return len(self._ask("--batch-check", object_name).split()) == 3

    @contextmanager
    def importing(self) -> Iterator[Importer]:
        """What was handed to the importer is stored, its commits' refs are set, when the block ends without an error.

        Raises: CaptureError: git could not write.
        """
        self._make()
        with tempfile.TemporaryFile() as complaints:
            child = self._start("fast-import", "--quiet", "--done", "--date-format=raw", stderr=complaints)
            assert child.stdin is not None
            importer = Importer(child.stdin)
            try:
                try:
                    yield importer
                    child.stdin.write(b"done\n")
                    child.stdin.close()
                    code = child.wait()
                except (BrokenPipeError, ConnectionResetError):
                    code = child.wait() or 1
            finally:
                child.kill()
                child.wait()
                with suppress(OSError):
                    child.stdin.close()
            if code:
                complaints.seek(0)
                text = complaints.read(4096).decode(errors="replace").strip()
                raise CaptureError(f"git could not store the snapshot in {self._path}: {text or code}")

    def remove(self, snapshot_id: str) -> bool:
        """No ref names the snapshot; answers whether one did. Repeatable.

        Raises: EngineError: git could not write.
        """
        with self.lock.shared():
            if self.resolve(snapshot_id) is None:
                return False
            done = self._run("update-ref", "--no-deref", "-d", self.ref(snapshot_id))
        if done.returncode:
            raise EngineError(f"git could not remove {snapshot_id}: {done.stderr.decode(errors='replace').strip()}")
        return True

    def collect(self, *, always: bool) -> None:
        """What no snapshot needs is gone and the rest lies in few files; not ``always``: where there are too many.

        Raises: EngineError.
        """
        if not self._path.is_dir() or not (always or self._is_scattered()):
            return
        self.close()
        with self.lock.turn(), self.lock.exclusive():
            # Nobody writes now, so these are of the dead.
            for left in (*self._path.glob("fast_import_crash_*"), *self._path.glob("*.lock")):
                left.unlink(missing_ok=True)
            done = self._run("gc", "--quiet", "--prune=now")
        if done.returncode:
            raise EngineError(f"git could not tidy {self._path}: {done.stderr.decode(errors='replace').strip()}")

    def _is_scattered(self) -> bool:
        objects = self._path / "objects"
        packs = sum(1 for _ in (objects / "pack").glob("*.pack"))
        # Names are spread evenly, so one directory of 256 tells of all; git's own gc looks at one, too.
        loose = sum(1 for _ in (objects / "17").glob("*")) * 256
        return packs > _MOST_PACKS or loose > _MOST_LOOSE

    def _make(self) -> None:
        if self._path.is_dir():
            return
        with self.lock.turn():
            if not self._path.is_dir():
                made = self._directory / ".new.git"
                words = ("init", "--quiet", "--bare", "--object-format=sha256", "--template=", str(made))
                done = self._run_in(made, *words)
                if done.returncode:
                    text = done.stderr.decode(errors="replace").strip()
                    raise UnsupportedHost(f"git (2.29 or newer) could not make the repository {made}: {text}")
                made.rename(self._path)

    def _ask(self, mode: str, object_name: str) -> str:
        """First line of the answer of a ``cat-file`` that stays; empty where git gave up."""
        if not self._path.is_dir():
            return ""
        reader = self._readers.get(mode)
        if reader is None:
            reader = self._readers[mode] = self._start("cat-file", mode, stderr=subprocess.DEVNULL)
        assert reader.stdin is not None and reader.stdout is not None
        try:
            reader.stdin.write(object_name.encode() + b"\n")
            reader.stdin.flush()
            line = reader.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            self._give_up(mode)
        return line.decode(errors="replace").strip()

    def _answer(self, mode: str, size: int) -> bytes:
        """What follows that line. Raises: StoreDamaged: git gave up in the middle."""
        output = self._readers[mode].stdout
        assert output is not None
        data = output.read(size)
        if len(data) != size:
            self._give_up(mode)
            raise StoreDamaged(f"git could not read an object in {self._path} to its end")
        return data

    def _give_up(self, mode: str) -> None:
        reader = self._readers.pop(mode)
        reader.kill()
        reader.communicate()

    def _start(self, *words: str, stderr: int | IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [*_GIT, *words],
                env={**_ENVIRONMENT, "GIT_DIR": str(self._path)},
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if words[0] == "cat-file" else subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise UnsupportedHost(f"the git driver needs the program git: {error.strerror}; install it") from error

    def _run(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return self._run_in(self._path, *words)

    def _run_in(self, path: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
        environment = {**_ENVIRONMENT, "GIT_DIR": str(path)}
        try:
            return subprocess.run(
                [*_GIT, *words], env=environment, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
        except OSError as error:
            raise UnsupportedHost(f"the git driver needs the program git: {error.strerror}; install it") from error
