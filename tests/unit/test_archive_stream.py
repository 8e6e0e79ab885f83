"""Streams that are no archive of ours: each is refused at the member where it differs, and nothing has changed."""

from __future__ import annotations

import gzip
import io
import resource
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.archive import form
from orchestrator.archive.reader import members
from orchestrator.errors import ArchiveRefused
from tests.unit.archive_maker import Archive, Host, member


def raw_stream(original: Path, *, before: bytes = b"", after: bytes = b"", cut: int = 0) -> bytes:
    data = original.read_bytes()[: -len(form.END)]
    return before + (data[:-cut] if cut else data) + (after or b"") + (b"" if cut else form.END)


LINKS = {"linkname": "/etc/passwd"}
STREAMS: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "a path that leads away": (lambda at: raw_stream(at, after=member("../../etc/x", b"x")), "../../etc/x"),
    "an absolute path": (lambda at: raw_stream(at, after=member("/etc/cron.d/x", b"x")), "/etc/cron.d/x"),
    "an unknown member": (lambda at: raw_stream(at, after=member("secrets.env", b"x")), "secrets.env"),
    "a symbolic link": (
        lambda at: raw_stream(at, after=member("objects/x", b"", type=tarfile.SYMTYPE, **LINKS)), "x: is a symbolic"),
    "a hard link": (
        lambda at: raw_stream(at, after=member("objects/x", b"", type=tarfile.LNKTYPE, **LINKS)), "x: is a hard link"),
    "a device": (lambda at: raw_stream(at, after=member("d", b"", type=tarfile.BLKTYPE, devmajor=8)), "d: is a device"),
    "a fifo": (lambda at: raw_stream(at, after=member("f", b"", type=tarfile.FIFOTYPE)), "f: is a fifo"),
    "a directory": (lambda at: raw_stream(at, after=member("objects", b"", type=tarfile.DIRTYPE)), "is a directory"),
    "an extended header": (
        lambda at: raw_stream(at, after=member("h", b"30 SCHILY.xattr.trusted.x=yyyy\n", type=tarfile.XHDTYPE)),
        "h: is an extended header"),
    "a long name of 8 GiB": (
        lambda at: raw_stream(at, after=_huge(tarfile.GNUTYPE_LONGNAME)),
        "is a long name"),
    "a sparse file": (lambda at: raw_stream(at, after=member("s", b"", type=tarfile.GNUTYPE_SPARSE)), "s: is sparse"),
    "a setuid member": (
        lambda at: raw_stream(at, after=member(f"objects/{'f' * 64}", b"x", mode=0o4755)), "says more than a name"),
    "a member of somebody": (
        lambda at: raw_stream(at, after=member(f"objects/{'f' * 64}", b"x", uid=1000)), "says more than a name"),
    "a member of two terabytes": (lambda at: raw_stream(at, after=_header("image/layers/0000.tar", 2 << 40)), "0.tar"),
    "a member of less than nothing": (lambda at: raw_stream(at, after=_header(f"objects/{'f' * 64}", -512)), "ff: its"),
    "a member that stands twice": (
        lambda at: raw_stream(at, after=member(*_last(at))), "it is there twice or out of its order"),
    "members out of their order": (lambda at: raw_stream(at, after=member(form.TASK, b"x")), "task.yaml: stands"),
    "cut off in a member": (lambda at: raw_stream(at, cut=100), "objects/"),
    "cut off between members": (lambda at: at.read_bytes()[: -len(form.END)], "damaged, cut off"),
    "more behind the end": (lambda at: at.read_bytes() + b"x", "does not end behind its last member"),
    "a compressed bomb": (lambda at: gzip.compress(bytes(64 << 20)), "compressed (gzip)"),
    "no archive at all": (lambda at: b"#!/bin/sh\n" * 999, "no tar file"),
    "nothing": (lambda at: b"", "cut off"),
    "an end without a beginning": (lambda at: form.END, "head.json: is missing"),
    "a wrong checksum of a header": (lambda at: b"\xff" + at.read_bytes()[1:], "damaged, cut off, or no tar"),
}  # fmt: skip


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.GNU_FORMAT)


def _huge(kind: bytes) -> bytes:
    info = tarfile.TarInfo("././@LongLink")
    info.size, info.type = 8 << 30, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def _last(at: Path) -> tuple[str, bytes]:
    archive = Archive(at)
    name = list(archive.members)[-1]
    return name, archive.members[name]


@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_that_is_no_archive_of_ours_is_refused_where_it_differs(case: str, host: Host, original: Path) -> None:
    made, words = STREAMS[case]
    host.archive.write_bytes(made(original))
    code, said = host.refuses()
    assert code == 4 and words in said, said


def test_reading_an_endless_member_needs_no_memory() -> None:
    class Zeros(io.RawIOBase):
        left = 3 << 30

        def read(self, size: int = -1) -> bytes:
            taken = min(size, self.left)
            self.left -= taken
            return bytes(taken)

    stream = io.BytesIO(form.header("image/layers/0000.tar", 4 << 30))

    class Joined:
        def read(self, size: int = -1) -> bytes:
            return stream.read(size) or zeros.read(size)

    zeros = Zeros()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = members(Joined())  # type: ignore[arg-type]
    with pytest.raises(ArchiveRefused, match="cut off in it"):
        for piece in next(found).pieces():
            assert len(piece) <= 1 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
