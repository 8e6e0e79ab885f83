"""Content-addressed objects: what is stored once stays readable by its digest, wherever it lies.

Objects are content only: mode, owner and links live in the tree that names them. They lie in packs (``pack``), which
are never changed; where each one lies is looked up in a cache (``locations``).

A file per object would cost a sync each: for 5,000 small files that reaches 7 % of the speed of ``cp -a``, one pack
93 %.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from snapshot_drivers.errors import StoreDamaged
from snapshot_drivers.store.limits import StoreLimits
from snapshot_drivers.store.locations import Found, Locations
from snapshot_drivers.store.lock import StoreLock
from snapshot_drivers.store.pack import PACKS, SUFFIX, Place, read_frame, read_object
from snapshot_drivers.store.writer import PackWriter
from snapshot_drivers.tree import digest_of

_OPEN_PACKS: Final = 60
_FRAMES_KEPT: Final = 8


class ContentStore:
    """Objects by digest. Many processes may store at once: packs have unique names and are never changed."""

    def __init__(self, root: Path) -> None:
        """``root`` is the store directory; it is made (0700) where it is missing."""
        self.root = root
        self.packs = root / PACKS
        self.packs.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.lock = StoreLock(root)
        self.locations = Locations(root)
        self._open: dict[str, int] = {}
        self._frames: dict[tuple[str, int], bytes] = {}
        self._looked = False

    def close(self) -> None:
        """Give back open descriptors. Repeatable."""
        self.locations.close()
        self._frames.clear()
        while self._open:
            os.close(self._open.popitem()[1])

    def __contains__(self, digest: bytes) -> bool:
        """Whether it is stored. An answer holds only as long as nothing is removed: see ``hold``."""
        self._look_once()
        return self.locations.find(digest) is not None

    def has_all(self, digests: Iterable[bytes]) -> bool:
        """Whether all of them are stored; as with one."""
        self._look_once()
        return self.locations.has_all(digests)

    def read(self, digest: bytes) -> bytes:
        """The object of that digest, checked against it.

        Raises: StoreDamaged: it is missing or its bytes differ.
        """
        found = self.locations.find(digest)
        trouble = ""
        if found is not None:
            try:
                return self._checked(found)
            except StoreDamaged as error:
                trouble = f"; {error}"
        # It may have been moved to another pack.
        again = self._look_again(digest)
        if again is not None and again != found:
            return self._checked(again)
        if again is None:
            trouble += "".join(f"; {text}" for text in self.locations.damage())
            raise StoreDamaged(
                f"object {digest.hex()} is in no pack below {self.packs}; snapshots that need it are lost{trouble}"
            )
        raise StoreDamaged(trouble.removeprefix("; "))

    @contextmanager
    def hold(self) -> Iterator[str]:
        """What is stored stays until the block ends: from the first look at it until a manifest names it.

        Gives the state that the store is in: as long as that is the same, nothing was removed in between.

        Raises: OSError.
        """
        with self.lock.shared():
            yield self.locations.fit(self.lock.epoch())

    @contextmanager
    def writer(self, pack_id: str, limits: StoreLimits | None = None) -> Iterator[PackWriter]:
        """A pack that is committed when the block ends without an exception, and leaves nothing behind otherwise.

        Who names its objects in a manifest, or those that it did not take because they were stored already, holds the
        store (``hold``) until that is written.

        Raises: CaptureError: the disk is full or cannot be written. LimitExceeded: a limit of the store is reached.
        """
        with self.hold(), PackWriter(self.packs, pack_id, self.locations, limits or StoreLimits()) as writer:
            yield writer
            writer.commit()

    def distrust(self) -> None:
        """From now on only the packs themselves say what is stored: for those who look for damage."""
        with self.lock.shared():
            self.locations.ask_packs()
            self.locations.fit(self.lock.epoch())
        self._looked = True

    def read_at(self, pack_id: str, place: Place) -> bytes:
        """The object at that place, whatever the locations say, checked.

        Raises: StoreDamaged: it is not there.
        """
        return self._checked(Found(pack_id, place))

    def _bytes_at(self, pack_id: str, place: Place) -> bytes:
        if not place.raw:
            return read_object(self._descriptor(pack_id), place)
        key = (pack_id, place.offset)
        frame = self._frames.get(key)
        if frame is None:
            frame = read_frame(self._descriptor(pack_id), place)
            while len(self._frames) >= _FRAMES_KEPT:
                del self._frames[next(iter(self._frames))]
            self._frames[key] = frame
        return frame[place.start : place.start + place.length]

    def forget_pack(self, pack_id: str) -> None:
        """Nothing of that pack is open or remembered any more."""
        if pack_id in self._open:
            os.close(self._open.pop(pack_id))
        self._frames = {key: frame for key, frame in self._frames.items() if key[0] != pack_id}

    def _checked(self, found: Found) -> bytes:
        pack_id, place = found
        path = self.packs / (pack_id + SUFFIX)
        try:
            data = self._bytes_at(pack_id, place)
        except OSError as error:
            raise StoreDamaged(f"cannot read object {place.digest.hex()} in {path}: {error}") from error
        except StoreDamaged as error:
            raise StoreDamaged(f"object {place.digest.hex()} in {path}: {error}") from error
        if digest_of(data) != place.digest:
            raise StoreDamaged(
                f"object {place.digest.hex()} at byte {place.offset + (0 if place.raw else place.start)} of {path} is "
                "not what was stored"
            )
        return data

    def _look_once(self) -> None:
        """Packs that other processes left before our time count as well."""
        if not self._looked:
            self._looked = True
            with self.hold():
                pass

    def _look_again(self, digest: bytes) -> Found | None:
        """The object's place when every pack that there is now has been looked at."""
        with self.lock.shared():
            self.locations.refresh(self.lock.epoch())
        return self.locations.find(digest)

    def _descriptor(self, pack_id: str) -> int:
        if pack_id not in self._open:
            if len(self._open) >= _OPEN_PACKS:
                os.close(self._open.pop(next(iter(self._open))))
            path = self.packs / (pack_id + SUFFIX)
            self._open[pack_id] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._open[pack_id]
