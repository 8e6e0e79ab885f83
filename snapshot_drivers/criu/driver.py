"""The ``criu`` driver: files by the overlay driver, and the processes that the launcher started with their memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from snapshot_drivers.base import CaptureOptions, Change, CoverageItem, CoverageState, Snapshot, Staged, Target
from snapshot_drivers.criu.capture import FilesOnly, HeldTree, hold, item, unheld
from snapshot_drivers.criu.gateway import DEFAULT_PREFIX, CriuError, Gateway
from snapshot_drivers.criu.images import check_seal
from snapshot_drivers.criu.preflight import obstacle
from snapshot_drivers.criu.restore import StagedProcesses
from snapshot_drivers.criu.trees import Running, look, settled
from snapshot_drivers.errors import CaptureError, UnsupportedHost
from snapshot_drivers.overlay.driver import OverlayDriver
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import ManifestStore

WORK: Final = "processes"
"""In the store: images on their way into a pack or out of one."""
_CHOICES: Final = {"require": ("all", "any"), "clock": ("preserve", "host"), "tcp": ("keep", "close")}


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
        """``require``: ``all`` fails a capture that must leave a process out; ``any`` says so in its coverage.

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
        self._gateway = Gateway(Path(prefix))
        self._require_all = require == "all"
        self._keep_clock = clock == "preserve"
        self._tcp = tcp
        self._timeout_s = float(timeout_s)

    def capture(self, target: Target, parent_id: str | None, options: CaptureOptions) -> Snapshot:
        """See ``base.SnapshotDriver.capture``. Raises: CaptureError: ``require: all``, and one cannot be taken."""
        began = time.perf_counter()
        running = settled(target, self._launcher)
        if target.init_pid is None:
            return self._files.capture(target, parent_id, options)
        if running.is_idle:
            return self._files.capture(target, parent_id, options, companion=FilesOnly([], began))
        reason = self._obstacle(running, target.init_pid)
        if reason is None:
            with ExitStack() as stack:
                work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="capture-", dir=self._work)))
                try:
                    call = hold(self._gateway, target, running, work, stack, tcp=self._tcp, timeout_s=self._timeout_s)
                except CriuError as error:
                    reason = str(error)
                else:
                    now = look(target, self._launcher)
                    other = unheld(target, self._launcher)
                    if other is None:
                        held = HeldTree(call, work, now, self._timeout_s, began, self._data_dir)
                        return self._files.capture(target, parent_id, options, companion=held)
                    reason = f"{other.label} appeared while memory was read"
        missing = self._missing(running, reason)
        return self._files.capture(target, parent_id, options, companion=FilesOnly(missing, began))

    def _obstacle(self, running: Running, init_pid: int) -> str | None:
        if not running.tree:
            return f"{running.foreign[0].label} was not started by the launcher (docker exec?)"
        try:
            self._gateway.check()
        except UnsupportedHost as error:
            return str(error)
        return obstacle(running, init_pid)

    def _missing(self, running: Running, reason: str) -> list[CoverageItem]:
        """Raises: CaptureError: the task requires all."""
        if self._require_all:
            raise CaptureError(f"the processes cannot be taken: {reason} (snapshots.options.require: all)")
        return [item(one, CoverageState.MISSING, reason) for one in (*running.tree[1:], *running.foreign)]

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
        self._files.close()
        self._content.close()
