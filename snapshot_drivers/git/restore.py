"""Put a workspace back: check and read first, then kill, start, write what differs, prove.

The container is killed and started as by the other drivers, and files are written while nothing but the holder init
runs. Processes of the abandoned stretch would otherwise go on beside files that went back, and write to them.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

from snapshot_drivers.base import CaptureOptions, Coverage, RestoreReport, Snapshot, Target
from snapshot_drivers.crash_points import reached
from snapshot_drivers.errors import RestoreError, RestoreRefused, StoreDamaged
from snapshot_drivers.freezer import Freezer
from snapshot_drivers.git.apply import apply_plan, remove_volatile
from snapshot_drivers.git.capture import State, dirty_inodes
from snapshot_drivers.git.importer import object_id
from snapshot_drivers.git.plan import Plan, make_plan
from snapshot_drivers.git.repository import Repository
from snapshot_drivers.git.trees import Tracked, listing_digest, read_commit, read_listing
from snapshot_drivers.git.walk import Seen, Walk
from snapshot_drivers.git.workspace import OpenMounts, Scope, Workspace, opened
from snapshot_drivers.leases import write_leases
from snapshot_drivers.overlay.mapped import ANYWHERE, mapped_paths, memory_maps


class StagedWorkspace:
    """A restore that is ready to be carried out (see ``base.Staged``)."""

    def __init__(
        self,
        target: Target,
        snapshot_id: str,
        options: CaptureOptions,
        scope: Scope,
        *,
        repository: Repository,
        freezer: Freezer,
        open_mounts: OpenMounts,
        state: State | None,
    ) -> None:
        """Checks and reads. Raises: as ``SnapshotDriver.stage``; nothing is touched."""
        commit = read_commit(repository, snapshot_id)
        self.snapshot: Snapshot = commit.facts.snapshot
        self.state: State | None = state
        """After ``apply``: what the next capture may rely on."""
        self._target = target
        self._options = options
        self._scope = scope
        self._path = scope.path_in(target)
        self._repository = repository
        self._freezer = freezer
        self._open_mounts = open_mounts
        if commit.facts.workspace != self._path:
            raise RestoreRefused(
                f"snapshot {snapshot_id} is of the workspace {commit.facts.workspace}; that of the container is "
                f"{self._path}"
            )
        self._wanted = read_listing(repository, commit.tree)
        self._untracked = frozenset(bytes.fromhex(path) for path in commit.facts.untracked)
        self._mapped: frozenset[bytes] = state.mapped if state is not None else frozenset()
        try:
            self._look_ahead()
        except OSError as error:
            raise RestoreError(f"cannot stage snapshot {snapshot_id}: {error}; nothing was touched") from error
        reached("restore-staged")

    def apply(self, *, verify: str = "difference") -> RestoreReport:
        """See ``base.Staged.apply``."""
        began = time.perf_counter()
        try:
            target, touched = self._apply(full=verify == "full")
        except (OSError, StoreDamaged, RestoreRefused) as error:
            raise RestoreError(f"restoring {self.snapshot.snapshot_id} failed half-way: {error}") from error
        return RestoreReport(
            target=target,
            restore_ms=1e3 * (time.perf_counter() - began),
            touched=touched,
            verified=verify,
            coverage=Coverage.of(list(self.snapshot.coverage.items)),
        )

    def discard(self) -> None:
        """Nothing is staged outside of the repository."""

    def _look_ahead(self) -> None:
        """What will be written can be read and has room. A container that does not run tells nothing: all is read."""
        if self._target.init_pid is None:
            self._read_all(Plan((), self._wanted, {}))
            return
        self._mapped |= mapped_paths(memory_maps(self._freezer.pids()))
        with opened(self._target, self._scope, self._options, self._open_mounts) as workspace:
            self._refuse_sharers(workspace)
            plan = make_plan(self._walk(workspace, self._known()), self._wanted, self._untracked)
            needed = self._read_all(plan)
            if workspace.root_fd is not None:
                room = os.fstatvfs(workspace.root_fd)
                if needed > room.f_bavail * room.f_frsize:
                    raise OSError(
                        28, f"{needed} bytes are needed, {room.f_bavail * room.f_frsize} are free", self._path
                    )

    def _read_all(self, plan: Plan) -> int:
        """The bytes that the plan writes. Raises: StoreDamaged."""
        return sum(len(self._content(entry)) for entry in plan.write.values())

    def _content(self, entry: Tracked) -> bytes:
        return self._repository.read(entry.blob.hex()).data

    def _refuse_sharers(self, workspace: Workspace) -> None:
        if workspace.mount is not None and workspace.mount.shared_with:
            names = ", ".join(sharer.name for sharer in workspace.mount.shared_with)
            raise RestoreRefused(
                f"the {workspace.mount.kind} {workspace.mount.path} is mounted by containers outside of this run "
                f"({names}), whose files a restore would change: remove these, or give the task a volume of its own"
            )

    def _apply(self, *, full: bool) -> tuple[Target, int]:
        lifecycle = self._target.lifecycle
        self._freezer.thaw()
        lifecycle.kill()
        reached("restore-killed")
        target = replace(self._target, init_pid=lifecycle.start())
        reached("restore-started")
        with opened(target, self._scope, self._options, self._open_mounts, create=True) as workspace:
            assert workspace.root_fd is not None
            touched = remove_volatile(workspace.root_fd, workspace.classes)
            before = self._walk(workspace, self._known())
            plan = make_plan(before, self._wanted, self._untracked)
            apply_plan(workspace.root_fd, plan, self._untracked, self._content)
            reached("restore-tree-moved")
            after = self._walk(workspace, None if full else before)
        if listing_digest(after.listing) != self.snapshot.root_digest:
            raise RestoreError(
                f"after restoring {self.snapshot.snapshot_id}, the workspace {self._path} is not as it was stored: "
                f"{self._first_difference(after)}"
            )
        self.state = State(self.snapshot.snapshot_id, after, frozenset())
        return target, touched + plan.touched

    def _known(self) -> Seen | None:
        """What is mapped may have changed without a sign."""
        return self.state.seen if self.state is not None and ANYWHERE not in self._mapped else None

    def _walk(self, workspace: Workspace, known: Seen | None) -> Seen:
        walk = Walk(
            workspace.classes,
            self._options,
            lambda size, source: object_id("blob", size, source()),
            most_file_bytes=self._scope.most_file_bytes,
            known=known,
            dirty_inodes=dirty_inodes(self._mapped, workspace),
            leases=write_leases([]),
        )
        return walk.run(workspace.root_fd)

    def _first_difference(self, seen: Seen) -> str:
        paths = {path for path, entry in self._wanted.items() ^ seen.listing.items()}
        reasons = {gap.path: gap.reason for gap in seen.gaps}
        first = min(paths, default=b"")
        return f"{first.decode('utf-8', 'backslashreplace')} {reasons.get(first, 'differs')}"
