"""Garbage collection: content that no manifest needs is gone, what is needed lies compressed in few packs.

Which snapshots exist is decided elsewhere, by deleting manifests. Here their trees are walked, then packs are rewritten
(``compact``), a batch at a time: the room that it takes is that of one batch, and after a kill the next collection
starts from what is there. Temporary files are removed while the lock is held exclusively: nobody is writing them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snapshot_drivers.errors import StoreDamaged, UnknownSnapshot
from snapshot_drivers.store.compact import COMPACT_PREFIX, rewrite
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.durable import TEMPORARY
from snapshot_drivers.store.manifest import MANIFESTS, ManifestStore
from snapshot_drivers.store.pack import PACKS
from snapshot_drivers.store.reach import Reach

_BATCH_BYTES: Final = 256 << 20
_GARBAGE_SHARE: Final = 0.25
"""A compact pack with more garbage than that is rewritten."""
_SMALL_BYTES: Final = 16 << 20
"""Compact packs smaller than that are put together, where there are several."""


@dataclass(frozen=True)
class Collected:
    """What a collection did to the content."""

    bytes_before: int
    bytes_after: int
    packs_before: int
    packs_after: int
    temporary_files: int
    damaged_packs: tuple[str, ...]
    """Left as they are: ``fsck`` says more."""


class Collector:
    """One collection of one store."""

    def __init__(self, root: Path, *, accept_damage: bool = False) -> None:
        """``accept_damage``: collect although there are snapshots of which nobody knows what they need."""
        self._root = root
        self._content = ContentStore(root)
        self._manifests = ManifestStore(root)
        self._accept_damage = accept_damage
        self._reach = Reach(self._content.read)
        self._known: set[str] = set()
        """Snapshots whose needs are known, or cannot be known."""

    def run(self) -> Collected:
        """Nothing but what the manifests need is in the store, and the damaged packs.

        Raises: StoreDamaged: a snapshot is damaged so that its needs are not known; nothing was removed. OSError.
        """
        try:
            with self._content.lock.turn():
                self._mark()
                temporary = self._remove_temporary()
                before = self._content.locations.packs()
                damaged: set[str] = set()
                for batch in self._batches(before):
                    damaged |= rewrite(self._content, batch, self._reach.needed, self._mark)
                with self._content.lock.exclusive():
                    self._content.locations.remove_old()
                after = self._content.locations.packs()
        finally:
            self._content.close()
        return Collected(
            sum(before.values()), sum(after.values()), len(before), len(after), temporary, tuple(sorted(damaged))
        )

    def _mark(self) -> None:
        for snapshot_id in self._manifests.ids():
            if snapshot_id in self._known:
                continue
            self._known.add(snapshot_id)
            try:
                self._reach.add(self._manifests.read(snapshot_id))
            except UnknownSnapshot:
                continue  # deleted meanwhile
            except StoreDamaged as error:
                if not self._accept_damage:
                    raise StoreDamaged(
                        f"snapshot {snapshot_id} is damaged, so nobody knows what it needs, and nothing is removed: "
                        f"see orchestrator fsck, or pass --accept-damage ({error})"
                    ) from error

    def _batches(self, packs: dict[str, int]) -> Iterator[list[str]]:
        """Packs to be rewritten together: those without any needed object first, since that makes room at once."""
        needed: Counter[str] = Counter()
        for pack_id, digest, size in self._content.locations.objects():
            if digest in self._reach.needed:
                needed[pack_id] += size
        yield from filter(None, [[pack_id for pack_id in packs if not needed[pack_id]]])
        small = [one for one in packs if _is_compact(one) and needed[one] and packs[one] < _SMALL_BYTES]
        batch: list[str] = []
        for pack_id in sorted(packs, key=lambda one: one.partition("-")[2]):
            if not needed[pack_id] or (
                _is_compact(pack_id)
                and packs[pack_id] - needed[pack_id] <= _GARBAGE_SHARE * packs[pack_id]
                and (pack_id not in small or len(small) < 2)
            ):
                continue
            batch.append(pack_id)
            if sum(packs[one] for one in batch) > _BATCH_BYTES:
                yield batch
                batch = []
        if batch:
            yield batch

    def _remove_temporary(self) -> int:
        removed = 0
        with self._content.lock.exclusive():
            self._content.locations.fit(self._content.lock.epoch())
            for name in (PACKS, MANIFESTS):
                for path in (self._root / name).glob(f"{TEMPORARY}*"):
                    with suppress(OSError):
                        path.unlink()
                        removed += 1
        return removed


def _is_compact(pack_id: str) -> bool:
    return pack_id.startswith(f"{COMPACT_PREFIX}-")
