"""Writes a run into an archive: its log, its snapshots in portable form, the image's layers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from orchestrator.archive import form, raw_answers
from orchestrator.archive.head import Head, PackedFile, PackedImage
from orchestrator.archive.log_lines import leaving, snapshots_of, snapshots_on_path, up_to
from orchestrator.archive.writer import ArchiveWriter, new_archive
from orchestrator.aside import DIRECTORY as RAW
from orchestrator.container_config import ImageFacts
from orchestrator.context_log import ContextLog
from orchestrator.engine_images import MOST_CONFIG_BYTES, EngineImages, pieces_of
from orchestrator.errors import HostError, LogDamaged, UsageError
from orchestrator.events import CheckpointEvent, Event
from orchestrator.log_line import encode
from orchestrator.run_dir import RunDir, read_file
from orchestrator.task import load_recorded
from snapshot_drivers.errors import EngineError, UnknownSnapshot
from snapshot_drivers.overlay.portable import Porter
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import Manifest, ManifestStore
from snapshot_drivers.store.reach import Reach
from snapshot_drivers.tree import digest_of

PACKABLE: Final = frozenset({"overlay", "criu"})
"""Drivers whose snapshots lie in the store."""
_SHORTEST_SECRET: Final = 6


class Packed(BaseModel):
    """What ``pack`` answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    file: str
    file_bytes: int
    breakpoints: list[int]
    """Those that can be restored from the archive."""
    left_out: list[int]
    """Those that are in its log, but whose snapshots are not in it."""
    snapshots: int
    objects: int
    image: bool
    processes: bool
    attributes_left_out: dict[str, int]
    """Extended attributes that mean nothing on another host, and how many entries had them."""
    secrets: list[str]
    """Secrets of the task whose values stand in files of the snapshots."""


@dataclass(frozen=True)
class _Snapshots:
    """Snapshots in portable form, and what they need."""

    manifests: dict[str, Manifest]
    store: ContentStore
    changed: ContentStore
    """Nodes that the store does not have in that form."""
    objects: list[bytes]
    left_out: dict[str, int]

    def read(self, digest: bytes) -> bytes:
        return self.changed.read(digest) if digest in self.changed else self.store.read(digest)


def pack(
    run: RunDir,
    store: Path,
    to: Path,
    *,
    environ: Mapping[str, str],
    breakpoint_id: int | None = None,
    images: EngineImages | None = None,
    processes: bool = False,
) -> Packed:
    """The archive of a run is at ``to``; with ``breakpoint_id``, of the run as it was at that checkpoint.

    ``images``: where the image's layers come from; ``None`` leaves them out. ``environ``: for the values of secrets,
    which are looked for.

    Raises: UsageError, LogDamaged, StoreDamaged, RestoreRefused: a snapshot cannot leave this host. EngineError.
        HostError: the archive cannot be written.
    """
    record = run.read_record()
    if record.driver not in PACKABLE:
        raise UsageError(f"run {run.run_id}: the driver {record.driver} keeps nothing that could be packed")
    events = _events(run)
    if breakpoint_id is not None:
        events = up_to(events, breakpoint_id)
    wanted = snapshots_of(events) if breakpoint_id is None else snapshots_on_path(events)
    with ExitStack() as stack:
        found = stack.enter_context(_snapshots(store, wanted, to.absolute().parent, processes=processes))
        kept = {snapshot_id: manifest.snapshot for snapshot_id, manifest in found.manifests.items()}
        leaving_events = [leaving(event, kept) for event in events]
        lines = [encode(event) for event in leaving_events]
        raw = _raw_files(run, lines)
        texts = {name: manifest.model_dump_json().encode() for name, manifest in sorted(found.manifests.items())}
        task = read_file(run.task_path)
        secrets = load_recorded(run.task_path, source_dir=run.path, environ=environ).secrets
        seen = _Watch(secrets)
        archive = stack.enter_context(new_archive(to))
        head = Head(
            orchestrator_version=record.orchestrator_version,
            run_id=run.run_id,
            created_at=record.created_at,
            driver=record.driver,
            image=_packed_image(record.container.image, included=images is not None),
            processes=any(manifest.processes for manifest in found.manifests.values()),
            task=_packed([task]),
            events=_packed(lines),
            manifests={name: _packed([text]) for name, text in texts.items()},
            objects=len(found.objects),
        )
        archive.add(form.HEAD, head.model_dump_json().encode())
        archive.add(form.TASK, task)
        archive.add_stream(form.EVENTS, head.events.size, lines)
        for name, path in raw.items():
            archive.add(f"{RAW}/{name}", read_file(path))
        for name, text in texts.items():
            archive.add(f"manifests/{name}.json", text)
        for digest in found.objects:
            data = found.read(digest)
            seen.look(data)
            archive.add(f"objects/{digest.hex()}", data)
        if images is not None:
            _add_image(archive, images, record.container.image)
    return Packed(
        run_id=run.run_id,
        file=str(to),
        file_bytes=to.stat().st_size,
        breakpoints=[event.breakpoint_id for event in _checkpoints(leaving_events) if event.after is not None],
        left_out=[
            event.breakpoint_id
            for event, before in zip(_checkpoints(leaving_events), _checkpoints(events), strict=True)
            if event.after is None and before.after is not None
        ],
        snapshots=len(found.manifests),
        objects=head.objects,
        image=images is not None,
        processes=head.processes,
        attributes_left_out=found.left_out,
        secrets=sorted(seen.found),
    )


def _events(run: RunDir) -> list[Event]:
    """Raises: LogDamaged: what cannot be read would be missing in the archive without a word."""
    log = ContextLog.open(run.events_path, run.run_id)
    damage = next((one for one in log.damage if not one.torn), None)
    if damage is not None:
        raise LogDamaged(f"{log.path}:{damage.line_number}: {damage.reason}: a damaged log is not packed")
    if not log.events:
        raise LogDamaged(f"{log.path}: is empty: there is nothing to pack")
    return log.events


@contextmanager
def _snapshots(store: Path, wanted: set[str], beside: Path, *, processes: bool) -> Iterator[_Snapshots]:
    """The wanted snapshots that the store still has, in portable form."""
    content, manifests = ContentStore(store), ManifestStore(store)
    try:
        with tempfile.TemporaryDirectory(prefix=".pack-", dir=beside) as directory:
            changed = ContentStore(Path(directory))
            try:
                ported: dict[str, Manifest] = {}
                with changed.writer("changed") as writer:

                    def put(node: bytes) -> bytes:
                        digest = digest_of(node)
                        return digest if digest in content else writer.put(node)

                    porter = Porter(content.read, put)
                    for snapshot_id in sorted(wanted):
                        try:
                            manifest = manifests.read(snapshot_id)
                        except UnknownSnapshot:
                            continue  # forgotten since: its breakpoints are named in the answer
                        ported[snapshot_id] = porter.ported(manifest, processes=processes)
                found = _Snapshots(ported, content, changed, [], dict(porter.left_out))
                reach = Reach(found.read)
                for manifest in ported.values():
                    reach.add(manifest)
                found.objects.extend(sorted(reach.needed))
                yield found
            finally:
                changed.close()
    except OSError as error:
        raise HostError(f"cannot work in {beside}: {error.strerror}: see to the disk there") from error
    finally:
        content.close()


def _raw_files(run: RunDir, lines: Sequence[bytes]) -> dict[str, Path]:
    """Raises: LogDamaged: one is gone."""
    found = {}
    for name in sorted({name for line in lines for name, _ in raw_answers.named_by(line)}):
        path = run.path / RAW / name
        if not path.is_file() or path.is_symlink():
            raise LogDamaged(f"{path}: the raw answer is gone (see: orchestrator verify {run.run_id})")
        found[name] = path
    return found


def _add_image(archive: ArchiveWriter, images: EngineImages, image: ImageFacts) -> None:
    """Raises: EngineError: the engine does not have the image any more, or sends another one."""
    layers = {layer_id.removeprefix("sha256:") for layer_id in image.layer_ids}
    small: dict[str, bytes] = {}
    written = 0
    for file in images.saved(image.image_id):
        directory, _, name = file.name.rpartition("/")
        if name == "layer.tar" or (directory.endswith("sha256") and name in layers):
            archive.add_stream(f"image/layers/{written:04}.tar", file.size, pieces_of(file.content))
            written += 1
        elif file.size <= MOST_CONFIG_BYTES:
            small[file.name] = file.content.read()
    config = _config_in(small)
    if config is None or written < len(layers):
        raise EngineError(
            f"the engine did not send all layers of image {image.image_id} as they lie below its containers "
            "(containerd's image store may keep them compressed): pass --without-image to leave them out"
        )
    archive.add(form.IMAGE_CONFIG, config)


def _config_in(files: Mapping[str, bytes]) -> bytes | None:
    """The configuration of the one image among the small files of a saved image."""
    try:
        (manifest,) = json.loads(files["manifest.json"])
        return files[manifest["Config"]]
    except (KeyError, TypeError, ValueError):
        return None


def _packed_image(image: ImageFacts, *, included: bool) -> PackedImage:
    return PackedImage(
        image_id=image.image_id,
        layer_ids=list(image.layer_ids),
        architecture=image.architecture,
        included=included,
    )


def _packed(pieces: Sequence[bytes]) -> PackedFile:
    return PackedFile(size=sum(map(len, pieces)), digest=digest_of(b"".join(pieces)).hex())


def _checkpoints(events: Sequence[Event]) -> list[CheckpointEvent]:
    return [event for event in events if isinstance(event, CheckpointEvent)]


class _Watch:
    """Looks for the values of secrets in content. One that is cut by the border of two blocks is not seen."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._values = {name: value.encode() for name, value in secrets.items() if len(value) >= _SHORTEST_SECRET}
        self.found: set[str] = set()

    def look(self, data: bytes) -> None:
        self.found.update(name for name, value in self._values.items() if value in data)
