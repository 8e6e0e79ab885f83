"""The error tree of the drivers; the exit code of the CLI stands on the class.

SnapshotError                       6
├── EngineError                     6   the engine or the host did not do what was asked
│   └── ContainerNotRunning         6
├── UnsupportedHost                 6   this host cannot do it at all (storage driver, rights, kernel)
├── CaptureError                    6   no snapshot was stored; what was stored before is unhurt
│   └── LimitExceeded               6   the tree is larger than the run's limits allow
├── RestoreError                    6   the container was put back, or could not be: the message says which
├── RestoreRefused                  3   nothing was touched
├── UnknownSnapshot                 4   no such snapshot in this store
└── StoreDamaged                    4   stored bytes are missing or are not what they were
"""

from __future__ import annotations


class SnapshotError(Exception):
    """Base of everything that a driver raises on purpose; the message says what to do next."""

    exit_code = 6


class EngineError(SnapshotError):
    """The engine or the host did not do what was asked."""


class ContainerNotRunning(EngineError):
    """The container is gone or stopped where a running one is needed."""


class UnsupportedHost(SnapshotError):
    """This host cannot do it: storage driver, rights or kernel."""


class CaptureError(SnapshotError):
    """No snapshot was stored; older ones are unhurt."""


class LimitExceeded(CaptureError):
    """The tree has more entries, levels or bytes than the limits of the run allow."""


class RestoreError(SnapshotError):
    """A restore failed after the container was touched; the message says in which state it stands."""


class RestoreRefused(SnapshotError):
    """A restore was refused before anything was touched."""

    exit_code = 3


class UnknownSnapshot(SnapshotError):
    """The store holds no snapshot of that name."""

    exit_code = 4


class StoreDamaged(SnapshotError):
    """Stored bytes are missing or differ from their hash."""

    exit_code = 4
