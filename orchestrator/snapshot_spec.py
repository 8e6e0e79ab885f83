"""What a task says of its snapshots: which state, by which driver, how much of it, and for how long."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.agent_spec import NonEmpty
from orchestrator.spec_values import PathBelowRoot, Size
from snapshot_drivers.base import CaptureOptions


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class SnapshotLimits(_Part):
    """What one checkpoint may be. Over a limit it fails and names it, and what was stored before is unhurt.

    Sizes in bytes; in the file also ``"512m"``, ``"2g"``.
    """

    max_entries: Annotated[int, Field(gt=0)] = 1_000_000
    """Changed entries of the file systems."""
    max_depth: Annotated[int, Field(gt=0)] = 50_000
    """Levels of directories."""
    max_content_bytes: Size = 256 * 2**30
    """Changed content that has to be read."""
    max_xattr_bytes: Size = 2**20
    """Extended attributes of one entry."""
    store_quota_bytes: Size | None = None
    """Content of all runs in the data directory. ``null``: no quota."""
    min_free_bytes: Annotated[Size, Field(strict=False)] = 256 * 2**20
    """Room that has to be left on the disk of the data directory."""


class Retention(_Part):
    """Which checkpoints ``orchestrator gc`` keeps. What a resume of the run needs is always kept."""

    live_path: bool = True
    """Those on the way to where the run stands."""
    notes: bool = True
    """Those with a note."""
    last: Annotated[int, Field(ge=0)] = 20
    """The newest ones, wherever they lie."""


class SnapshotSpec(_Part):
    """What is captured at each breakpoint, and by which driver."""

    driver: NonEmpty = "overlay"
    """See ``orchestrator drivers``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that driver."""
    include_binds: Annotated[tuple[PathBelowRoot, ...], Field(strict=False)] = ()
    """Destinations of writable binds that are captured and restored: host directories change on a rewind."""
    excluded: Annotated[tuple[PathBelowRoot, ...], Field(strict=False)] = ()
    """Neither captured nor restored. Not a security border: an agent can keep notes there across rewinds."""
    volatile: Annotated[tuple[PathBelowRoot, ...], Field(strict=False)] = ()
    """Not captured, and deleted on a restore (caches)."""
    on_failure: Literal["stop", "degrade"] = "stop"
    """When a capture fails: end the run, or go on with a breakpoint that cannot be restored."""
    limits: SnapshotLimits = Field(default_factory=SnapshotLimits)
    retention: Retention | None = None
    """``null``: ``gc`` keeps every checkpoint."""

    def capture_options(self) -> CaptureOptions:
        """What a driver has to know of it."""
        return CaptureOptions(excluded=self.excluded, volatile=self.volatile, **self.limits.model_dump())
