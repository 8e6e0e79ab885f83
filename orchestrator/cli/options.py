"""Options and arguments that many commands share, and the data directory that they name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.data_dir import ROOT_VARIABLE, DataDir, default_root

if TYPE_CHECKING:
    from orchestrator.engine import Engine
    from orchestrator.engine_images import EngineImages

Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON document.")]
DataDirPath = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help=f"Where runs and snapshots are kept (default: ${ROOT_VARIABLE}, else the user's state directory).",
    ),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the beginning of one, or 'last'.")]
TaskPath = Annotated[Path, typer.Argument(metavar="TASK", help="Path of a task.yaml.")]
TrustTask = Annotated[bool, typer.Option("--trust-task", help="Grant rights that reach beyond the container.")]


def data_dir(given: Path | None) -> DataDir:
    """The data directory that is meant; nothing is made or checked yet."""
    return DataDir(given if given is not None else default_root(os.environ))


def existing_data_dir(given: Path | None) -> DataDir:
    """The data directory, checked; where there is none yet, none is made: it simply has no runs.

    Raises: HostError: it is not ours alone.
    """
    found = data_dir(given)
    return found.open() if found.root.exists() else found


def connect() -> Engine:
    """The engine that ``$DOCKER_HOST`` names, else the local one.

    Raises: HostError: it does not answer.
    """
    from orchestrator.engine import Engine

    return Engine.connect(os.environ.get("DOCKER_HOST") or None)


def connect_images() -> EngineImages:
    """The images of the engine that ``connect`` reaches.

    Raises: HostError: it does not answer.
    """
    from orchestrator.engine_images import EngineImages

    return EngineImages.connect(os.environ.get("DOCKER_HOST") or None)
