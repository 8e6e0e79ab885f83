"""The ``criu`` driver: files by the overlay driver, and the processes that the launcher started with their memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from snapshot_drivers.base import CaptureOptions, Change, CoverageItem, CoverageState, Snapshot, Staged, Target
from snapshot_drivers.criu.capture import FOREIGN, FilesOnly, Held, HeldTree, hold, item, namespaces, unheld
from snapshot_drivers.criu.enclosure import Enclosures, StillMoving
from snapshot_drivers.criu.gateway import DEFAULT_PREFIX, CriuError, Gateway, Place
from snapshot_drivers.criu.images import check_seal
from snapshot_drivers.criu.preflight import obstacle
from snapshot_drivers.criu.restore import StagedProcesses
from snapshot_drivers.criu.trees import Process, Running, look, settled, waits_for_exec
from snapshot_drivers.criu.work_directory import remove_abandoned, work_directory
from snapshot_drivers.errors import CaptureError, UnsupportedHost
from snapshot_drivers.overlay.capture import Companion
from snapshot_drivers.overlay.driver import OverlayDriver
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import ManifestStore

WORK: Final = "processes"
"""In the store: images on their way into a pack or out of one."""
_MORE_TRIES: Final = 2
"""Where processes do not stand still in time, which happens on a busy machine."""
_CHOICES: Final = {"require": ("all", "tree", "any"), "clock": ("preserve", "host"), "tcp": ("keep", "close")}


class CriuDriver:
    """See ``base.SnapshotDriver``. Needs what the overlay driver needs, and the CRIU that ``deploy/criu`` brings.

    Nothing but the launcher runs: the snapshot is the overlay driver's, at its cost.
    """

    name = "criu"

    def __init__(
        self,
        store: Path,
        *,
        require: str = "any",
        clock: str = "preserve",
        tcp: str = "keep",
        timeout_s: float = 10.0,
        prefix: str = str(DEFAULT_PREFIX),
    ) -> None:
        """``require``: ``all`` fails a capture that must leave a process out, ``tree`` one that must leave out
        one below the launcher; ``any`` says so in its coverage.

        ``clock``: after a restore the monotonic clock goes on (``preserve``) or is the host's. ``tcp``: connections
        within the container go on (``keep``) or all are closed. ``timeout_s``: of each of CRIU's steps.

        Raises: UnsupportedHost: no such option's value.
        """
        for name, value in (("require", require), ("clock", clock), ("tcp", tcp)):
            if value not in _CHOICES[name]:
                raise UnsupportedHost(f"snapshots.options.{name}: {value!r} is none of {', '.join(_CHOICES[name])}")
        if not 0 < timeout_s <= 600:
            raise UnsupportedHost(f"snapshots.options.timeout_s: {timeout_s!r} is no number of seconds up to 600")
        self._files = OverlayDriver(store)
        self._content = ContentStore(store)
        self._manifests = ManifestStore(store)
        self._data_dir = store.parent
        self._launcher = store.parent / "bin" / "launch"
        self._work = store / WORK
        self._work.mkdir(mode=0o700, exist_ok=True)
        remove_abandoned(self._work)
        self._gateway = Gateway(Path(prefix))
        self._enclosures = Enclosures()
        self._require = require
        self._keep_clock = clock == "preserve"
        self._tcp = tcp
        self._timeout_s = float(timeout_s)

    def capture(self, target: Target, parent_id: str | None, options: CaptureOptions) -> Snapshot:
        """See ``base.SnapshotDriver.capture``. Raises: CaptureError: one cannot be taken, and ``require`` wants it."""
        began = time.perf_counter()
        for _ in range(_MORE_TRIES):
            with suppress(StillMoving):
                return self._capture(target, parent_id, options, began, give_up=False)
        return self._capture(target, parent_id, options, began, give_up=True)

    def _capture(
        self, target: Target, parent_id: str | None, options: CaptureOptions, began: float, *, give_up: bool
    ) -> Snapshot:
        """``give_up``: what does not stand still now is left out. Raises: StillMoving: without; and as ``capture``."""
        running = settled(target, self._launcher)
        if target.init_pid is None:
            return self._files.capture(target, parent_id, options)
        if running.is_idle:
            return self._files.capture(target, parent_id, options, companion=FilesOnly([], began))
        with ExitStack() as stack:
            companion: Companion
            try:
                companion = self._hold(target, running, stack, began, lenient=options.lenient)
            except CriuError as error:
                stack.close()
                if isinstance(error, StillMoving) and not give_up:
                    raise
                missing = self._left_out(running.tree[1:], str(error), running.foreign, lenient=options.lenient)
                companion = FilesOnly(missing, began)
            return self._files.capture(target, parent_id, options, companion=companion)

    def _hold(self, target: Target, running: Running, stack: ExitStack, began: float, *, lenient: bool) -> HeldTree:
        """The launcher's tree stands still with its memory read, and nothing else runs, until ``stack`` ends.

        Raises: CriuError: it cannot be taken; it runs. CaptureError: the task requires what is left out.
        """
        assert target.init_pid is not None
        if len(running.tree) < 2:
            raise CriuError("nothing runs below the launcher")
        try:
            self._gateway.check()
        except UnsupportedHost as error:
            raise CriuError(str(error)) from error
        beside = self._left_out((), "", running.foreign, lenient=lenient)
        work = stack.enter_context(work_directory(self._work, sum(one.memory_bytes for one in running.tree)))
        holding = stack.enter_context(ExitStack())
        aside = None
        if running.foreign:
            aside = self._enclosures.of(target, "beside")
            holding.enter_context(aside.closed(lambda: look(target, self._launcher).foreign))
        since = time.perf_counter()
        frozen = None
        if not any(one.is_stopped for one in running.tree):  # CRIU cannot attach to one that is stopped and frozen
            tree = self._enclosures.of(target, "tree")
            holding.enter_context(tree.closed(lambda: look(target, self._launcher).tree, stay=True))
            frozen = tree.directory
        still = look(target, self._launcher)
        if (one := next((one for one in still.tree if waits_for_exec(one.pid)), None)) is not None:
            raise StillMoving(f"{one.label} could not be frozen: its child has not begun its program yet")
        if reason := obstacle(still, target.init_pid):
            raise CriuError(reason)
        place = Place(namespaces(target, holding), freezer=frozen)
        call = hold(self._gateway, place, still, work, holding, tcp=self._tcp, timeout_s=self._timeout_s)
        now = look(target, self._launcher)
        if (other := unheld(now, aside)) is not None:
            raise CriuError(f"{other.label} ran while memory was read")
        held = Held(call, now, beside, holding, since)
        return HeldTree(held, work, timeout_s=self._timeout_s, began=began, data_dir=self._data_dir)

    def _left_out(
        self, tree: Sequence[Process], reason: str, foreign: Sequence[Process], *, lenient: bool
    ) -> list[CoverageItem]:
        """Raises: CaptureError: the task requires one of them."""
        below = [item(one, CoverageState.MISSING, reason) for one in tree]
        beside = [item(one, CoverageState.MISSING, FOREIGN) for one in foreign]
        wanted = {"all": [*below, *beside], "tree": below, "any": []}[self._require]
        if wanted and not lenient:
            first = wanted[0]
            raise CaptureError(
                f"{first.path} cannot be taken: {first.reason} (snapshots.options.require: {self._require}; "
                "with any, it is left out)"
            )
        return [*below, *beside]

    def stage(self, target: Target, snapshot_id: str, options: CaptureOptions) -> Staged:
        """See ``base.SnapshotDriver.stage``. Raises: RestoreRefused: the processes were edited or are of elsewhere."""
        manifest = self._manifests.read(snapshot_id)
        check_seal(manifest, self._data_dir)
        files = self._files.stage(target, snapshot_id, options)
        if manifest.processes is None:
            return files
        try:
            return StagedProcesses(
                files,
                manifest.processes,
                gateway=self._gateway,
                enclosures=self._enclosures,
                content=self._content,
                directory=self._work,
                launcher=self._launcher,
                tcp=self._tcp,
                keep_clock=self._keep_clock,
                timeout_s=self._timeout_s,
            )
        except BaseException:
            files.discard()
            raise

    def load(self, snapshot_id: str) -> Snapshot:
        """See ``base.SnapshotDriver.load``."""
        return self._files.load(snapshot_id)

    def diff(self, older_id: str | None, newer_id: str) -> Iterator[Change]:
        """See ``base.SnapshotDriver.diff``."""
        return self._files.diff(older_id, newer_id)

    def read_file(self, snapshot_id: str, path: str) -> Iterator[bytes] | None:
        """See ``base.SnapshotDriver.read_file``."""
        return self._files.read_file(snapshot_id, path)

    def verify(self, snapshot_ids: Iterable[str], *, content: bool = False) -> dict[str, list[str]]:
        """See ``base.SnapshotDriver.verify``."""
        return self._files.verify(snapshot_ids, content=content)

    def forget(self, snapshot_id: str) -> None:
        """See ``base.SnapshotDriver.forget``."""
        self._files.forget(snapshot_id)

    def close(self) -> None:
        """See ``base.SnapshotDriver.close``."""
        self._enclosures.close()
        self._files.close()
        self._content.close()
