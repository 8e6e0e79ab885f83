"""The ``git`` driver: a commit per snapshot of the workspace directory, in a bare repository in the store.

AgentRewind's method (arXiv 2608.14380), as the baseline to which the others are compared: it holds what git holds, and
its coverage names the rest. Three classes of path: tracked; left alone (``.git`` and what the task excludes); volatile,
which a restore deletes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from snapshot_drivers import namespaces
from snapshot_drivers.base import CaptureOptions, Change, RestoreReport, Snapshot, Staged, Target
from snapshot_drivers.errors import StoreDamaged, UnknownSnapshot, UnsupportedHost
from snapshot_drivers.freezer import Freezer
from snapshot_drivers.git.capture import Capture, State
from snapshot_drivers.git.repository import Repository
from snapshot_drivers.git.restore import StagedWorkspace
from snapshot_drivers.git.trees import EXECUTABLE, PLAIN, differences, find, read_commit, read_listing
from snapshot_drivers.git.workspace import ALWAYS_LEFT_ALONE, Scope, names
from snapshot_drivers.recent import Recent

DIRECTORY: Final = "git"
"""In the store."""
_SHOWN: Final = 5


class GitDriver:
    """See ``base.SnapshotDriver``. Needs root on the engine's host, git and the ``enter`` helper."""

    name = "git"

    def __init__(
        self,
        store: Path,
        *,
        workspace: str | None = None,
        left_alone: Sequence[str] = (".env",),
        volatile: Sequence[str] = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"),
        max_file_bytes: int = 256 << 20,
    ) -> None:
        """``workspace``: a directory in the container instead of the task's ``workdir``.

        ``left_alone`` and ``volatile``: names of entries at any depth; ``.git`` is always left alone.
        ``max_file_bytes``: larger files are not held.

        Raises: UnsupportedHost: one of them makes no sense.
        """
        if workspace is not None and (not workspace.startswith("/") or ".." in workspace.split("/")):
            raise UnsupportedHost(f"snapshots.options.workspace: {workspace!r} is no absolute path in the container")
        if max_file_bytes <= 0:
            raise UnsupportedHost(f"snapshots.options.max_file_bytes: {max_file_bytes} is no size")
        self._scope = Scope(
            workspace,
            names([*ALWAYS_LEFT_ALONE, *left_alone]),
            names(volatile),
            max_file_bytes,
        )
        self._helper = store.parent / "bin" / namespaces.HELPER_NAME
        self._repository = Repository(store / DIRECTORY)
        self._freezers = Recent[Freezer]()
        self._states: dict[str, State] = {}
        self._forgot = False

    def capture(self, target: Target, parent_id: str | None, options: CaptureOptions) -> Snapshot:
        """See ``base.SnapshotDriver.capture``."""
        capture = Capture(
            target,
            options,
            self._scope,
            repository=self._repository,
            freezer=self._freezer(target),
            open_mounts=self._open_mounts,
            state=self._states.get(target.container_id),
        )
        snapshot, self._states[target.container_id] = capture.run(parent_id)
        return snapshot

    def stage(self, target: Target, snapshot_id: str, options: CaptureOptions) -> Staged:
        """See ``base.SnapshotDriver.stage``."""
        staged = StagedWorkspace(
            target,
            snapshot_id,
            options,
            self._scope,
            repository=self._repository,
            freezer=self._freezer(target),
            open_mounts=self._open_mounts,
            state=self._states.get(target.container_id),
        )
        return _Remembering(staged, self._states, target.container_id)

    def load(self, snapshot_id: str) -> Snapshot:
        """See ``base.SnapshotDriver.load``."""
        return read_commit(self._repository, snapshot_id).facts.snapshot

    def diff(self, older_id: str | None, newer_id: str) -> Iterator[Change]:
        """See ``base.SnapshotDriver.diff``; the pristine image is an empty workspace."""
        older = read_commit(self._repository, older_id).tree if older_id is not None else None
        newer = read_commit(self._repository, newer_id)
        kind = newer.facts.snapshot.coverage.items[0].kind
        prefix = newer.facts.workspace.rstrip("/") + "/"
        for status, path in differences(self._repository, older, newer.tree):
            yield Change(status=status, path=prefix + path.decode("utf-8", "surrogateescape"), kind=kind)

    def read_file(self, snapshot_id: str, path: str) -> Iterator[bytes] | None:
        """See ``base.SnapshotDriver.read_file``."""
        commit = read_commit(self._repository, snapshot_id)
        prefix = commit.facts.workspace.rstrip("/") + "/"
        if not path.startswith(prefix):
            return None
        entry = find(self._repository, commit.tree, path[len(prefix) :].encode("utf-8", "surrogateescape"))
        if entry is None or entry.mode not in (PLAIN, EXECUTABLE):
            return None
        return iter([self._repository.read(entry.blob.hex()).data])

    def verify(self, snapshot_ids: Iterable[str], *, content: bool = False) -> dict[str, list[str]]:
        """See ``base.SnapshotDriver.verify``."""
        problems: dict[bytes, str | None] = {}
        return {snapshot_id: self._problems(snapshot_id, problems, content) for snapshot_id in snapshot_ids}

    def forget(self, snapshot_id: str) -> None:
        """See ``base.SnapshotDriver.forget``; what no snapshot needs any more is collected by ``close``."""
        self._forgot = self._repository.remove(snapshot_id) or self._forgot

    def close(self) -> None:
        """See ``base.SnapshotDriver.close``."""
        self._freezers.close()
        self._states.clear()
        self._repository.collect(always=self._forgot)
        self._forgot = False
        self._repository.close()

    def _problems(self, snapshot_id: str, blobs: dict[bytes, str | None], content: bool) -> list[str]:
        """``blobs``: what is known of those that were looked at."""
        try:
            commit = read_commit(self._repository, snapshot_id)
            listing = read_listing(self._repository, commit.tree)
        except (UnknownSnapshot, StoreDamaged) as error:
            return [str(error)]
        for entry in listing.values():
            if entry.blob not in blobs:
                blobs[entry.blob] = self._problem_of(entry.blob.hex(), content)
        found = [f"{path!r}: {blobs[entry.blob]}" for path, entry in sorted(listing.items()) if blobs[entry.blob]]
        return [*found[:_SHOWN], *([f"and {len(found) - _SHOWN} more files"] if len(found) > _SHOWN else [])]

    def _problem_of(self, blob: str, content: bool) -> str | None:
        if not content:
            return None if self._repository.has(blob) else f"object {blob} is missing"
        try:
            self._repository.read(blob)
        except StoreDamaged as error:
            return str(error)
        return None

    def _open_mounts(self, target: Target, paths: list[str]) -> namespaces.OpenedMounts:
        assert target.init_pid is not None
        return namespaces.opened_mounts(target.init_pid, paths, helper=self._helper, container_id=target.container_id)

    def _freezer(self, target: Target) -> Freezer:
        return self._freezers.of(target.freeze_group, lambda: Freezer(target.freeze_group))


class _Remembering:
    """A staged restore that leaves the driver what it proved."""

    def __init__(self, staged: StagedWorkspace, states: dict[str, State], container_id: str) -> None:
        self._staged = staged
        self._states = states
        self._container_id = container_id
        self.snapshot = staged.snapshot

    def apply(self, *, verify: str = "difference") -> RestoreReport:
        self._states.pop(self._container_id, None)
        report = self._staged.apply(verify=verify)
        if self._staged.state is not None:
            self._states[self._container_id] = self._staged.state
        return report

    def discard(self) -> None:
        self._staged.discard()
