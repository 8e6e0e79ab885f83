"""Packs rewritten: what is needed of them goes, compressed, into a new one; then the old ones are removed.

Captures write their packs as they are, since a container may wait for them; they are small, and hold what nobody needs
any more. Here objects of many packs, in the order in which they were stored, are compressed together: two checkpoints'
versions of one directory take little more room than one.

The old packs stay in place while the new one is written; captures run on beside it. Only the swap excludes them, and it
looks again at what they have named meanwhile. After a kill anywhere there are some objects twice, and none missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from snapshot_drivers.errors import StoreDamaged
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.durable import create_temporary, publish, sync_directory
from snapshot_drivers.store.manifest import new_snapshot_id
from snapshot_drivers.store.pack import FRAME_BYTES, SUFFIX, Body, Place

COMPACT_PREFIX: Final = "c"
"""Begins the ids of packs that were written here."""


def write_pack(
    content: ContentStore, objects: Iterable[tuple[str, Place]], damaged: set[str]
) -> tuple[str, list[Place]]:
    """A new pack holds these objects (pack id, place), on the disk; nobody looks for them there yet.

    Packs of which one cannot be read are ``damaged``, and nothing more is taken from them. With the store's lock held,
    as all that writes files.

    Raises: OSError.
    """
    pack_id = COMPACT_PREFIX + new_snapshot_id()[1:]
    path = content.packs / (pack_id + SUFFIX)
    temporary, file = create_temporary(path)
    try:
        with file:
            body = Body(file)
            frame: list[tuple[bytes, bytes]] = []
            size = 0
            for source, place in objects:
                if source in damaged or place.digest in body:
                    continue
                try:
                    data = content.read_at(source, place)
                except StoreDamaged:
                    damaged.add(source)
                    continue
                if frame and size + len(data) > FRAME_BYTES:
                    body.add_frame(frame)
                    frame, size = [], 0
                frame.append((place.digest, data))
                size += len(data)
            if frame:
                body.add_frame(frame)
            places = body.finish()
            publish(temporary, file, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return pack_id, places


def rewrite(content: ContentStore, victims: list[str], needed: set[bytes], look_again: Callable[[], None]) -> set[str]:
    """The packs ``victims`` are gone, what is needed of them lies in a new one; the victims that had to stay.

    Those stay that are damaged. ``look_again`` adds to ``needed`` what others have come to need meanwhile; it is called
    when nobody stores.

    Raises: OSError: nothing is lost, the same can be done again.
    """
    damaged: set[str] = set()
    written: dict[str, list[Place]] = {}
    with content.hold():
        _copy(content, victims, needed, damaged, written)
    with content.lock.exclusive():
        content.locations.fit(content.lock.epoch())
        look_again()
        _copy(content, victims, needed, damaged, written)
        remove_packs(content, [victim for victim in victims if victim not in damaged], written)
    return damaged


def _copy(
    content: ContentStore, victims: list[str], needed: set[bytes], damaged: set[str], written: dict[str, list[Place]]
) -> None:
    """What is needed of the victims and is in no pack ``written`` yet is in another one of these."""
    there = {place.digest for places in written.values() for place in places}
    objects = [
        (victim, place)
        for victim in victims
        for place in content.locations.objects_of(victim)
        if place.digest in needed and place.digest not in there
    ]
    if objects:
        pack_id, places = write_pack(content, objects, damaged)
        written[pack_id] = places


def remove_packs(content: ContentStore, packs: list[str], written: dict[str, list[Place]]) -> None:
    """The packs are gone; what ``written`` holds is to be found there. With the store's lock held exclusively.

    Raises: OSError.
    """
    content.locations.replace(written, packs, content.lock.begin_epoch())
    for pack_id in packs:
        content.forget_pack(pack_id)
        (content.packs / (pack_id + SUFFIX)).unlink(missing_ok=True)
    sync_directory(content.packs)
