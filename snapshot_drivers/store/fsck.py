"""Every byte of the store read again; what is not what was stored is taken out of it, so that it can be stored again.

A damaged object that stays in its place counts as stored: no capture would store it again, although the container may
still have it. So a pack with damage goes to ``quarantine/``, what is whole of it into a new pack, and the rest is
missing from then on: a snapshot that needs it says so, until a capture stores it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snapshot_drivers.errors import StoreDamaged, UnknownSnapshot
from snapshot_drivers.store.compact import remove_packs, write_pack
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.durable import sync_directory
from snapshot_drivers.store.manifest import ManifestStore
from snapshot_drivers.store.pack import SUFFIX, Place, packs_in, read_index

QUARANTINE: Final = "quarantine"


@dataclass(frozen=True)
class DamagedPack:
    """A pack that is not as it was written."""

    pack_id: str
    text: str
    """What is wrong with it, in words."""
    damaged: tuple[bytes, ...]
    """Objects of it that are not what they were; another pack may hold them whole."""
    rescued: int
    """Objects that lie in another pack now."""
    moved_to: Path | None
    """Where it was put; ``None``: it was left as it is."""


@dataclass(frozen=True)
class StoreCheck:
    """What a check of a store found."""

    packs: int
    objects: int
    content_bytes: int
    lost: frozenset[bytes]
    """Objects that were known and are whole nowhere in the store."""
    damaged: tuple[DamagedPack, ...]
    snapshots: int
    bad_manifests: dict[str, str]
    """What is wrong with them, by snapshot."""
    cache_remade: bool
    """The locations disagreed with the packs; nothing is lost by that."""

    @property
    def is_whole(self) -> bool:
        """Nothing that counts is damaged."""
        return not self.damaged and not self.bad_manifests


class StoreChecker:
    """One check of one store."""

    def __init__(self, root: Path, *, repair: bool = True) -> None:
        """``repair``: damaged packs are put aside; without it nothing is changed but the cache."""
        self._content = ContentStore(root)
        self._manifests = ManifestStore(root)
        self._quarantine = root / QUARANTINE
        self._repair = repair
        self._objects = 0
        self._bytes = 0
        self._misplaced = False

    def run(self) -> StoreCheck:
        """Every pack and every manifest has been read.

        Raises: OSError: the store cannot be read, or a damaged pack not be put aside.
        """
        try:
            with self._content.lock.turn():
                remade = self._check_cache()
                found = [pack_id for pack_id in sorted(packs_in(self._content.packs)) if self._trouble(pack_id)]
                damaged = tuple(self._put_aside(pack_id) for pack_id in found)
                if damaged or self._misplaced:
                    self._content.locations.remake()
                lost = {digest for pack in damaged for digest in pack.damaged if digest not in self._content}
                bad = dict(self._bad_manifests())
                return StoreCheck(
                    packs=len(packs_in(self._content.packs)),
                    objects=self._objects,
                    lost=frozenset(lost),
                    content_bytes=self._bytes,
                    damaged=damaged,
                    snapshots=len(self._manifests.ids()),
                    bad_manifests=bad,
                    cache_remade=remade or self._misplaced,
                )
        finally:
            self._content.close()

    def _check_cache(self) -> bool:
        with self._content.lock.shared():
            whole = self._content.locations.is_whole()
            if not whole:
                self._content.locations.remake()
            self._content.locations.fit(self._content.lock.epoch())
        return not whole

    def _trouble(self, pack_id: str) -> str | None:
        """What is wrong with the pack; ``None``: nothing. Counts what it holds."""
        try:
            places = read_index(self._content.packs / (pack_id + SUFFIX))
        except (StoreDamaged, OSError) as error:
            return str(error)
        self._misplaced = self._misplaced or not set(self._content.locations.objects_of(pack_id)) <= set(places)
        trouble = None
        for place in places:
            try:
                self._bytes += len(self._content.read_at(pack_id, place))
                self._objects += 1
            except StoreDamaged as error:
                trouble = trouble or str(error)
        self._content.forget_pack(pack_id)
        return trouble

    def _put_aside(self, pack_id: str) -> DamagedPack:
        """The pack is in quarantine, and what is whole of it in another one. Nobody stores meanwhile."""
        path = self._content.packs / (pack_id + SUFFIX)
        with self._content.lock.exclusive():
            self._content.locations.fit(self._content.lock.epoch())
            text = self._trouble(pack_id) or "it was damaged a moment ago"
            whole, damaged = self._sorted_out(pack_id)
            if not self._repair:
                return DamagedPack(pack_id, text, damaged, 0, None)
            written: dict[str, list[Place]] = {}
            if whole:
                new_id, places = write_pack(self._content, ((pack_id, place) for place in whole), set())
                written[new_id] = places
            self._quarantine.mkdir(mode=0o700, exist_ok=True)
            moved_to = self._quarantine / path.name
            # A second name first: what is removed from the store was damaged, not unknown.
            moved_to.unlink(missing_ok=True)
            moved_to.hardlink_to(path)
            sync_directory(self._quarantine)
            remove_packs(self._content, [pack_id], written)
        return DamagedPack(pack_id, text, damaged, len(whole), moved_to)

    def _sorted_out(self, pack_id: str) -> tuple[list[Place], tuple[bytes, ...]]:
        """The pack's whole objects, and those that are not. Without its index, the cache still knows what it held."""
        try:
            places = read_index(self._content.packs / (pack_id + SUFFIX))
        except (StoreDamaged, OSError):
            places = self._content.locations.objects_of(pack_id)
        whole = []
        damaged = []
        for place in places:
            try:
                self._content.read_at(pack_id, place)
                whole.append(place)
            except StoreDamaged:
                damaged.append(place.digest)
        return whole, tuple(damaged)

    def _bad_manifests(self) -> Iterator[tuple[str, str]]:
        for snapshot_id in self._manifests.ids():
            try:
                self._manifests.read(snapshot_id)
            except UnknownSnapshot:
                continue
            except StoreDamaged as error:
                yield snapshot_id, str(error)
