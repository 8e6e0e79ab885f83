"""Makes a run of this data directory out of an archive: taken in and checked first, then the engine, then the store.

The order is the invariant: nothing of the archive is in the store before all of it was checked; the run is there once
its directory is moved into place, and until then whatever else was written is garbage that no line names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict

from orchestrator import verify
from orchestrator.archive import form
from orchestrator.archive.head import read_head
from orchestrator.archive.intake import Intake
from orchestrator.archive.local_image import layer_directories, local_image
from orchestrator.archive.reader import Member, members
from orchestrator.archive.staging import Staging, staging
from orchestrator.container_config import ContainerConfig, ImageFacts, config_of
from orchestrator.context_log import ContextLog
from orchestrator.data_dir import RUNS, DataDir, checked_run_id
from orchestrator.engine import Engine
from orchestrator.engine_images import EngineImages
from orchestrator.errors import ArchiveRefused
from orchestrator.events import CheckpointEvent
from orchestrator.run_record import RunRecord
from snapshot_drivers.base import StateKind
from snapshot_drivers.crash_points import reached
from snapshot_drivers.criu.images import sealed
from snapshot_drivers.overlay.driver import OverlayDriver
from snapshot_drivers.overlay.portable import without_processes
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import Manifest, ManifestStore, new_snapshot_id
from snapshot_drivers.store.reach import Reach

Connect = Callable[[], tuple[Engine, EngineImages]]


class Unpacked(BaseModel):
    """What ``unpack`` answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    packed_as: str
    """The run's id in the archive."""
    breakpoints: list[int]
    """Those that can be restored."""
    snapshots: int
    image_id: str
    image_loaded: bool
    """The image came from the archive; false: the engine had it."""
    processes: bool
    """Snapshots hold the memory of processes, which a restore will run."""
    processes_dropped: bool
    """There were such, and they were left out."""


def unpack(
    stream: BinaryIO,
    place: DataDir,
    *,
    connect: Connect,
    run_id: str | None = None,
    trust_task: bool = False,
    trust_processes: bool = False,
) -> Unpacked:
    """The run in the archive is one of this data directory, under ``run_id`` or its own id.

    ``connect`` is called once the whole archive was checked. ``trust_task``: what its task asks of the host is granted.
    ``trust_processes``: memory of processes in it may be restored here.

    Raises: ArchiveRefused: with the member's name; nothing is left of it. Refused, TaskError: its task. UsageError: the
        run id is taken. HostError, EngineError, SnapshotError: engine or disk; nothing is left of it.
    """
    found = members(stream)
    first = next(found, None)
    if first is None:
        raise ArchiveRefused(f"{form.HEAD}: is missing: the archive is empty")
    head = read_head(first)
    with ExitStack() as stack:
        staged = stack.enter_context(staging(place, checked_run_id(run_id or head.run_id)))
        intake = Intake(staged, head, trust_task=trust_task, keep_processes=trust_processes, protected=(place.root,))
        stack.callback(intake.close)
        _take(intake, found)
        events = intake.finish()
        _verify(staged, intake, place)
        reached("archive-checked")
        engine, images = connect()
        stack.callback(images.close)
        place.install_helpers()
        facts, loaded = local_image(head.image, intake.spec, intake.image, engine, images, run_id=staged.run.run_id)
        config = _config(intake, staged, place, facts, engine.facts().cgroup_driver)
        staged.run.write_record(_record(intake, config))
        layers = layer_directories(engine, images, config)
        manifests = [_here(manifest, config, layers, place.root, trust_processes) for manifest in intake.manifests]
        _settle(staged, intake, manifests, place, lambda: engine.hold_image(facts.image_id, config.run_id))
    reached("archive-settled")
    had_processes = any(manifest.processes is not None for manifest in intake.manifests)
    return Unpacked(
        run_id=staged.run.run_id,
        packed_as=head.run_id,
        breakpoints=[
            event.breakpoint_id for event in events if isinstance(event, CheckpointEvent) and event.after is not None
        ],
        snapshots=len(manifests),
        image_id=facts.image_id,
        image_loaded=loaded,
        processes=had_processes and trust_processes,
        processes_dropped=had_processes and not trust_processes,
    )


def _take(intake: Intake, found: Iterator[Member]) -> None:
    """Everything behind the head is in the staging directory."""
    groups: dict[str, Callable[[Member], None]] = {
        form.TASK: intake.task,
        form.EVENTS: intake.events,
        "raw": intake.raw,
        "manifests": intake.manifest,
        "image/layers": intake.image.layer,
        form.IMAGE_CONFIG: intake.image.configuration,
    }
    intake.objects(_others(found, groups))


def _others(found: Iterator[Member], groups: dict[str, Callable[[Member], None]]) -> Iterator[Member]:
    """The objects; the other members on the way are taken by their groups."""
    for member in found:
        take = groups.get(member.name) or groups.get(member.name.rpartition("/")[0])
        if take is None:
            yield member
        else:
            take(member)


def _verify(staged: Staging, intake: Intake, place: DataDir) -> None:
    """Raises: ArchiveRefused: ``verify`` would find damage in the run."""
    manifests = ManifestStore(staged.store)
    for manifest in intake.manifests:
        manifests.write(manifest)
    image = intake.head.image
    facts = ImageFacts(image_id=image.image_id, layer_ids=tuple(image.layer_ids), architecture=image.architecture)
    staged.run.write_record(_record(intake, _config(intake, staged, place, facts, "none")))
    driver = OverlayDriver(staged.store)
    try:
        log = ContextLog.open(staged.run.events_path, staged.run.run_id)
        for problem in verify.verify(staged.run, log, driver, content=False).problems:
            line = f"line {problem.line}: " if problem.line is not None else ""
            raise ArchiveRefused(f"{Path(problem.file).name}: {line}{problem.text}")
    finally:
        driver.close()


def _config(intake: Intake, staged: Staging, place: DataDir, facts: ImageFacts, cgroup_driver: str) -> ContainerConfig:
    """The container's configuration follows from the task alone: what another host made of it is not asked."""
    return config_of(
        intake.spec,
        facts,
        run_id=staged.run.run_id,
        data_dir=place.root,
        helpers=place.bin,
        cgroup_driver=cgroup_driver,
    )


def _record(intake: Intake, config: ContainerConfig) -> RunRecord:
    return RunRecord(
        run_id=config.run_id,
        created_at=intake.head.created_at,
        orchestrator_version=intake.head.orchestrator_version,
        task_name=intake.spec.name,
        driver=intake.head.driver,
        source_dir=str(Path(config.data_dir) / RUNS / config.run_id),
        container=config,
    )


def _here(
    manifest: Manifest, config: ContainerConfig, layers: tuple[str, ...], data_dir: Path, processes: bool
) -> Manifest:
    """The manifest as this data directory would have written it: its engine's layers, its names, its seal.

    Raises: ArchiveRefused: it holds a volume that the task does not have.
    """
    volumes = {volume.path: volume.name for volume in config.volumes}
    trees = []
    for tree in manifest.trees:
        if tree.kind is StateKind.VOLUME and tree.path not in volumes:
            raise ArchiveRefused(f"{manifest.snapshot.snapshot_id}: its task has no volume at {tree.path}")
        name = volumes[tree.path] if tree.kind is StateKind.VOLUME else None
        trees.append(tree.model_copy(update={"name": name}))
    changes: dict[str, object] = {"lower_dirs": layers, "trees": tuple(trees), "image_id": config.image.image_id}
    if not processes and manifest.processes is not None:
        changes |= {"processes": None, "snapshot": without_processes(manifest.snapshot)}
    return sealed(manifest.model_copy(update=changes), data_dir)


def _settle(
    staged: Staging, intake: Intake, manifests: list[Manifest], place: DataDir, hold_image: Callable[[], None]
) -> None:
    """Content, manifests, and then the run are where everybody finds them.

    Raises: SnapshotError, UsageError; of what was written no snapshot is left.
    """
    content, stored = ContentStore(place.store), ManifestStore(place.store)
    try:
        reach = Reach(intake.content.read)
        for manifest in manifests:
            reach.add(manifest)
        with content.hold():
            with content.writer(new_snapshot_id()) as writer:
                for digest in reach.needed:
                    writer.put(intake.content.read(digest))
            reached("archive-stored")
            try:
                for manifest in manifests:
                    stored.write(manifest)
                    reached("archive-manifest")
                hold_image()
                staged.settle(place)
            except BaseException:
                for manifest in manifests:
                    stored.delete(manifest.snapshot.snapshot_id)
                raise
    finally:
        content.close()
