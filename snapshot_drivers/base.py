"""The contract of a snapshot driver: what it is given, what it answers, what it promises.

A driver does two things to a container: it *captures* its state as a snapshot, and it *restores* a snapshot into it.
Every driver passes the one suite in ``tests/contract``; what a driver cannot promise, its test class lists.

Invariants:

- A snapshot exists when, and only when, its manifest is in place. Capture writes content, then manifest; whoever names
  the snapshot (the context log) writes last.
- Capture never changes the container. Restore moves all that it promised or nothing.
- What a snapshot does not hold stands in its coverage with the reason. Nothing is lost in silence.
- Snapshots are independent of the order in which they are restored: older, newer, siblings, twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict


class StateKind(StrEnum):
    """A kind of container state."""

    ROOTFS = "rootfs"
    VOLUME = "volume"
    TMPFS = "tmpfs"
    BIND = "bind"
    ETC = "etc"
    PROCESS = "process"


class CoverageState(StrEnum):
    """What became of a piece of state in one snapshot."""

    CAPTURED = "captured"
    EXCLUDED = "excluded"
    MISSING = "missing"
    UNKNOWN = "unknown"


class CoverageItem(BaseModel):
    """One piece of container state and what became of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: StateKind
    path: str
    """Where it stands in the container (foreign text: bytes that are no UTF-8 are escaped)."""
    state: CoverageState
    reason: str | None = None
    """Why it is not captured; `None` only where it is."""


class Coverage(BaseModel):
    """Which state a snapshot holds. ``complete``: nothing is missing or unknown; what is excluded was a wish."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    complete: bool
    items: tuple[CoverageItem, ...]

    @classmethod
    def of(cls, items: list[CoverageItem]) -> Coverage:
        """Coverage of these items, ``complete`` worked out."""
        lost = (CoverageState.MISSING, CoverageState.UNKNOWN)
        return cls(complete=not any(item.state in lost for item in items), items=tuple(items))


class Sharer(NamedTuple):
    """A container outside of the run that mounts the same volume."""

    name: str
    running: bool


@dataclass(frozen=True)
class Mount:
    """One mount of the container below its root, as the *engine* (never the container) states it."""

    kind: StateKind
    """``VOLUME``, ``TMPFS`` or ``BIND``."""
    path: str
    """Absolute destination in the container, normalised."""
    source: Path | None
    """Directory on the host (volumes, binds); ``None`` for a tmpfs."""
    name: str | None = None
    """The volume's name in the engine."""
    capture: bool = True
    """False: leave it as it is, at capture and at restore."""
    reason: str | None = None
    """Why it is not captured."""
    shared_with: tuple[Sharer, ...] = ()
    """It is captured, but not restored while these are there: their files would change."""


class Lifecycle(Protocol):
    """What a driver may ask of the engine for one container. Given by ``orchestrator.container``."""

    def kill(self) -> None:
        """SIGKILL the container and wait until the engine has unmounted its root filesystem. Repeatable.

        Raises: EngineError.
        """

    def start(self) -> int:
        """Start it and answer the host pid of its PID 1; nothing but the holder init runs in it. Repeatable.

        A dead network holder is started first.

        Raises: EngineError.
        """

    def replace(self, image_id: str) -> Target:
        """A container of that image, of the same configuration and beside the same volumes and network, runs.

        It has the name of the present one, which is gone, and another id. Repeatable.

        Raises: EngineError: the present one is still there, unless the message says otherwise.
        """


@dataclass(frozen=True)
class Target:
    """One container as a driver sees it: facts from the engine's side only."""

    run_id: str
    container_id: str
    init_pid: int | None
    """Host pid of PID 1; ``None`` when it does not run."""
    engine_root: Path
    """The engine's data root; nothing outside of it (but declared binds) is ever opened."""
    storage_driver: str
    """``overlay2``, ``overlayfs`` (containerd image store), ..."""
    upper_hint: Path | None
    """``GraphDriver.Data.UpperDir`` where the engine states it; still to be verified.

    With containerd's image store, of a container that does not run: as the host saw it mounted.
    """
    freeze_group: str
    """Parent cgroup of the run, as given to the engine (``/orchestrator/<run id>`` or a slice's name)."""
    image_id: str
    layer_ids: tuple[str, ...]
    architecture: str
    mounts: tuple[Mount, ...]
    """Every writable mount below the root, ``/dev/shm`` (as ``TMPFS``) included, Docker's three files excluded."""
    etc_files: tuple[tuple[str, Path], ...]
    """``("/etc/hosts", <host path>)`` and so on, for those that the engine mounts writable."""
    etc_is_new: bool
    """The network holder was made anew, so the three files hold new addresses (see ``Manifest.etc_pristine``)."""
    lifecycle: Lifecycle = field(repr=False, compare=False)
    lower_hint: tuple[Path, ...] = ()
    """With ``upper_hint``: the layers below it, topmost first, where only a mount tells them."""
    workdir: str = "/"
    """Where the task's commands start."""


class CaptureOptions(BaseModel):
    """The part of ``task.yaml``'s ``snapshots`` that every driver understands."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    excluded: tuple[str, ...] = ()
    """Absolute paths in the container that are neither captured nor restored. Not a security border."""
    volatile: tuple[str, ...] = ()
    """Absolute paths that are not captured and deleted on restore (caches)."""
    max_entries: int = 1_000_000
    max_depth: int = 50_000
    max_content_bytes: int = 256 * 2**30
    max_xattr_bytes: int = 2**20
    """Extended attributes of one entry."""
    store_quota_bytes: int | None = None
    """Content of all runs in the store."""
    min_free_bytes: int = 0
    """Room that has to be left on the store's disk."""
    lenient: bool = False
    """What the driver was asked to require may be missing this time: one takes what one can before one goes back."""


class Snapshot(BaseModel):
    """What one driver stored of one container at one moment. Immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    snapshot_id: str
    """``s-`` and 26 characters that sort by time."""
    parent_id: str | None
    driver: str
    created_at: str
    """ISO 8601, UTC."""
    coverage: Coverage
    root_digest: str
    """Digest of the whole captured state: two snapshots of equal states have equal digests (same host)."""
    entries: int
    """Entries in the captured trees."""
    stored_bytes: int
    """Bytes that this snapshot added to the store."""
    capture_ms: float
    frozen_ms: float
    """How long the container stood still; 0 where it was not frozen."""


class Change(BaseModel):
    """One path that differs between two snapshots."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: str
    """``A`` added, ``D`` deleted, ``M`` content changed, ``T`` type changed, ``m`` only attributes changed."""
    path: str
    """Absolute path in the container; undecodable bytes as surrogate escapes."""
    kind: StateKind = StateKind.ROOTFS


@dataclass(frozen=True)
class RestoreReport:
    """What a finished restore did."""

    target: Target
    """The container as it stands now (its ``init_pid`` is new)."""
    restore_ms: float
    touched: int
    """Entries written, deleted or changed in attributes."""
    verified: str
    """``difference`` or ``full``."""
    coverage: Coverage
    """Of the restored snapshot, with what this restore could not bring back as ``missing``."""


class Staged(Protocol):
    """A restore of which everything that can fail beforehand has been done; the container is untouched."""

    snapshot: Snapshot

    def apply(self, *, verify: str = "difference") -> RestoreReport:
        """Kill, move the state, start, verify. May be repeated after a failure.

        Raises: RestoreError: the state is not proven to be the snapshot's; the caller puts another one back.
        """

    def discard(self) -> None:
        """Remove what was staged. Safe after ``apply``; repeatable."""


class SnapshotDriver(Protocol):
    """Capture and restore one kind of container state. One instance serves one run, from one thread at a time."""

    name: str

    def capture(self, target: Target, parent_id: str | None, options: CaptureOptions) -> Snapshot:
        """The state of ``target`` is stored, its manifest is in place, and the container runs on unchanged.

        ``parent_id`` is the snapshot whose state the container last had; it only makes the capture faster and smaller.

        Raises: CaptureError, LimitExceeded, UnsupportedHost, ContainerNotRunning.
        """

    def stage(self, target: Target, snapshot_id: str, options: CaptureOptions) -> Staged:
        """Everything that a restore needs is read, checked and on the right filesystem; nothing is touched yet.

        Raises: UnknownSnapshot, StoreDamaged, RestoreRefused (other layers, changed mounts), RestoreError (disk full).
        """

    def load(self, snapshot_id: str) -> Snapshot:
        """The stored snapshot of that name.

        Raises: UnknownSnapshot, StoreDamaged.
        """

    def diff(self, older_id: str | None, newer_id: str) -> Iterator[Change]:
        """What differs, ordered by path within each mount; ``None`` stands for the pristine image.

        Raises: UnknownSnapshot, StoreDamaged.
        """

    def read_file(self, snapshot_id: str, path: str) -> Iterator[bytes] | None:
        """Content of a regular file in the snapshot, in pieces; ``None`` where the snapshot holds no such file.

        Raises: UnknownSnapshot, StoreDamaged.
        """

    def verify(self, snapshot_ids: Iterable[str], *, content: bool = False) -> dict[str, list[str]]:
        """What is wrong with each of these snapshots, by its id; an empty list: it is whole.

        Whole: its manifest can be read, and everything that it names is there. ``content``: and is what was stored,
        every byte of it. What snapshots share is looked at once in one call. Nothing is changed, and nothing raises.
        """

    def forget(self, snapshot_id: str) -> None:
        """The snapshot's manifest is gone; content that nobody names is collected later. Repeatable."""

    def close(self) -> None:
        """Helper processes are gone, nothing is frozen. Repeatable."""


DriverFactory = Callable[[Path], SnapshotDriver]
"""Makes a driver over the store directory (``<data dir>/store``)."""
