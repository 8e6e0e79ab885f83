"""The files of the cache of locations: databases by number, of which the newest counts.

A database that does not fit is given up, not repaired: other processes may have it open, and SQLite finds its log by
the name. So a name is never used twice.

Source for the guarantees: SQLite's write-ahead log with ``synchronous=NORMAL`` loses the last transactions at a power
cut, and tears none.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

from snapshot_drivers.store.durable import TEMPORARY

FORMAT: Final = 1
_ENDING: Final = ".sqlite"
_WAIT_S: Final = 10.0
_SCHEMA: Final = """
CREATE TABLE packs (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL, damage TEXT);
CREATE TABLE objects (digest BLOB PRIMARY KEY, pack INTEGER NOT NULL, offset INTEGER NOT NULL, stored INTEGER NOT NULL,
  raw INTEGER NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX objects_by_pack ON objects (pack);
CREATE TABLE store (epoch TEXT NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO store VALUES ('', 0);
"""

Fill = Callable[[sqlite3.Connection], None]
"""Puts everything into an empty database."""


class LocationFiles:
    """The databases of one store."""

    def __init__(self, directory: Path) -> None:
        """``directory`` is made with the first database."""
        self._directory = directory

    def newest(self) -> int:
        """The number of the database that counts; -1: there is none."""
        return max((number for number, rest in self._names() if not rest), default=-1)

    def open(self, number: int) -> sqlite3.Connection | None:
        """The database of that number; ``None``: it is not there, or is none of this format."""
        database = None
        try:
            # Not to be made here, where another process removes it meanwhile.
            uri = f"file:{quote(str(self._path(number).absolute()))}?mode=rw"
            database = sqlite3.connect(uri, uri=True, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
            if database.execute("PRAGMA user_version").fetchone()[0] == FORMAT:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("PRAGMA synchronous = NORMAL")
                return database
        except sqlite3.Error:
            pass
        if database is not None:
            database.close()
        return None

    def make(self, fill: Fill) -> int:
        """A new database counts from now on, or one that another process has made meanwhile; its number.

        Raises: OSError, sqlite3.Error: there is no room for it.
        """
        number = max((number for number, _ in self._names()), default=-1) + 1
        self._directory.mkdir(mode=0o700, exist_ok=True)
        temporary = self._directory / f"{TEMPORARY}{number}-{os.getpid()}{_ENDING}"
        try:
            temporary.unlink(missing_ok=True)
            temporary.touch(mode=0o600)  # SQLite's own files beside it get the same mode
            with closing(sqlite3.connect(temporary, isolation_level=None)) as database:
                fill_new(database, fill)
            with suppress(FileExistsError):
                self._path(number).hardlink_to(temporary)
        finally:
            with suppress(OSError):
                temporary.unlink()
        return number

    def remove_old(self) -> None:
        """Databases that were given up are gone. With the store's lock held exclusively.

        Raises: OSError.
        """
        newest = self.newest()
        for path in list(self._directory.iterdir()):
            if path.name.partition(_ENDING)[0] != str(newest):
                path.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}{_ENDING}"

    def _names(self) -> Iterator[tuple[int, str]]:
        """Numbers of files, each with what follows the name of its database: SQLite's own files beside it."""
        with suppress(OSError):
            for path in self._directory.iterdir():
                stem, ending, rest = path.name.partition(_ENDING)
                if ending and stem.isdecimal():
                    yield int(stem), rest


def fill_new(database: sqlite3.Connection, fill: Fill) -> None:
    """The empty database has its tables, and what ``fill`` puts into them.

    Raises: sqlite3.Error.
    """
    database.execute("PRAGMA journal_mode = OFF")
    database.executescript(_SCHEMA)
    database.execute(f"PRAGMA user_version = {FORMAT}")
    database.execute("BEGIN")
    fill(database)
    database.execute("COMMIT")
