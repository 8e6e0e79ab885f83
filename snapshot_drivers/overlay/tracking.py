"""What is known of one container's changes since its trees were looked at last: a tracker, and when it is believed.

It is believed from the walk on that followed its start, as long as it answers, and for exactly the trees that the last
walk gave. A missing answer, a failed probe or a found miss means that all is walked.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

from snapshot_drivers import beneath
from snapshot_drivers.base import CaptureOptions, StateKind
from snapshot_drivers.leases import Leases
from snapshot_drivers.overlay.audit import Audit
from snapshot_drivers.overlay.held import Held
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.overlay.places import Doubt, Places
from snapshot_drivers.overlay.scan import ScannedTree, Scanner
from snapshot_drivers.overlay.sources import Source
from snapshot_drivers.overlay.tracked import TrackedScanner
from snapshot_drivers.overlay.tracker import Changes, Tracker, TrackerLost
from snapshot_drivers.overlay.tracker_probe import prove
from snapshot_drivers.tree import Put

Trees = Mapping[tuple[StateKind, str], ScannedTree]
MANY_ENTRIES: Final = 500
"""Fewer are walked as quickly as a tracker answers."""
PROBE_PREFIX: Final = ".orchestrator-probe-"
_MOST_ENTRIES: Final = 400_000
"""More cost too much memory: some 200 bytes each."""
_TRACKED: Final = (StateKind.ROOTFS, StateKind.VOLUME)
_STARTS: Final = 3
_MOST_CHANGES: Final = 1 << 19
_BELIEVED_CAPTURES: Final = 100
"""Then all is walked once: some kinds of change are not reported, such as most inode flags (see ``inode_flags``)."""
_log = logging.getLogger(__name__)


class Tracking:
    """The tracker of one container. ``close`` it."""

    def __init__(
        self,
        helper: Path,
        *,
        from_entries: int | None = MANY_ENTRIES,
        make_audit: Callable[[], Audit] = Audit,
    ) -> None:
        """Nothing is started yet; ``from_entries``: how many make a tracker worth it; ``None``: none do."""
        self._make_audit = make_audit
        self._helper = helper
        self._from_entries = from_entries or 0
        self._starts_left = _STARTS if from_entries is not None else 0
        self._tracker: Tracker | None = None
        self._device = -1
        self._base: Trees = {}
        self._options: CaptureOptions | None = None
        self._pending: list[Changes] = []
        """Answers that are not in the trees of ``_base``."""
        self._later: list[Changes] = []
        """Those that came after the last look."""
        self._losses = 0
        self._captures = 0
        self._looked_in = 0
        self._audits: dict[tuple[StateKind, str], Audit] = {}

    @classmethod
    def without(cls) -> Self:
        """No tracker: every walk is a whole one."""
        return cls(Path(), from_entries=None)

    @property
    def tracker(self) -> Tracker | None:
        """The one that runs."""
        return self._tracker

    def prepare(self, upper: Path, top: Path, entries: int) -> None:
        """A tracker runs if it is of use and can be had. Call it before the container stands still.

        ``upper``: the container's writable directory, below ``top``, the engine's data root; ``entries``: of all trees.
        """
        if self._tracker is not None and not self._tracker.is_alive:
            self._lose("its process ended")
        if self._tracker is None and self._starts_left and self._from_entries <= entries <= _MOST_ENTRIES:
            self._starts_left -= 1
            try:
                self._start(upper.parent, top)
            except (TrackerLost, OSError) as error:
                self._starts_left = 0
                self._lose(str(error))

    def _start(self, layer: Path, top: Path) -> None:
        with beneath.closing(beneath.open_below(top, layer)) as directory:
            tracker = Tracker.start(directory, self._helper)
            place = layer / f"{PROBE_PREFIX}{secrets.token_hex(8)}"
            try:
                place.mkdir(mode=0o700)
                prove(tracker, place)
            except BaseException:
                tracker.close()
                raise
            finally:
                shutil.rmtree(place, ignore_errors=True)
            self._device = os.fstat(directory).st_dev
        self._tracker = tracker

    def look(self) -> None:
        """All that changed before this call is known to the walks that follow."""
        answers = self._ask()  # first: a loss begins a new list
        self._pending += answers
        self._looked_in = self._losses

    def _ask(self) -> list[Changes]:
        """What changed since the last question, with what was heard of during the last walk."""
        found, self._later = self._later, []
        try:
            if self._tracker is not None:
                found.append(self._tracker.changes())
        except TrackerLost as error:
            self._lose(str(error))
            return []
        if sum(map(len, (*self._pending, *found))) > _MOST_CHANGES:
            self._lose("too many to keep")
            return []
        return found

    def _since(self, source: Source, tree: ScannedTree, options: CaptureOptions) -> list[Changes] | None:
        """What changed on the file system since that tree was walked; ``None``: it is not known."""
        is_known = self._base.get((source.kind, source.path)) is tree and self._options == options
        if self._tracker is None or not is_known or not source.is_ours:
            return None
        return self._pending if os.fstat(source.root_fd).st_dev == self._device else None

    def adopt(self, source: Source, tree: ScannedTree, options: CaptureOptions) -> None:
        """Walked after the last look, the tree takes the place of the one before it: later walks may go by it."""
        if self._is_whole(options):
            self._base = {**self._base, (source.kind, source.path): _with_places(tree)}

    def rebase(self, trees: Trees, options: CaptureOptions) -> None:
        """These are all trees, all walked after the last look: what was answered until then is in them."""
        if self._is_whole(options):
            self._base = {key: _with_places(tree) for key, tree in trees.items() if key[0] in _TRACKED}
            self._pending = []
            self._captures += 1
            if self._captures % _BELIEVED_CAPTURES == 0:
                self._base = {}

    def _is_whole(self, options: CaptureOptions) -> bool:
        """Nothing was lost since the last look."""
        if self._options != options:
            self._base, self._options = {}, options
        return self._tracker is not None and self._looked_in == self._losses

    def doubt(self) -> None:
        """The next walks are whole ones, as after a loss."""
        self._base = {}

    def walk(
        self,
        source: Source,
        *,
        put: Put,
        options: CaptureOptions,
        skip: PathSet,
        index: ScannedTree | None,
        held: Held,
        leases: Leases,
    ) -> ScannedTree:
        """The tree as it is now: the changed entries of it where these are known, the whole of it else.

        Raises: LimitExceeded, OSError.
        """
        root_fd = source.root_fd
        mapped = held.mapped_inodes(source.path, root_fd)
        if index is None or mapped is None:
            return Scanner(put, options, skip=skip, leases=leases).scan(root_fd)
        changes = self._since(source, index, options)
        if changes is not None and (opened := held.open_inodes(source.path, root_fd)) is not None:
            try:
                found = TrackedScanner(
                    put,
                    options,
                    skip=skip,
                    index=index,
                    dirty_inodes=mapped,
                    leases=leases,
                    changes=changes,
                    suspects=opened,
                ).scan(root_fd)
                if not self._is_missed(source, found, options, leases):
                    return found
            except Doubt:
                pass
        return Scanner(put, options, skip=skip, index=index, dirty_inodes=mapped, leases=leases).scan(root_fd)

    def _is_missed(self, source: Source, tree: ScannedTree, options: CaptureOptions, leases: Leases) -> bool:
        """The audit found an entry that changed, and that the tracker does not know of."""
        audit = self._audits.setdefault((source.kind, source.path), self._make_audit())
        miss = audit.check(tree, source.root_fd, options, leases)
        if miss is None:
            return False
        self._later = self._ask()
        if any(miss.inode in some.inodes for some in self._later):  # by somebody who does not stand still
            return False
        if not miss.only_flags:
            self._starts_left = 0
            self.close()
            _log.error("the tracker missed a change of %s: it is not used any more", miss.path)
        return True

    def close(self) -> None:
        """No tracker runs. Repeatable."""
        self._forget()
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.close()

    def _lose(self, reason: str) -> None:
        """What it said is worth nothing; it goes on if it is alive and may be asked again."""
        _log.warning("changes are not known, so all entries are looked at: %s", reason)
        if self._tracker is not None and self._tracker.is_alive:
            self._forget()
        else:
            self.close()

    def _forget(self) -> None:
        self._losses += 1
        self._base, self._pending, self._later = {}, [], []


def _with_places(tree: ScannedTree) -> ScannedTree:
    if tree.places is None:
        tree.places = Places.of(tree.root)
    return tree
