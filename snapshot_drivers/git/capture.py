"""Take a snapshot of a workspace: freeze, hand git what changed, thaw; the commit's ref is what makes it exist.

Everything is handed over while the container stands still, and compressed on the way; git syncs afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from snapshot_drivers.base import (
    CaptureOptions,
    Coverage,
    CoverageItem,
    CoverageState,
    Snapshot,
    StateKind,
    Target,
)
from snapshot_drivers.crash_points import reached
from snapshot_drivers.errors import CaptureError, ContainerNotRunning, UnknownSnapshot
from snapshot_drivers.freezer import Freezer
from snapshot_drivers.git.importer import Importer, object_id
from snapshot_drivers.git.repository import Repository
from snapshot_drivers.git.trees import Facts, Listing, listing_digest, read_commit, read_listing
from snapshot_drivers.git.walk import Seen, Walk
from snapshot_drivers.git.workspace import OpenMounts, Scope, Workspace, opened
from snapshot_drivers.leases import write_leases
from snapshot_drivers.left_out import mount_left_out
from snapshot_drivers.overlay.mapped import ANYWHERE, inodes_of, mapped_paths, memory_maps
from snapshot_drivers.running import not_captured, process
from snapshot_drivers.store.manifest import new_snapshot_id

_FREEZES_S: Final = (5.0, 5.0, 60.0)
"""How long each look may hold the container still; what was handed over in one is known in the next."""
_SHOWN: Final = 20
_OUTSIDE: Final = "the git driver takes the workspace alone: this is left as it is"
_IN_MEMORY: Final = "the git driver takes the workspace alone: this is emptied when a restore starts the container"
_NOT_GITS: Final = (
    "git holds content, the execute bit and symbolic links; a restored file has the owner and the other permissions of "
    "the one that it replaces or of its directory, a new time, no extended attributes and no other hard links"
)
_PROCESSES: Final = "the git driver takes files only; it will not run after a restore"


@dataclass(frozen=True)
class State:
    """What the last capture or restore knows of a workspace: it only makes the next one cheaper."""

    snapshot_id: str
    """The snapshot whose state it is."""
    seen: Seen
    mapped: frozenset[bytes]
    """Container paths that were mapped shared and writable then."""


class Capture:
    """One capture of one workspace."""

    def __init__(
        self,
        target: Target,
        options: CaptureOptions,
        scope: Scope,
        *,
        repository: Repository,
        freezer: Freezer,
        open_mounts: OpenMounts,
        state: State | None,
    ) -> None:
        self._target = target
        self._options = options
        self._scope = scope
        self._path = scope.path_in(target)
        self._repository = repository
        self._freezer = freezer
        self._open_mounts = open_mounts
        self._state = state

    def run(self, parent_id: str | None) -> tuple[Snapshot, State]:
        """The snapshot exists.

        Raises: CaptureError, LimitExceeded, ContainerNotRunning, EngineError, UnsupportedHost.
        """
        try:
            with (
                opened(self._target, self._scope, self._options, self._open_mounts) as workspace,
                self._repository.lock.shared(),
            ):
                return self._run(workspace, parent_id)
        except OSError as error:
            raise CaptureError(f"cannot capture the workspace {self._path}: {error}") from error

    def _run(self, workspace: Workspace, parent_id: str | None) -> tuple[Snapshot, State]:
        began = time.perf_counter()
        snapshot_id = new_snapshot_id()
        parent, before = self._before(parent_id)
        problems: list[CoverageItem] = []
        with self._repository.importing() as importer:
            state, processes, frozen_ms = self._look_frozen(workspace, snapshot_id, importer, problems)
            seen = state.seen
            snapshot = Snapshot(
                snapshot_id=snapshot_id,
                parent_id=parent_id,
                driver="git",
                created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                coverage=Coverage.of([*self._coverage(workspace, seen), *processes, *problems]),
                root_digest=listing_digest(seen.listing),
                entries=seen.entries,
                stored_bytes=importer.stored_bytes,
                capture_ms=1e3 * (time.perf_counter() - began),
                frozen_ms=frozen_ms,
            )
            untracked = tuple(sorted(gap.path.hex() for gap in seen.gaps))
            importer.commit(
                self._repository.ref(snapshot_id),
                Facts(snapshot=snapshot, workspace=self._path, untracked=untracked).message(),
                int(time.time()),
                parent,
                [path for path in before if path not in seen.listing],
                [(path, *entry) for path, entry in seen.listing.items() if before.get(path) != entry],
            )
            reached("after-pack")
        reached("after-manifest")
        return snapshot, state

    def _before(self, parent_id: str | None) -> tuple[str | None, Listing]:
        """The parent's commit and files; none where it was removed meanwhile."""
        if parent_id is None:
            return None, {}
        try:
            commit = read_commit(self._repository, parent_id)
        except UnknownSnapshot:
            return None, {}
        if self._state is not None and self._state.snapshot_id == parent_id:
            return commit.name, self._state.seen.listing
        return commit.name, read_listing(self._repository, commit.tree)

    def _look_frozen(
        self, workspace: Workspace, snapshot_id: str, importer: Importer, problems: list[CoverageItem]
    ) -> tuple[State, list[CoverageItem], float]:
        """Look at the frozen container; if the watchdog let it go meanwhile, again with what was learned."""
        last, frozen_ms = self._state, 0.0
        for deadline_s in _FREEZES_S:
            with self._freezer.frozen(deadline_s=deadline_s) as freeze:
                pids = self._freezer.pids()
                state = last = self._look(workspace, snapshot_id, importer, last, pids)
                processes = not_captured(pids, _PROCESSES)
                reached("frozen")
            frozen_ms += freeze.frozen_ms
            if freeze.complete and freeze.held:
                return state, processes, frozen_ms
            if not self._freezer.pids():
                raise ContainerNotRunning(f"container {self._target.container_id[:12]} stopped during the capture")
        reason = "the container could not be kept frozen, so files may be of different moments"
        problems.append(process("freeze", CoverageState.UNKNOWN, reason))
        return state, processes, frozen_ms

    def _look(
        self, workspace: Workspace, snapshot_id: str, importer: Importer, known: State | None, pids: list[int]
    ) -> State:
        mapped = mapped_paths(memory_maps(pids))
        suspect = mapped | (known.mapped if known is not None else frozenset())
        trusted = known.seen if known is not None and ANYWHERE not in suspect else None
        walk = Walk(
            workspace.classes,
            self._options,
            lambda size, source: self._store(importer, size, source),
            most_file_bytes=self._scope.most_file_bytes,
            known=trusted,
            dirty_inodes=dirty_inodes(suspect, workspace),
            leases=write_leases(pids),
        )
        return State(snapshot_id, walk.run(workspace.root_fd), mapped)

    def _store(self, importer: Importer, size: int, source: Callable[[], Iterator[bytes]]) -> bytes | None:
        """See ``walk.Store``. What git has already is not handed over again."""
        name = object_id("blob", size, source())
        if name in importer.stored or self._repository.has(name.hex()):
            return name
        return importer.blob(size, source())

    def _coverage(self, workspace: Workspace, seen: Seen) -> Iterator[CoverageItem]:
        kind, path = workspace.kind, self._path
        yield CoverageItem(kind=kind, path=path, state=CoverageState.CAPTURED)
        yield CoverageItem(kind=kind, path=path, state=CoverageState.EXCLUDED, reason=_NOT_GITS)
        if path != "/":
            yield CoverageItem(kind=StateKind.ROOTFS, path="/", state=CoverageState.EXCLUDED, reason=_OUTSIDE)
        yield from self._shown(kind, [(gap.path, gap.reason) for gap in seen.gaps], CoverageState.MISSING)
        left_alone = [(one, "left alone: neither captured nor restored") for one in seen.left_alone]
        yield from self._shown(kind, left_alone, CoverageState.EXCLUDED)
        for place in self._options.volatile:
            reason = "volatile by the task: deleted on restore"
            yield CoverageItem(kind=kind, path=place, state=CoverageState.EXCLUDED, reason=reason)
        for mount in self._target.mounts:
            if mount != workspace.mount:
                yield mount_left_out(mount, in_memory=_IN_MEMORY, otherwise=_OUTSIDE)

    def _shown(self, kind: StateKind, found: list[tuple[bytes, str]], state: CoverageState) -> Iterator[CoverageItem]:
        prefix = self._path.rstrip("/") + "/"
        for path, reason in found[:_SHOWN]:
            shown = prefix + path.decode("utf-8", "backslashreplace")
            yield CoverageItem(kind=kind, path=shown, state=state, reason=reason)
        if len(found) > _SHOWN:
            text = f"{len(found) - _SHOWN} more paths below it, as those that are named"
            yield CoverageItem(kind=kind, path=prefix, state=state, reason=text)


def dirty_inodes(paths: frozenset[bytes], workspace: Workspace) -> frozenset[int]:
    """Inodes of the files of the workspace among those paths."""
    if workspace.root_fd is None:
        return frozenset()
    return inodes_of(paths, workspace.path, workspace.root_fd)
