"""What a commit says: a workspace's files, read from git's trees object by object, each checked against its name."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from snapshot_drivers.base import Snapshot
from snapshot_drivers.errors import StoreDamaged, UnknownSnapshot
from snapshot_drivers.git.repository import Repository

_NAME_BYTES: Final = 32
PLAIN: Final = 0o100644
EXECUTABLE: Final = 0o100755
LINK: Final = 0o120000
_TREE: Final = 0o40000


class Tracked(NamedTuple):
    """A file or symbolic link as git holds it."""

    mode: int
    """``PLAIN``, ``EXECUTABLE`` or ``LINK``."""
    blob: bytes
    """Name of its content (a link: of its target)."""


Listing = dict[bytes, Tracked]
"""Files and links of a workspace by their paths below it."""


class Facts(BaseModel):
    """The message of a snapshot's commit: what a tree of git has no place for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = 1
    snapshot: Snapshot
    workspace: str
    """The directory in the container that the tree is of."""
    untracked: tuple[str, ...] = ()
    """Hex of the paths of what stood there and is not held: a restore leaves it where it still stands."""

    def message(self) -> bytes:
        """Its stored form."""
        return json.dumps(self.model_dump(mode="json"), separators=(",", ":")).encode()


class Commit(NamedTuple):
    """A stored snapshot."""

    name: str
    tree: str
    facts: Facts


def read_commit(repository: Repository, snapshot_id: str) -> Commit:
    """The commit of that snapshot.

    Raises: UnknownSnapshot, StoreDamaged.
    """
    name = repository.resolve(snapshot_id)
    if name is None:
        raise UnknownSnapshot(f"the git repository of this store holds no snapshot {snapshot_id!r}")
    kind, data = repository.read(name)
    head, _, message = data.partition(b"\n\n")
    first = head.split(b"\n")[0].split(b" ")
    if kind != "commit" or first[0] != b"tree":
        raise StoreDamaged(f"snapshot {snapshot_id} names {name}, which is no commit")
    try:
        facts = Facts.model_validate_json(message)
    except ValidationError as error:
        raise StoreDamaged(f"commit {name} of {snapshot_id} is not ours: {error.errors()[0]['msg']}") from error
    if facts.snapshot.snapshot_id != snapshot_id:
        raise StoreDamaged(f"commit {name} is that of another snapshot ({facts.snapshot.snapshot_id})")
    return Commit(name, first[1].decode(), facts)


def read_tree(repository: Repository, name: str) -> dict[bytes, Tracked]:
    """The entries of one tree; those that are trees have the mode of a directory.

    Raises: StoreDamaged.
    """
    kind, data = repository.read(name)
    if kind != "tree":
        raise StoreDamaged(f"object {name} is no tree")
    found: dict[bytes, Tracked] = {}
    position = 0
    while position < len(data):
        space = data.index(b" ", position)
        end = data.index(b"\0", space)
        found[data[space + 1 : end]] = Tracked(int(data[position:space], 8), data[end + 1 : end + 1 + _NAME_BYTES])
        position = end + 1 + _NAME_BYTES
    return found


def is_tree(entry: Tracked | None) -> bool:
    """True for a directory."""
    return entry is not None and entry.mode == _TREE


def read_listing(repository: Repository, tree: str) -> Listing:
    """All files below a tree.

    Raises: StoreDamaged.
    """
    found: Listing = {}
    work = [(b"", tree)]
    while work:
        above, name = work.pop()
        for part, entry in read_tree(repository, name).items():
            if is_tree(entry):
                work.append((above + part + b"/", entry.blob.hex()))
            else:
                found[above + part] = entry
    return found


def find(repository: Repository, tree: str, path: bytes) -> Tracked | None:
    """What stands at a path below a tree; ``None``: nothing.

    Raises: StoreDamaged.
    """
    entry: Tracked | None = Tracked(_TREE, bytes.fromhex(tree))
    for part in path.split(b"/"):
        if entry is None or not is_tree(entry):
            return None
        entry = read_tree(repository, entry.blob.hex()).get(part)
    return entry


def differences(repository: Repository, older: str | None, newer: str) -> Iterator[tuple[str, bytes]]:
    """Status (see ``base.Change``) and path of what differs between two trees, in the order of the paths.

    Trees of one name are not looked into. Raises: StoreDamaged.
    """
    found: list[tuple[bytes, str]] = []
    work: list[tuple[bytes, str | None, str | None]] = [(b"", older, newer)]
    while work:
        above, one, two = work.pop()
        before = read_tree(repository, one) if one is not None else {}
        after = read_tree(repository, two) if two is not None else {}
        for part in before.keys() | after.keys():
            was, now, path = before.get(part), after.get(part), above + part
            if was == now:
                continue
            if status := _status(was, now):
                found.append((path, status))
            if is_tree(was) or is_tree(now):
                deeper = [entry.blob.hex() if entry and is_tree(entry) else None for entry in (was, now)]
                work.append((path + b"/", deeper[0], deeper[1]))
    return ((status, path) for path, status in sorted(found))


def _status(was: Tracked | None, now: Tracked | None) -> str | None:
    if was is None or now is None:
        # Git holds no directories of their own, only what is in them.
        return None if is_tree(was or now) else "A" if was is None else "D"
    if stat.S_IFMT(was.mode) != stat.S_IFMT(now.mode):
        return "T"
    if is_tree(was):
        return None
    return "M" if was.blob != now.blob else "m"


def listing_digest(listing: Listing) -> str:
    """Equal for equal listings."""
    digest = hashlib.sha256()
    for path in sorted(listing):
        digest.update(b"%o %s %s\0" % (listing[path].mode, listing[path].blob, path))
    return digest.hexdigest()
