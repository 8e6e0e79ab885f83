"""The head of an archive: what it holds, with sizes and hashes; everything behind it is checked against it."""

from __future__ import annotations

import json
import re
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrator.archive import form
from orchestrator.archive.reader import Member
from orchestrator.errors import ArchiveRefused

FORMAT_VERSION: Final = 1
_RUN_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_SNAPSHOT_ID: Final = re.compile(r"s-[0-9a-v]{26}")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class PackedFile(_Part):
    """A file of the archive."""

    size: int
    digest: str
    """BLAKE3, hexadecimal."""


class PackedImage(_Part):
    """The image of the run's container."""

    image_id: str
    layer_ids: list[str]
    """Content addresses of its layers, lowest first."""
    architecture: str
    included: bool
    """Its layers are in the archive."""


class Head(_Part):
    """What the archive holds; everything is checked against it."""

    format: int = FORMAT_VERSION
    orchestrator_version: str
    run_id: str
    created_at: str
    """Of the run, ISO 8601, UTC."""
    driver: str
    image: PackedImage
    processes: bool
    """Images of processes are among the objects."""
    task: PackedFile
    events: PackedFile
    manifests: dict[str, PackedFile]
    """By snapshot id."""
    objects: int
    """How many there are."""


def check_snapshot_id(name: str, snapshot_id: str) -> None:
    """Raises: ArchiveRefused: the member ``name`` names a snapshot that no snapshot is called."""
    if not _SNAPSHOT_ID.fullmatch(snapshot_id):
        raise ArchiveRefused(f"{name}: {snapshot_id[:80]!r} is no name of a snapshot")


def read_head(member: Member) -> Head:
    """The archive's head.

    Raises: ArchiveRefused: it is none, or one of a newer version.
    """
    if member.name != form.HEAD:
        raise ArchiveRefused(f"{member.name}: stands where {form.HEAD} should: this is no archive of a run")
    data = member.read()
    try:
        plain = json.loads(data)
        version = plain.get("format") if isinstance(plain, dict) else None
        if version != FORMAT_VERSION:
            raise ArchiveRefused(f"{member.name}: format {version!r}: this version reads {FORMAT_VERSION} alone")
        head = Head.model_validate_json(data)
    except (ValueError, RecursionError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error
        raise ArchiveRefused(f"{member.name}: is no head of an archive: {reason}") from error
    if not _RUN_ID.fullmatch(head.run_id) or head.run_id == "last":
        raise ArchiveRefused(f"{member.name}: {head.run_id[:80]!r} is no id of a run")
    for snapshot_id in head.manifests:
        check_snapshot_id(member.name, snapshot_id)
    return head


def first_problem(error: ValidationError) -> str:
    """The first thing that pydantic found, without the foreign value."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
