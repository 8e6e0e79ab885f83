"""The index of a container's trees on the disk, so that a new process need not read everything again.

A cache: it is believed only if its checksum is right, it is gone or ignored otherwise, and nothing is lost but time.
Flat (preorder with child counts), since trees may be deeper than any encoder nests.
"""

from __future__ import annotations

import os
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from snapshot_drivers.base import StateKind
from snapshot_drivers.overlay.capture import Index
from snapshot_drivers.overlay.scan import ScannedTree
from snapshot_drivers.tree import Node, Segment, digest_of, pack, unpack

INDEXES: Final = "indexes"
_FORMAT: Final = 2


def save_index(store: Path, container_id: str, index: Index) -> None:
    """The index is on the disk (not synced: a torn one is ignored)."""
    path = _path(store, container_id)
    if not index.trees:
        with suppress(FileNotFoundError):
            path.unlink()
        return
    trees = [
        [kind, mount, tree.digest, tree.taken_ns, tree.entries, _flat(tree.root)]
        for (kind, mount), tree in index.trees.items()
    ]
    data = pack([_FORMAT, str(index.upper), index.store_state, sorted(index.mapped), trees])
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(digest_of(data) + data)
        temporary.rename(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()


def load_index(store: Path, container_id: str) -> Index:
    """The stored index, or an empty one."""
    try:
        data = _path(store, container_id).read_bytes()
        if digest_of(data[32:]) != data[:32]:
            return Index()
        version, upper, store_state, mapped, trees = unpack(data[32:])
    except (OSError, ValueError):
        return Index()
    if version != _FORMAT:
        return Index()
    return Index(
        {
            (StateKind(kind), mount): ScannedTree(_nested(flat), digest, taken_ns, entries, 0)
            for kind, mount, digest, taken_ns, entries, flat in trees
        },
        frozenset(mapped),
        Path(upper),
        store_state,
    )


def clear_indexes(store: Path, *, keep: Set[str]) -> None:
    """Indexes of other containers are gone. Repeatable; one that is needed after all is made again.

    Raises: OSError.
    """
    for path in (store / INDEXES).glob("*"):
        if path.name not in keep:
            path.unlink(missing_ok=True)


def _path(store: Path, container_id: str) -> Path:
    return store / INDEXES / container_id[:64]


def _flat(root: Node) -> list[list[Any]]:
    rows: list[list[Any]] = []
    work = [root]
    while work:
        node = work.pop()
        children = list((node.children or {}).values())
        rows.append(
            [
                node.name,
                node.mode,
                node.uid,
                node.gid,
                node.mtime_ns,
                node.xattrs,
                node.flags,
                node.link,
                node.size,
                node.rdev,
                node.target,
                node.segments,
                node.unreadable,
                node.digests,
                node.ino,
                node.ctime_ns,
                len(children),
            ]
        )
        work.extend(reversed(children))
    return rows


def _nested(rows: list[list[Any]]) -> Node:
    root: Node | None = None
    open_directories: list[tuple[Node, int]] = []
    for row in rows:
        node = Node(*row[:5])
        node.xattrs = tuple((name, value) for name, value in row[5])
        node.flags, node.link, node.size, node.rdev, node.target = row[6:11]
        node.segments = tuple(Segment(*segment) for segment in row[11])
        node.unreadable = row[12]
        node.digests = tuple(row[13]) if row[13] is not None else None
        node.ino, node.ctime_ns, count = row[14:17]
        if node.is_directory:
            node.children = {}
        if root is None:
            root = node
        else:
            parent, left = open_directories.pop()
            assert parent.children is not None
            parent.children[node.name] = node
            if left > 1:
                open_directories.append((parent, left - 1))
        if count:
            open_directories.append((node, count))
    assert root is not None
    return root
