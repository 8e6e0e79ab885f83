"""The container of a run that nobody drives: found again, or made again where it is gone."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.container import Container
from orchestrator.container_config import ContainerConfig
from orchestrator.engine import Engine
from orchestrator.events import Event
from orchestrator.lineage import unfinished_intent
from orchestrator.resume_point import resume_point
from orchestrator.workload import remove_copies
from snapshot_drivers.errors import ContainerNotRunning


def reattach(
    engine: Engine, config: ContainerConfig, events: Sequence[Event], *, recreate: bool
) -> tuple[Container, bool]:
    """The run's container, and whether it is a new one. ``recreate``: it may be one, and runs.

    Raises: ContainerNotRunning: it is gone. HostError, EngineError.
    """
    try:
        container = Container.attach(engine, config)
    except ContainerNotRunning:
        if not recreate:
            raise
        return Container.recreate(engine, config), True
    if recreate and not container.is_whole():
        return Container.recreate(engine, config), True
    # Files that a restore has left half-way must not be started on: the one that finishes it starts.
    if recreate and unfinished_intent(events) is None and not container.running():
        container.start()
    return container, False


def reattach_to_resume(engine: Engine, config: ContainerConfig, events: Sequence[Event]) -> tuple[Container, bool]:
    """The run's container, running or not, and whether it is a new one: what it holds is about to be put back.

    Nothing of an earlier process is left beside it.

    Raises: HostError, EngineError.
    """
    remove_copies(engine, config)
    try:
        container = Container.attach(engine, config)
    except ContainerNotRunning:
        return Container.recreate(engine, config), True
    if resume_point(events).before_first_step:
        container.remove()  # with its volumes: nobody knows how far the set-up came
    elif container.is_whole():
        return container, False
    return Container.recreate(engine, config), True
