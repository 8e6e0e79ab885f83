"""Takes an archive into a staging directory and believes none of it: every member against the head, every name and
number against what a run of ours can hold. Needs no engine and touches nothing but the staging directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from blake3 import blake3
from pydantic import ValidationError

from orchestrator.archive import form, raw_answers
from orchestrator.archive.head import Head, PackedFile, check_snapshot_id, first_problem
from orchestrator.archive.image_intake import ImageIntake
from orchestrator.archive.log_lines import arriving, lines_of, snapshots_of
from orchestrator.archive.reader import Member
from orchestrator.archive.staging import Staging
from orchestrator.context_log import ContextLog
from orchestrator.errors import ArchiveRefused, LogDamaged
from orchestrator.events import Event, RunEvent
from orchestrator.log_line import encode
from orchestrator.task import TaskSpec, check_foreign
from snapshot_drivers.errors import StoreDamaged
from snapshot_drivers.overlay.foreign import ForeignSnapshots
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import Manifest, new_snapshot_id
from snapshot_drivers.store.reach import Reach

_TIME_CHARACTERS: Final = 12
"""Of a snapshot's name: ``s-`` and its moment."""


class Intake:
    """One archive on its way in. Each method takes the members of one group; ``finish`` looks at the whole."""

    def __init__(
        self,
        staged: Staging,
        head: Head,
        *,
        trust_task: bool,
        keep_processes: bool,
        protected: Iterable[Path] = (),
    ) -> None:
        """``keep_processes``: their images are taken in too. ``protected``: see ``task.check_foreign``."""
        self.head = head
        self.manifests: list[Manifest] = []
        """As they came, under the names that they have here."""
        self.image = ImageIntake(staged, head.image)
        self.content = ContentStore(staged.store)
        self._staged = staged
        self._trust_task = trust_task
        self._keep_processes = keep_processes
        self._protected = tuple(protected)
        self._spec: TaskSpec | None = None
        self._names: dict[str, str] = {}
        self._raw: dict[str, int] = {}
        self._sizes: dict[bytes, int] = {}

    @property
    def spec(self) -> TaskSpec:
        """The task, once it was taken."""
        if self._spec is None:
            raise ArchiveRefused(f"{form.TASK}: is missing")
        return self._spec

    def close(self) -> None:
        """Give back open descriptors. Repeatable."""
        self.content.close()

    def task(self, member: Member) -> None:
        """The task, checked like a new one. Raises: ArchiveRefused, TaskError, Refused."""
        data = self._whole(member, self.head.task)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ArchiveRefused(f"{member.name}: is no text: {error}") from error
        self._spec = check_foreign(text, member.name, trust=self._trust_task, protected=self._protected)
        self._staged.write(f"{self._staged.run.run_id}/{form.TASK}", (data,))

    def events(self, member: Member) -> None:
        """The log, each line an event of the run. Raises: ArchiveRefused."""
        digest = blake3()

        def hashed() -> Iterator[bytes]:
            for piece in member.pieces():
                digest.update(piece)
                yield piece

        def here() -> Iterator[bytes]:
            for number, line in enumerate(lines_of(hashed()), 1):
                event = arriving(line, number, self.head.run_id, self._renamed, processes=self._keep_processes)
                encoded = encode(event.model_copy(update={"run_id": self._staged.run.run_id}))
                self._raw.update(raw_answers.named_by(encoded))
                yield encoded

        self._staged.write(f"{self._staged.run.run_id}/{form.EVENTS}", here())
        self._fits(member, self.head.events, digest.hexdigest())

    def raw(self, member: Member) -> None:
        """A large answer that the log names. Raises: ArchiveRefused."""
        name = member.name.rpartition("/")[2]
        if name not in self._raw:
            raise ArchiveRefused(f"{member.name}: no event names it")
        data = member.read()
        raw_answers.check(member.name, data, self._raw.pop(name))
        self._staged.write(f"{self._staged.run.run_id}/{member.name}", (data,))

    def manifest(self, member: Member) -> None:
        """A snapshot's manifest. Raises: ArchiveRefused."""
        snapshot_id = member.name.rpartition("/")[2].removesuffix(".json")
        packed = self.head.manifests.get(snapshot_id)
        if packed is None:
            raise ArchiveRefused(f"{member.name}: the head does not name it")
        data = self._whole(member, packed)
        try:
            manifest = Manifest.model_validate_json(data)
        except ValidationError as error:
            raise ArchiveRefused(f"{member.name}: is no manifest: {first_problem(error)}") from error
        image = self.head.image
        if manifest.snapshot.snapshot_id != snapshot_id or manifest.format != Manifest.model_fields["format"].default:
            raise ArchiveRefused(f"{member.name}: is that of another snapshot, or of another version")
        if (list(manifest.layer_ids), manifest.architecture) != (image.layer_ids, image.architecture):
            raise ArchiveRefused(f"{member.name}: stands above other layers than those of the archive's image")
        if manifest.processes is not None and not self.head.processes:
            raise ArchiveRefused(f"{member.name}: holds processes, of which the head says nothing")
        snapshot = manifest.snapshot
        parent_id = self._names.get(snapshot.parent_id or "")
        names = {"snapshot_id": self._renamed(snapshot_id), "parent_id": parent_id}
        # The copy is new: garbage collection leaves a young snapshot alone, although no log names it yet.
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        renamed = snapshot.model_copy(update={**names, "created_at": now})
        self.manifests.append(manifest.model_copy(update={"snapshot": renamed, "run_id": self._staged.run.run_id}))

    def objects(self, members: Iterator[Member]) -> None:
        """All objects, each hashed and then stored in the staging directory.

        Raises: ArchiveRefused. SnapshotError: the disk is full.
        """
        with self.content.writer("archive") as writer:
            for member in members:
                if len(self._sizes) == self.head.objects:
                    raise ArchiveRefused(
                        f"{member.name}: there are more objects than the {len(self._sizes)} of the head"
                    )
                data = member.read()
                digest = bytes.fromhex(member.name.rpartition("/")[2])
                if blake3(data).digest() != digest:
                    raise ArchiveRefused(f"{member.name}: its content is not what its name says")
                writer.put(data)
                self._sizes[digest] = len(data)

    def finish(self) -> list[Event]:
        """Nothing is missing, nothing is there without being named, and every snapshot can be a captured one.

        Raises: ArchiveRefused.
        """
        if self._raw:
            raise ArchiveRefused(f"raw/{min(self._raw)}: is missing")
        events = self._checked_log()
        found = {manifest.snapshot.snapshot_id for manifest in self.manifests}
        for old, new in self._names.items():
            if new not in found:
                raise ArchiveRefused(f"manifests/{old}.json: is missing")
        if unnamed := found - snapshots_of(events):
            old = next(old for old, new in self._names.items() if new in unnamed)
            raise ArchiveRefused(f"manifests/{old}.json: no event names it")
        self.image.finish()
        self._check_snapshots()
        return events

    def _checked_log(self) -> list[Event]:
        try:
            log = ContextLog.open(self._staged.run.events_path, self._staged.run.run_id)
        except LogDamaged as error:
            raise ArchiveRefused(f"{form.EVENTS}: is missing") from error
        for damage in log.damage:
            raise ArchiveRefused(f"{form.EVENTS}: line {damage.line_number}: {damage.reason}")
        first = log.events[0] if log.events else None
        if not isinstance(first, RunEvent):
            raise ArchiveRefused(f"{form.EVENTS}: does not begin with the beginning of a run")
        try:
            same = TaskSpec.model_validate(first.task) == self.spec
        except ValidationError as error:
            raise ArchiveRefused(f"{form.EVENTS}: line 1: its task is none: {first_problem(error)}") from error
        if not same or first.driver != self.head.driver or self.spec.snapshots.driver != self.head.driver:
            raise ArchiveRefused(f"{form.EVENTS}: line 1: is of another task than {form.TASK}, or of another driver")
        return log.events

    def _check_snapshots(self) -> None:
        reach = Reach(self.content.read)
        foreign = ForeignSnapshots(self.content.read, self._sizes, devices=self._trust_task)
        for manifest in self.manifests:
            old = next(old for old, new in self._names.items() if new == manifest.snapshot.snapshot_id)
            try:
                foreign.check(manifest)
                reach.add(manifest)
            except StoreDamaged as error:
                raise ArchiveRefused(f"manifests/{old}.json: {error}") from error
        for digest in reach.needed - self._sizes.keys():
            raise ArchiveRefused(f"objects/{digest.hex()}: is missing")
        for digest in self._sizes.keys() - reach.needed:
            raise ArchiveRefused(f"objects/{digest.hex()}: no snapshot needs it")
        if len(self._sizes) != self.head.objects:
            raise ArchiveRefused(f"{form.HEAD}: says {self.head.objects} objects, there are {len(self._sizes)}")

    def _renamed(self, snapshot_id: str) -> str:
        """The name that a snapshot has here: of the same moment, and nobody else's, whatever the archive says."""
        check_snapshot_id(form.EVENTS, snapshot_id)
        if snapshot_id not in self._names:
            if snapshot_id not in self.head.manifests:
                raise ArchiveRefused(f"manifests/{snapshot_id}.json: is missing in the head")
            random = new_snapshot_id()[_TIME_CHARACTERS:]
            self._names[snapshot_id] = snapshot_id[:_TIME_CHARACTERS] + random
        return self._names[snapshot_id]

    def _whole(self, member: Member, packed: PackedFile) -> bytes:
        data = member.read()
        self._fits(member, packed, blake3(data).hexdigest())
        return data

    def _fits(self, member: Member, packed: PackedFile, digest: str) -> None:
        if (member.size, digest) != (packed.size, packed.digest):
            raise ArchiveRefused(f"{member.name}: is not what the head says (size or hash)")
