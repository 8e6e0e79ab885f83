"""Put a snapshot back: check and stage first, then kill, move what differs, start, prove.

The order is the whole point. Changing the upper directory below a mounted overlay is undefined behaviour, so the
container is dead and unmounted meanwhile. Trees on the disk are proven before the start, while nothing can change
them; trees in memory exist only after it, when nothing but the holder init runs.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

from snapshot_drivers.base import CaptureOptions, Coverage, Mount, RestoreReport, Snapshot, StateKind, Target
from snapshot_drivers.crash_points import reached
from snapshot_drivers.errors import RestoreError, RestoreRefused, StoreDamaged
from snapshot_drivers.freezer import Freezer
from snapshot_drivers.leases import Leases
from snapshot_drivers.overlay.apply import apply_plan, remove_paths
from snapshot_drivers.overlay.capture import Index, skip_set
from snapshot_drivers.overlay.etc_files import restore_etc
from snapshot_drivers.overlay.held import Held
from snapshot_drivers.overlay.layers import Layers, find_layers, is_mounted
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.overlay.plan import DirectoryPlan, first_difference, make_plan, wanted_files
from snapshot_drivers.overlay.portable import bound_entry
from snapshot_drivers.overlay.scan import ScannedTree
from snapshot_drivers.overlay.sources import OpenMounts, Source, Sources, open_sources, without
from snapshot_drivers.overlay.staging import Staging
from snapshot_drivers.overlay.tracking import Tracking
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import Manifest, StoredTree
from snapshot_drivers.tree import Node, children_of, decode_root, digest_of

_UNMOUNT_S: Final = 10.0


class StagedRestore:
    """A restore that is ready to be carried out (see ``base.Staged``)."""

    def __init__(
        self,
        target: Target,
        manifest: Manifest,
        options: CaptureOptions,
        *,
        content: ContentStore,
        freezer: Freezer,
        open_mounts: OpenMounts,
        index: Index,
        tracking: Tracking | None = None,
    ) -> None:
        """Checks and stages. Raises: RestoreRefused, RestoreError, StoreDamaged, EngineError; nothing is touched."""
        self.snapshot: Snapshot = manifest.snapshot
        self._target = without(target, options.excluded)
        self._manifest = manifest
        self._options = options
        self._content = content
        self._freezer = freezer
        self._open_mounts = open_mounts
        self._stagings: dict[tuple[StateKind, str], Staging] = {}
        self.index = Index()
        """After ``apply``: what the next capture may rely on."""
        self._layers: Layers = find_layers(target)
        self._check(self._target, manifest)
        known = index.trees if index.upper == self._layers.upper else {}
        # Mapped then or now: their timestamps say nothing, neither before the kill nor after it.
        self._held = Held(freezer.pids() if target.init_pid is not None else [], index.mapped, stand_still=False)
        self._leases: Leases = {}
        self._tracking = tracking or Tracking.without()
        self._tracking.prepare(self._layers.upper, target.engine_root, manifest.snapshot.entries)
        try:
            with open_sources(self._target, self._layers, open_mounts, memory=False) as sources:
                if absent := self._absent(sources, memory=False):
                    raise RestoreRefused(f"{absent}; nothing was touched")
                self._leases = self._held.leases(others=sources.are_shared)
                self._real = {(tree.kind, tree.path): self._scan(tree, known) for tree in sources.trees}
                for tree in sources.trees:
                    self._stage(tree)
            self._read_ahead()
            reached("restore-staged")
        except OSError as error:
            self.discard()
            raise RestoreError(
                f"cannot stage snapshot {self.snapshot.snapshot_id}: {error}; nothing was touched"
            ) from error
        except BaseException:
            self.discard()
            raise

    def apply(self, *, verify: str = "difference") -> RestoreReport:
        """See ``base.Staged.apply``."""
        began = time.perf_counter()
        try:
            touched, target = self._apply(full=verify == "full")
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
        """See ``base.Staged.discard``."""
        while self._stagings:
            with suppress(OSError):
                self._stagings.popitem()[1].close()

    def _check(self, target: Target, manifest: Manifest) -> None:
        name = manifest.snapshot.snapshot_id
        if manifest.layer_ids != target.layer_ids or manifest.architecture != target.architecture:
            raise RestoreRefused(
                f"snapshot {name} is relative to the layers of image {manifest.image_id}; the container has those of "
                f"{target.image_id}. Restore it into a container of its own image"
            )
        if manifest.lower_dirs != self._layers.image and (bound := bound_entry(manifest, self._content.read)):
            raise RestoreRefused(
                f"snapshot {name} was taken above other directories than those in which this engine keeps the same "
                f"layers, and takes content from them: {bound}"
            )
        for file in manifest.etc_files:
            if file.path not in dict(target.etc_files):
                raise RestoreRefused(f"snapshot {name} holds {file.path}, which the container does not mount writable")
        mounts = {(mount.kind, mount.path): mount for mount in target.mounts if mount.capture}
        for shared in mounts.values():
            if shared.shared_with:
                names = ", ".join(f"{one.name}{'' if one.running else ' (stopped)'}" for one in shared.shared_with)
                raise RestoreRefused(
                    f"the {shared.kind} {shared.path} ({shared.name}) is mounted by containers outside of this run, "
                    f"whose files a restore would change: {names}; remove these, or give the task a volume of its own"
                )
        for tree in manifest.trees:
            if tree.kind is StateKind.ROOTFS:
                continue
            mount = mounts.pop((tree.kind, tree.path), None)
            if mount is None or tree.name != mount.name:
                raise RestoreRefused(
                    f"snapshot {name} holds {tree.kind} {tree.path}, which the container does not mount"
                )
        for mount in mounts.values():
            if not any(item.path == mount.path for item in manifest.snapshot.coverage.items):
                raise RestoreRefused(f"the container mounts {mount.path}, of which snapshot {name} knows nothing")
        self._check_destinations(target.mounts)

    def _check_destinations(self, mounts: tuple[Mount, ...]) -> None:
        """A mount's way must not lead through a link in the tree that comes back: the runtime would follow it."""
        rootfs = next(tree for tree in self._manifest.trees if tree.kind is StateKind.ROOTFS)
        root = self._wanted(rootfs)
        for mount in mounts:
            node = root
            for part in os.fsencode(mount.path).strip(b"/").split(b"/"):
                child = _child(node, part, self._content)
                if child is None:
                    break
                if not child.is_directory and not child.is_regular:
                    raise RestoreRefused(
                        f"in snapshot {self.snapshot.snapshot_id} the way to the mount {mount.path} leads through "
                        f"{part!r}, which is no directory"
                    )
                node = child

    def _wanted(self, tree: StoredTree) -> Node:
        return decode_root(bytes.fromhex(tree.root), self._content.read)

    def _stored(self, tree: Source) -> StoredTree | None:
        return next((one for one in self._manifest.trees if (one.kind, one.path) == (tree.kind, tree.path)), None)

    def _absent(self, sources: Sources, *, memory: bool) -> str:
        """Why one of the stored trees, on the disk or in memory, cannot be restored; empty: all are there."""
        there = {(tree.kind, tree.path) for tree in sources.trees}
        for tree in self._manifest.trees:
            if (tree.kind is StateKind.TMPFS) is memory and (tree.kind, tree.path) not in there:
                reasons = [item.reason for item in sources.left_out if (item.kind, item.path) == (tree.kind, tree.path)]
                return f"cannot restore the {tree.kind} {tree.path}: {reasons[0] if reasons else 'it is not mounted'}"
        return ""

    def _skip(self, tree: Source) -> PathSet:
        staging = self._stagings.get((tree.kind, tree.path)) if tree.staged_inside else None
        own = [f"{tree.path.rstrip('/')}/{os.fsdecode(staging.name)}"] if staging else []
        return skip_set(self._options, tree.path, *own)

    def _scan(self, tree: Source, known: dict[tuple[StateKind, str], ScannedTree]) -> ScannedTree:
        if tree.is_ours:
            self._tracking.look()
        found = self._tracking.walk(
            tree,
            put=digest_of,
            options=self._options,
            skip=self._skip(tree),
            index=known.get((tree.kind, tree.path)),
            held=self._held,
            leases=self._leases,
        )
        if tree.is_ours:
            self._tracking.adopt(tree, found, self._options)
        return found

    def _plan(self, tree: Source, scanned: ScannedTree, stored: StoredTree) -> DirectoryPlan:
        if scanned.digest.hex() == stored.root:
            return DirectoryPlan(scanned.root)
        wanted = self._wanted(stored)
        runs = scanned.places.runs if scanned.places is not None else {}
        return make_plan(scanned.root, wanted, self._content.read, self._skip(tree), runs)

    def _stage(self, tree: Source) -> None:
        stored = self._stored(tree)
        if stored is not None:
            plan = self._plan(tree, self._real[(tree.kind, tree.path)], stored)
            if not plan.is_empty:
                self._staging(tree).prepare(plan)

    def _staging(self, tree: Source) -> Staging:
        key = (tree.kind, tree.path)
        if key not in self._stagings:
            place = tree.staging_place(self._target.engine_root)
            self._stagings[key] = Staging(place, self._content.read, ours=not tree.staged_inside)
        return self._stagings[key]

    def _forget_staging(self, tree: Source) -> None:
        """Nothing lies ready in or beside this tree any more; a memory file system is another one at each start."""
        if (key := (tree.kind, tree.path)) in self._stagings:
            self._stagings.pop(key).close()

    def _read_ahead(self) -> None:
        """What goes into memory only after the start is read and checked now; so are the three files under /etc."""
        for tree in self._manifest.trees:
            if tree.kind is StateKind.TMPFS:
                wanted = self._wanted(tree)
                empty = Node(b"", wanted.mode, wanted.uid, wanted.gid, wanted.mtime_ns)
                empty.children = {}
                plan = make_plan(empty, wanted, self._content.read, PathSet())
                for node in wanted_files(plan):
                    for segment in node.segments:
                        self._content.read(segment.digest)
        for file in self._manifest.etc_files:
            self._content.read(bytes.fromhex(file.digest))

    def _apply(self, *, full: bool) -> tuple[int, Target]:
        lifecycle = self._target.lifecycle
        self._freezer.thaw()
        lifecycle.kill()
        self._held = self._held.after_death()
        self._wait_unmounted()
        reached("restore-killed")
        touched = 0
        proven: dict[tuple[StateKind, str], ScannedTree] = {}
        with open_sources(self._target, self._layers, self._open_mounts, memory=False) as sources:
            if absent := self._absent(sources, memory=False):
                raise RestoreError(absent)
            self._leases = self._held.leases(others=sources.are_shared)
            for tree in sources.trees:
                touched += self._move(tree, self._real, proven, full=full)
                reached("restore-tree-moved")
        restore_etc(self._target, self._manifest.etc_files, self._content.read)
        reached("restore-before-start")
        target = replace(self._target, init_pid=lifecycle.start())
        reached("restore-started")
        with open_sources(target, self._layers, self._open_mounts, disk=False) as sources:
            if absent := self._absent(sources, memory=True):
                raise RestoreError(absent)
            for tree in sources.trees:
                self._forget_staging(tree)
                touched += self._move(tree, {}, proven, full=full)
        self.discard()
        self._target = target
        self.index = Index(proven, upper=self._layers.upper)
        return touched, target

    def _move(
        self,
        tree: Source,
        known: dict[tuple[StateKind, str], ScannedTree],
        proven: dict[tuple[StateKind, str], ScannedTree],
        *,
        full: bool,
    ) -> int:
        """One tree is as stored, proven by another walk of it; what only that walk has found is moved, too."""
        stored = self._stored(tree)
        if stored is None:
            return 0
        key = (tree.kind, tree.path)
        touched = remove_paths(tree.root_fd, PathSet.of(self._options.volatile, tree.path))
        after = self._scan(tree, known)
        plan = self._plan(tree, after, stored)
        for last in (False, True):
            if not plan.is_empty:
                touched += apply_plan(plan, tree.root_fd, self._staging(tree))
            if tree.staged_inside:
                self._forget_staging(tree)
            after = self._scan(tree, {} if full or last else {key: after})
            plan = self._plan(tree, after, stored)
            if plan.is_empty:
                break
        else:
            raise RestoreError(
                f"after restoring {self.snapshot.snapshot_id}, {tree.path.rstrip('/')}{first_difference(plan)} "
                "is not as it was stored"
            )
        if after.digest.hex() == stored.root:
            proven[key] = after
        return touched

    def _wait_unmounted(self) -> None:
        """Another mount namespace may still hold the overlay for a moment after the engine says that it is gone."""
        deadline = time.monotonic() + _UNMOUNT_S
        while is_mounted(self._layers.mount_point):
            if time.monotonic() > deadline:
                raise RestoreError(
                    f"{self._layers.mount_point} stays mounted after the container was killed; find its holder in "
                    "/proc/*/mountinfo"
                )
            time.sleep(0.002)


def _child(node: Node, name: bytes, content: ContentStore) -> Node | None:
    return children_of(node, content.read).get(name) if node.is_directory else None
