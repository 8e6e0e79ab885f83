"""The error tree of the orchestrator; the exit code of the CLI stands on the class.

OrchestratorError                   6
├── TaskError                       2   task.yaml is wrong: file, line, field
├── UsageError                      2   a command asked for something that is not there (run, breakpoint)
├── Refused                         3   it could be done, but not without an explicit flag
│   └── Divergence                  3   a harness that runs again does not do what it did
├── LogDamaged                      4   the context log cannot be read where it matters
├── ArchiveRefused                  4   the archive is damaged, or says what none of ours says
├── Busy                            5   another orchestrator holds the run
├── HostError                       6   engine or host: missing, unreachable, refused
│   └── ContainerLost               6   a restore failed, and so did putting the container back
└── ModelError                      1   the model did not answer after all tries

The drivers' tree (``snapshot_drivers.errors``) carries exit codes of its own.
"""

from __future__ import annotations


class OrchestratorError(Exception):
    """Base of everything that the orchestrator raises on purpose; the message says what to do next."""

    exit_code = 6


class TaskError(OrchestratorError):
    """The task file is wrong; the message names file, line and field."""

    exit_code = 2


class UsageError(OrchestratorError):
    """What was asked for is not there: no such run, breakpoint or driver."""

    exit_code = 2


class Refused(OrchestratorError):
    """Not done without an explicit flag, which the message names."""

    exit_code = 3


class Divergence(Refused):
    """A harness that runs again does not do what its log says: nothing was sent, and nothing was run."""


class LogDamaged(OrchestratorError):
    """The context log is damaged where it is needed; the message names file and line."""

    exit_code = 4


class ArchiveRefused(OrchestratorError):
    """The archive is damaged or hostile; the message begins with the member's name. Nothing was taken from it."""

    exit_code = 4


class Busy(OrchestratorError):
    """Another orchestrator holds the run's lock."""

    exit_code = 5


class HostError(OrchestratorError):
    """The engine or the host is missing, unreachable or refused the request."""


class ContainerLost(HostError):
    """Neither the wanted state nor the one before could be put into the container: it stands in between."""


class ModelError(OrchestratorError):
    """The model gave no usable answer after all tries."""

    exit_code = 1
