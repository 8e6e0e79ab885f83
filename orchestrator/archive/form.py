"""The form of an archive: a plain tar stream of regular files, in one order, that anybody can list and read.

::

    head.json                        first: version, and what follows
    task.yaml                        as recorded: secrets redacted
    events.jsonl                     the context log
    raw/<SHA-256>.json.gz            large raw answers
    manifests/<snapshot id>.json     snapshots in portable form
    objects/<BLAKE3>                 nodes of trees and content, each once
    image/layers/<number>.tar        the image's layers, unless they were left out
    image/config.json                and its configuration

Names are strictly ascending within each group, every header is the one that a name and a size alone make, and behind
the two blocks of zeros there is nothing: a stream that says anything more is none of ours. It is not compressed, since
a compressed one could grow without bound when it is read; ``zstd`` and the like serve for that.
"""

from __future__ import annotations

import re
import tarfile
from typing import Final

BLOCK_BYTES: Final = 512
END: Final = bytes(2 * BLOCK_BYTES)

HEAD, TASK, EVENTS, IMAGE_CONFIG = "head.json", "task.yaml", "events.jsonl", "image/config.json"

GROUPS: Final[tuple[tuple[re.Pattern[str], int], ...]] = (
    (re.compile(r"head\.json"), 64 << 20),
    (re.compile(r"task\.yaml"), 1 << 20),
    (re.compile(r"events\.jsonl"), 4 << 30),
    (re.compile(r"raw/[0-9a-f]{64}\.json\.gz"), 64 << 20),
    (re.compile(r"manifests/s-[0-9a-v]{26}\.json"), 64 << 20),
    (re.compile(r"objects/[0-9a-f]{64}"), 64 << 20),
    (re.compile(r"image/layers/[0-9]{4}\.tar"), 1 << 40),
    (re.compile(r"image/config\.json"), 4 << 20),
)
"""All names that there are, in their order, with the size that none exceeds."""


def place_of(name: str) -> tuple[int, str] | None:
    """Where a member of that name stands in the order of all members; ``None``: there is no such member."""
    return next(((index, name) for index, (group, _) in enumerate(GROUPS) if group.fullmatch(name)), None)


def header(name: str, size: int) -> bytes:
    """The one header of a member of that name and size."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o600
    return member.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def padding(size: int) -> bytes:
    """What stands behind a member of that size."""
    return bytes(-size % BLOCK_BYTES)
