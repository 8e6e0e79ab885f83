"""The in-memory driver: snapshots of plain directories, kept by this process. For tests, and the contract's reference.

``Target.upper_hint`` is the directory that stands for the root file system, and it is captured whole: there are no
layers, so the pristine image is an empty directory. Volumes and binds are captured by their source directory; a tmpfs
cannot be reached this way and is *missing*; processes are left out. Snapshots live as long as the process, by store
directory, as if the store were on disk: a second driver over the same store finds them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from snapshot_drivers.base import (
    CaptureOptions,
    Change,
    Coverage,
    CoverageItem,
    CoverageState,
    RestoreReport,
    Snapshot,
    StateKind,
    Target,
)
from snapshot_drivers.beneath import closing
from snapshot_drivers.errors import (
    CaptureError,
    ContainerNotRunning,
    RestoreError,
    RestoreRefused,
    StoreDamaged,
    UnknownSnapshot,
)
from snapshot_drivers.memory_tree import (
    Entry,
    Reader,
    compare,
    contents,
    forget_ways,
    rules_of,
    tree_digest,
)
from snapshot_drivers.memory_write import write_tree

ROOT = "/"


@dataclasses.dataclass(frozen=True)
class Held:
    """One snapshot's content: a tree by mount point, the engine's files, and what it is relative to."""

    snapshot: Snapshot
    layer_ids: tuple[str, ...]
    trees: dict[str, Entry]
    kinds: dict[str, StateKind]
    etc_files: dict[str, bytes]


@dataclasses.dataclass(frozen=True)
class Store:
    """All snapshots of one store directory, and which pieces of content they hold."""

    snapshots: dict[str, Held] = dataclasses.field(default_factory=dict)
    contents: set[bytes] = dataclasses.field(default_factory=set)

    def add_contents(self, trees: dict[str, Entry]) -> int:
        """The bytes of these trees that no snapshot has held so far."""
        added = 0
        for tree in trees.values():
            for data in contents(tree):
                digest = hashlib.sha256(data).digest()
                if digest not in self.contents:
                    self.contents.add(digest)
                    added += len(data)
        return added


class MemoryDriver:
    """See the module; keeps the contract of ``SnapshotDriver``."""

    name = "memory"
    _stores: ClassVar[dict[Path, Store]] = {}
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, store: Path) -> None:
        """A driver over the snapshots that were taken with this store directory."""
        self._store = self._stores.setdefault(store.resolve(), Store())

    def capture(self, target: Target, parent_id: str | None, options: CaptureOptions) -> Snapshot:
        """See ``SnapshotDriver.capture``."""
        started = time.monotonic()
        if target.upper_hint is None or not target.upper_hint.is_dir():
            raise ContainerNotRunning(f"run {target.run_id}: the container's directory {target.upper_hint} is gone")
        trees, kinds, items, entries = _read_all(target, options)
        etc_files = {path: source.read_bytes() for path, source in target.etc_files}
        items += [CoverageItem(kind=StateKind.ETC, path=path, state=CoverageState.CAPTURED) for path in etc_files]
        items.append(
            CoverageItem(
                kind=StateKind.PROCESS,
                path="/",
                state=CoverageState.EXCLUDED,
                reason="the memory driver captures no processes",
            )
        )
        now = datetime.now(UTC)
        snapshot = Snapshot(
            snapshot_id=f"s-{time.time_ns():018d}{next(self._numbers):08d}",
            parent_id=parent_id,
            driver=self.name,
            created_at=now.isoformat(),
            coverage=Coverage.of(items),
            root_digest=_digest(trees, etc_files),
            entries=entries,
            stored_bytes=self._store.add_contents(trees),
            capture_ms=(time.monotonic() - started) * 1000,
            frozen_ms=0.0,
        )
        self._store.snapshots[snapshot.snapshot_id] = Held(snapshot, target.layer_ids, trees, kinds, etc_files)
        return snapshot

    def stage(self, target: Target, snapshot_id: str, options: CaptureOptions) -> MemoryStaged:
        """See ``SnapshotDriver.stage``."""
        held = self._find(snapshot_id)
        _check_content(held)
        if held.layer_ids != target.layer_ids:
            raise RestoreRefused(
                f"snapshot {snapshot_id} was taken on other image layers: restore it onto its own image"
            )
        if held.trees.keys() != _directories(target).keys():
            raise RestoreRefused(f"snapshot {snapshot_id} has other mounts than the container: {sorted(held.trees)}")
        return MemoryStaged(held, target, options)

    def load(self, snapshot_id: str) -> Snapshot:
        """See ``SnapshotDriver.load``."""
        return self._find(snapshot_id).snapshot

    def diff(self, older_id: str | None, newer_id: str) -> Iterator[Change]:
        """See ``SnapshotDriver.diff``."""
        newer = self._find(newer_id)
        older = self._find(older_id).trees if older_id is not None else {}
        for mount in sorted(newer.trees.keys() | older.keys()):
            before = older.get(mount, Entry(0, 0, 0, 0))
            after = newer.trees.get(mount, Entry(0, 0, 0, 0))
            for status, path in compare(before, after):
                full = mount.rstrip("/") + os.fsdecode(path)
                yield Change(status=status, path=full, kind=newer.kinds.get(mount, StateKind.VOLUME))

    def read_file(self, snapshot_id: str, path: str) -> Iterator[bytes] | None:
        """See ``SnapshotDriver.read_file``."""
        held = self._find(snapshot_id)
        mounts = [mount for mount in held.trees if path == mount or path.startswith(mount.rstrip("/") + "/")]
        if not mounts:
            return None
        mount = max(mounts, key=len)
        entry: Entry | None = held.trees[mount]
        for part in path[len(mount) :].strip("/").split("/"):
            entry = entry.children.get(os.fsencode(part)) if entry else None
        return iter([entry.data()]) if entry and entry.is_regular else None

    def verify(self, snapshot_ids: Iterable[str], *, content: bool = False) -> dict[str, list[str]]:  # noqa: ARG002
        """See ``SnapshotDriver.verify``; always looks at all content."""
        return {snapshot_id: self._problems(snapshot_id) for snapshot_id in snapshot_ids}

    def forget(self, snapshot_id: str) -> None:
        """See ``SnapshotDriver.forget``."""
        self._store.snapshots.pop(snapshot_id, None)

    def close(self) -> None:
        """Nothing is held beside the snapshots."""

    def _problems(self, snapshot_id: str) -> list[str]:
        try:
            _check_content(self._find(snapshot_id))
        except (UnknownSnapshot, StoreDamaged) as error:
            return [str(error)]
        return []

    def _find(self, snapshot_id: str) -> Held:
        if snapshot_id not in self._store.snapshots:
            raise UnknownSnapshot(f"no snapshot {snapshot_id} in this store: it was removed, or belongs to another one")
        return self._store.snapshots[snapshot_id]


class MemoryStaged:
    """A restore about to happen; keeps the contract of ``Staged``."""

    def __init__(self, held: Held, target: Target, options: CaptureOptions) -> None:
        self.snapshot = held.snapshot
        self._held = held
        self._target = target
        self._options = options

    def apply(self, *, verify: str = "difference") -> RestoreReport:
        """See ``Staged.apply``; always compares everything, whatever ``verify`` asks for."""
        started = time.monotonic()
        self._target.lifecycle.kill()
        touched = 0
        try:
            for mount, directory in _directories(self._target).items():
                with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as root_fd:
                    kept = rules_of(_below(mount, self._options.excluded))
                    touched += write_tree(root_fd, self._held.trees[mount], kept)
            for path, source in self._target.etc_files:
                if not self._target.etc_is_new and path in self._held.etc_files:
                    source.write_bytes(self._held.etc_files[path])
            self._verify()
        except (OSError, CaptureError) as error:
            raise RestoreError(
                f"snapshot {self.snapshot.snapshot_id} was restored in part only: {error}; restore a snapshot again"
            ) from error
        init_pid = self._target.lifecycle.start()
        return RestoreReport(
            target=dataclasses.replace(self._target, init_pid=init_pid),
            restore_ms=(time.monotonic() - started) * 1000,
            touched=touched,
            verified=verify,
            coverage=self.snapshot.coverage,
        )

    def discard(self) -> None:
        """Nothing was staged outside of memory."""

    def _verify(self) -> None:
        trees, *_ = _read_all(self._target, self._options)
        for mount, tree in trees.items():
            forget_ways(tree, self._held.trees[mount], rules_of(_below(mount, self._options.excluded)))
        etc_files = self._held.etc_files
        if _digest(trees, etc_files) != self.snapshot.root_digest:
            raise RestoreError(f"the container is not what snapshot {self.snapshot.snapshot_id} says: restore it again")


def _check_content(held: Held) -> None:
    if _digest(held.trees, held.etc_files) != held.snapshot.root_digest:
        name = held.snapshot.snapshot_id
        raise StoreDamaged(f"snapshot {name} is not what it was: its content was changed in memory")


def _directories(target: Target) -> dict[str, Path]:
    """What is captured and restored: directory on the host by mount point."""
    found = {ROOT: target.upper_hint} if target.upper_hint is not None else {}
    for mount in target.mounts:
        if mount.capture and mount.source is not None and mount.source.is_dir():
            found[mount.path] = mount.source
    return found


def _below(mount: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Those of ``paths`` that lie below the mount point, seen from it."""
    prefix = mount.rstrip("/")
    return tuple(path[len(prefix) :] for path in paths if path.startswith(prefix + "/"))


def _read_all(
    target: Target, options: CaptureOptions
) -> tuple[dict[str, Entry], dict[str, StateKind], list[CoverageItem], int]:
    """Trees and kinds by mount point, their coverage, and the number of entries.

    Raises: CaptureError, LimitExceeded.
    """
    reader = Reader(options)
    trees: dict[str, Entry] = {}
    kinds = {ROOT: StateKind.ROOTFS, **{mount.path: mount.kind for mount in target.mounts}}
    items: list[CoverageItem] = []
    for path, directory in _directories(target).items():
        rules = rules_of(_below(path, options.excluded + options.volatile))
        try:
            with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as root_fd:
                trees[path] = reader.read(root_fd, rules)
        except OSError as error:
            raise CaptureError(f"run {target.run_id}: {path} cannot be read: {error}") from error
        items.append(CoverageItem(kind=kinds[path], path=path, state=CoverageState.CAPTURED))
        for gap, reason in reader.gaps:
            full = f"{path.rstrip('/')}/{gap.lstrip('/')}"
            items.append(CoverageItem(kind=kinds[path], path=full, state=CoverageState.UNKNOWN, reason=reason))
        reader.gaps.clear()
    for mount in target.mounts:
        if mount.path not in trees:
            state = CoverageState.MISSING if mount.capture else CoverageState.EXCLUDED
            reason = mount.reason or "the memory driver reaches directories of the host only"
            items.append(CoverageItem(kind=mount.kind, path=mount.path, state=state, reason=reason))
    for path in options.excluded + options.volatile:
        reason = "excluded by the task" if path in options.excluded else "volatile: deleted on a restore"
        items.append(CoverageItem(kind=StateKind.ROOTFS, path=path, state=CoverageState.EXCLUDED, reason=reason))
    return trees, {path: kinds[path] for path in trees}, items, reader.entries


def _digest(trees: dict[str, Entry], etc_files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for path, tree in sorted(trees.items()):
        digest.update(repr((path, tree_digest(tree))).encode())
    digest.update(repr(sorted(etc_files.items())).encode())
    return digest.hexdigest()
