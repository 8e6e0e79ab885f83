"""One line of what ``doctor`` reports."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict


class Finding(BaseModel):
    """One thing that the product needs or can use, and how it stands here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    ok: bool | None
    """``None``: cannot be told here, or is not there and need not be."""
    found: str
    """What was found, for a person."""
    remedy: str | None = None
    """What to do; always there where ``ok`` is false."""
    needed: bool = True
    """False: runs work without it."""


def works(findings: Iterable[Finding]) -> bool:
    """True if nothing that is needed has failed."""
    return not any(finding.needed and finding.ok is False for finding in findings)
