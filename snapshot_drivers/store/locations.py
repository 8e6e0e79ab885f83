"""Which pack holds which object: a database on the disk, made from the packs and made again whenever it does not fit.

The packs are the truth; this is a cache of their indexes, so that a process needs neither to read nor to remember those
of ten thousand packs. A transaction adds whole packs or removes whole packs. Where the database cannot be written (disk
full), the process goes on with one in memory.
"""

from __future__ import annotations

import itertools
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from snapshot_drivers.errors import StoreDamaged
from snapshot_drivers.store.location_files import LocationFiles, fill_new
from snapshot_drivers.store.pack import PACKS, SUFFIX, Place, packs_in, read_index

LOCATIONS: Final = "locations"
_AT_ONCE: Final = 500
_DAMAGED: Final = "UPDATE packs SET damage = ? WHERE name = ?"
_PLACE: Final = "digest, offset, stored, raw, start, length"
_Change = tuple[str, list[tuple[Any, ...]]]
"""A statement, and the values with which it is carried out."""


class Found(NamedTuple):
    """An object's place and the pack that it lies in."""

    pack_id: str
    place: Place


class Locations:
    """The cache of one store. No damage of the cache itself is ever an error: it is made anew."""

    def __init__(self, root: Path) -> None:
        """``root`` is the store directory; nothing is read or written before the first question."""
        self._files = LocationFiles(root / LOCATIONS)
        self._packs = root / PACKS
        self._number = -1
        self._in_memory = ""
        """A word for a database that no other process has; empty: it is on the disk."""
        self._database: sqlite3.Connection | None = None

    def close(self) -> None:
        """The database is closed. Repeatable."""
        if self._database is not None:
            self._database.close()
        self._database = None

    def find(self, digest: bytes) -> Found | None:
        """Where the object lies, as far as is known."""
        rows = self._rows(
            f"SELECT name, {_PLACE} FROM objects JOIN packs ON packs.id = pack WHERE digest = ?",  # noqa: S608 constant
            (digest,),
        )
        return Found(rows[0][0], Place(*rows[0][1:])) if rows else None

    def has_all(self, digests: Iterable[bytes]) -> bool:
        """Every one of these different objects is known."""
        left = iter(digests)
        while some := tuple(itertools.islice(left, _AT_ONCE)):
            question = f"SELECT count(*) FROM objects WHERE digest IN ({','.join('?' * len(some))})"  # noqa: S608 marks
            if self._rows(question, some)[0][0] < len(some):
                return False
        return True

    def fit(self, epoch: str) -> str:
        """The cache fits the store in that epoch; a word that stays the same as long as no object is removed.

        Call it with the store's lock held, as all methods that say so: packs come and go else while they are listed.
        """
        if (
            self._database is None
            or self._files.newest() > self._number
            or self._one("SELECT epoch FROM store") != epoch
        ):
            self.refresh(epoch)
        return f"{epoch}/{self._number}{self._in_memory}"

    def refresh(self, epoch: str) -> None:
        """Every pack that exists is known, and none that does not. With the lock held."""
        if not self._in_memory:
            self.close()
        there = packs_in(self._packs)
        if self.packs().items() - there.items():
            self.remake()  # a pack is gone or cut short: its objects may lie in others as well
        new = sorted(there.keys() - self.packs().keys())
        changes = [change for pack_id in new for change in self._pack_changes(pack_id, there[pack_id])]
        self._change([*changes, ("UPDATE store SET epoch = ?", [(epoch,)])])

    def add(self, pack_id: str, places: list[Place]) -> None:
        """The objects of a committed pack can be found; those that are known already stay where they are."""
        self._change(_additions(pack_id, self._size(pack_id), places, "INSERT OR IGNORE"))

    def replace(self, added: dict[str, list[Place]], removed: Iterable[str], epoch: str) -> None:
        """Packs are known no more; what ``added`` holds is to be found there. With the lock held exclusively.

        Before the packs are removed: what is known must be there at every moment.
        """
        changes = [
            change
            for pack_id, places in added.items()
            for change in _additions(pack_id, self._size(pack_id), places, "INSERT OR REPLACE")
        ]
        self._change(
            [
                *changes,
                ("DELETE FROM packs WHERE name = ?", [(name,) for name in removed]),
                ("DELETE FROM objects WHERE pack NOT IN (SELECT id FROM packs)", [()]),
                ("UPDATE store SET epoch = ?, bytes = (SELECT total(bytes) FROM packs)", [(epoch,)]),
            ]
        )

    def objects_of(self, pack_id: str) -> list[Place]:
        """The objects that are looked for in that pack, in its order."""
        rows = self._rows(
            f"SELECT {_PLACE} FROM objects "  # noqa: S608 constant
            "WHERE pack = (SELECT id FROM packs WHERE name = ?) ORDER BY offset, start",
            (pack_id,),
        )
        return [Place(*row) for row in rows]

    def objects(self) -> Iterator[tuple[str, bytes, int]]:
        """Every object: its pack, its digest, the bytes that it takes there. Nothing may be changed meanwhile."""
        yield from self._connection().execute(
            "SELECT name, digest, CASE raw WHEN 0 THEN length ELSE length * stored / raw END "
            "FROM objects JOIN packs ON packs.id = pack"
        )

    def packs(self) -> dict[str, int]:
        """The known packs and their sizes in bytes."""
        return dict(self._rows("SELECT name, bytes FROM packs"))

    def damage(self) -> list[str]:
        """What is wrong with packs whose index cannot be read."""
        return [text for (text,) in self._rows("SELECT damage FROM packs WHERE damage IS NOT NULL ORDER BY name")]

    def stored_bytes(self) -> int:
        """Bytes of all known packs."""
        return int(self._one("SELECT bytes FROM store"))

    def is_whole(self) -> bool:
        """The database agrees with itself."""
        try:
            return bool(self._connection().execute("PRAGMA quick_check").fetchone()[0] == "ok")
        except sqlite3.DatabaseError:
            return False

    def remake(self) -> None:
        """The cache is made from the packs, whatever it was. Unless the lock is held, it has to ``fit`` before use."""
        self.close()
        with suppress(OSError, sqlite3.Error):
            self._number, self._in_memory = self._files.make(self._fill), ""
            self._database = self._files.open(self._number)
        if self._database is None:
            self.ask_packs()

    def ask_packs(self) -> None:
        """Every pack is looked at, and what they say is kept in memory: no other process's cache is believed."""
        self.close()
        self._number, self._in_memory = self._files.newest() + 1, f"-{secrets.token_hex(8)}"
        self._database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        fill_new(self._database, self._fill)

    def remove_old(self) -> None:
        """Databases that were given up are gone. With the lock held exclusively."""
        with suppress(OSError):
            self._files.remove_old()

    def _fill(self, database: sqlite3.Connection) -> None:
        for pack_id, size in sorted(packs_in(self._packs).items()):
            for statement, values in self._pack_changes(pack_id, size):
                database.executemany(statement, values)

    def _pack_changes(self, pack_id: str, size: int) -> list[_Change]:
        """Packs that cannot be read cost their own objects, not those of others."""
        try:
            return _additions(pack_id, size, read_index(self._packs / (pack_id + SUFFIX)), "INSERT OR IGNORE")
        except FileNotFoundError:
            return []
        except (StoreDamaged, OSError) as error:
            return [*_additions(pack_id, size, [], "INSERT OR IGNORE"), (_DAMAGED, [(str(error), pack_id)])]

    def _size(self, pack_id: str) -> int:
        return (self._packs / (pack_id + SUFFIX)).stat().st_size

    def _connection(self) -> sqlite3.Connection:
        if self._database is None:
            self._number, self._in_memory = self._files.newest(), ""
            self._database = self._files.open(self._number)
            if self._database is None:
                self.remake()
            assert self._database is not None
        return self._database

    def _change(self, changes: list[_Change]) -> None:
        """All of the changes are made. Whatever the database cannot take is in the one that is made instead."""
        database = self._connection()
        try:
            database.execute("BEGIN IMMEDIATE")
            for statement, values in changes:
                database.executemany(statement, values)
            database.execute("COMMIT")
        except sqlite3.OperationalError:  # no room, or another process writes for too long
            self.ask_packs()
        except sqlite3.DatabaseError:
            self.remake()
        except BaseException:
            self.close()  # an interrupt: nothing was changed
            raise

    def _rows(self, question: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection().execute(question, values).fetchall()
        except sqlite3.DatabaseError:
            self.remake()
            return self._connection().execute(question, values).fetchall()

    def _one(self, question: str) -> Any:
        return self._rows(question)[0][0]


def _additions(pack_id: str, size: int, places: list[Place], how: str) -> list[_Change]:
    return [
        (
            "UPDATE store SET bytes = bytes + ? WHERE NOT EXISTS (SELECT 1 FROM packs WHERE name = ?)",
            [(size, pack_id)],
        ),
        ("INSERT OR IGNORE INTO packs (name, bytes) VALUES (?, ?)", [(pack_id, size)]),
        (
            f"{how} INTO objects SELECT ?, id, ?, ?, ?, ?, ? FROM packs WHERE name = ?",  # noqa: S608 constant
            [(*place, pack_id) for place in places],
        ),
    ]
