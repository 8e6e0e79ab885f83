"""Hostile archives: each is refused with the name of the member that is wrong, and nothing has changed anywhere."""

from __future__ import annotations

import gzip
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from orchestrator.archive import form
from snapshot_drivers.tree import pack
from tests.unit.archive_maker import Archive, Host, entry

DIRECTORY, FILE = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644
DATA = b"content"
OWNER = {"uid": 0, "gid": 0}
SEGMENT = [[0, len(DATA), blake3(DATA).digest()]]

Change = Callable[[Archive], object]


def test_a_true_archive_is_believed_as_far_as_the_engine(host: Host, original: Path) -> None:
    Archive(original).fitted().write(host.archive)
    assert host.archive.read_bytes() == original.read_bytes(), "the forger makes true archives"
    code, said = host.refuses()
    assert code == 6 and "no container engine" in said


def first_object(archive: Archive) -> str:
    return archive.names("objects/")[0]


def snapshot(archive: Archive) -> str:
    return archive.names("manifests/")[0]


def drop(archive: Archive, name: str) -> None:
    del archive.members[name]


def laughs(archive: Archive) -> None:
    """Forty leaves of ten directories each, all ten being the next leaf."""
    objects = [pack([entry(b"end", FILE, [0, []])])]
    for _ in range(40):
        below = [blake3(objects[-1]).digest()]
        objects.append(pack([entry(b"%d" % number, DIRECTORY, below) for number in range(10)]))
    archive.tree(entry(b"d", DIRECTORY, [blake3(objects[-1]).digest()]), more=tuple(objects))


def repeated_spans(archive: Archive) -> None:
    """A file whose list of segments is the same list a million times."""
    span = pack([[0, len(DATA), blake3(DATA).digest()]] * 1000)
    spans = pack([blake3(span).digest()] * 200_000)
    archive.tree(entry(b"f", FILE, [1 << 40, blake3(spans).digest()]), more=(span, spans, DATA))


def leaf_twice(archive: Archive) -> None:
    leaf = pack([entry(b"a", FILE, [0, []])])
    digest = blake3(leaf).digest()
    archive.tree(entry(b"d", DIRECTORY, [digest, digest]), more=(leaf,))


def with_file(*entries: list[Any], more: tuple[bytes, ...] = (), root: list[Any] | None = None) -> Change:
    return lambda archive: archive.tree(*entries, more=more, root=root)


def named(name: bytes) -> Change:
    return with_file(entry(name, FILE, [0, []]))


def attribute(key: str, value: bytes, mode: int = DIRECTORY) -> Change:
    return with_file(entry(b"d", mode, [] if mode == DIRECTORY else [0, []], [[key, value]]))


def manifest(**fields: Any) -> Change:
    return lambda archive: archive.edit(snapshot(archive), lambda found: found.update(fields))


def head(**fields: Any) -> Change:
    return lambda archive: archive.edit(form.HEAD, lambda found: found.update(fields))


def event(number: int, **fields: Any) -> Change:
    return lambda archive: archive.line(number, lambda found: found.update(fields))


def surplus(archive: Archive) -> None:
    archive.put(f"objects/{blake3(b'x').hexdigest()}", b"x")


def no_log(archive: Archive) -> None:
    for name in (form.EVENTS, *archive.names("raw/"), *archive.names("manifests/"), *archive.names("objects/")):
        drop(archive, name)


def aliases(archive: Archive) -> None:
    lines = [b"%c: &%c [%s]\n" % (at, at, b",".join([b"*%c" % (at - 1)] * 9)) for at in range(98, 110)]
    archive.put(form.TASK, b"a: &a [x]\n" + b"".join(lines))


def broken_crc(archive: Archive) -> None:
    archive.put(form.EVENTS, archive.members[form.EVENTS].replace(b"step 0", b"step O", 1))


def no_crc(archive: Archive) -> None:
    lines = archive.members[form.EVENTS].splitlines()
    lines[1] = json.dumps({key: value for key, value in json.loads(lines[1]).items() if key != "crc"}).encode()
    archive.put(form.EVENTS, b"\n".join(lines) + b"\n")


def raw_bomb(archive: Archive) -> None:
    """A large answer whose gzip file holds 50 MiB instead of what the event says."""
    archive.put(archive.names("raw/")[0], gzip.compress(bytes(50 << 20)))


def other_volume(archive: Archive) -> None:
    """Two snapshots' manifests swapped under each other's names."""
    one, two, *_ = archive.names("manifests/")
    archive.members[one], archive.members[two] = archive.members[two], archive.members[one]


def wrong_lengths(archive: Archive) -> None:
    archive.tree(entry(b"f", FILE, [1 << 40, [[0, 1 << 30, blake3(DATA).digest()]]]), more=(DATA,))


FORGED: dict[str, tuple[Change, str]] = {
    "an object is missing": (lambda archive: drop(archive, first_object(archive)), "manifests/s-"),
    "an object that nobody names": (surplus, "no snapshot needs it"),
    "an object under another hash": (lambda archive: archive.put(first_object(archive), b"other"), "objects/"),
    "a manifest is missing": (lambda archive: drop(archive, snapshot(archive)), "manifests/s-"),
    "the log is missing": (no_log, "events.jsonl: is missing"),
    "the task is missing": (lambda archive: drop(archive, form.TASK), "task.yaml"),
    "the head is missing": (lambda archive: drop(archive, form.HEAD), "task.yaml: stands where head.json"),
    "a raw answer is missing": (lambda archive: drop(archive, archive.names("raw/")[0]), "raw/"),
    "a raw answer that nobody names": (lambda archive: archive.put(f"raw/{'0' * 64}.json.gz", b""), "raw/000"),
    "a raw answer that grows": (raw_bomb, "raw/"),
    "a head of a newer format": (head(format=2), "head.json: format 2"),
    "a head that is no JSON": (lambda archive: archive.put(form.HEAD, b"{"), "head.json"),
    "a head with more in it": (head(surprise=1), "head.json"),
    "a run id that leads away": (head(run_id="../../x"), "head.json: '../../x'"),
    "a snapshot id that leads away": (head(manifests={"../x": {"size": 1, "digest": ""}}), "head.json: '../x'"),
    "a wrong checksum in the log": (broken_crc, "events.jsonl: line 3"),
    "no checksum in the log": (no_crc, "events.jsonl: line 2: carries no checksum"),
    "an event of no time": (event(1, at="yesterday"), "events.jsonl: line 2: 'yesterday' is no moment"),
    "an event of another run": (event(1, run_id="another"), "events.jsonl: line 2: belongs to run"),
    "an event of an unknown kind": (event(1, kind="surprise"), "events.jsonl: line 2"),
    "an event with an unknown parent": (event(3, parent_seq=999), "events.jsonl: line 4"),
    "an event that names a snapshot elsewhere": (event(1, before="../../x", after="../../x"), "events.jsonl"),
    "a pair that came apart": (event(2, before=None, after=None, breakpoint_id=7), "events.jsonl: line 3"),
    "a log of another task": (event(0, task={"name": "u", "image": "i", "agent": {"kind": "manual"}}), "line 1: is of"),
    "a task that is none": (lambda archive: archive.put(form.TASK, b"name: [\n"), "task.yaml:"),
    "a task of aliases without end": (aliases, "task.yaml:"),
    "a manifest that is none": (lambda archive: archive.put(snapshot(archive), b"[]"), "manifests/s-"),
    "a manifest of another version": (manifest(format=9), "manifests/s-"),
    "manifests that were swapped": (other_volume, "manifests/s-"),
    "a manifest above other layers": (manifest(layer_ids=["m"]), "manifests/s-"),
    "a manifest with host directories": (manifest(lower_dirs=["/etc"]), "manifests/s-"),
    "a manifest with hidden processes": (manifest(processes={"images": [], "facts": "{}"}), "manifests/s-"),
    "a manifest with two roots": (
        lambda archive: archive.edit(snapshot(archive), lambda found: found["trees"].append(found["trees"][0])),
        "manifests/s-",
    ),
    "a file of the engine's elsewhere": (
        manifest(etc_files=[{**OWNER, "path": "/etc/shadow", "digest": "0" * 64, "mode": 384, "mtime_ns": 0}]),
        "'/etc/shadow'",
    ),
    "a digest that is none": (
        lambda archive: archive.edit(snapshot(archive), lambda found: found["trees"][0].update(root="../../x")),
        "manifests/s-",
    ),
    "an entry that leads away": (named(b"../../etc/cron.d/x"), "manifests/s-"),
    "an entry called ..": (named(b".."), "b'..' is no name"),
    "an entry without a name": (named(b""), "b'' is no name"),
    "an entry with a NUL": (named(b"a\0b"), "is no name"),
    "an entry with a name of 300 bytes": (named(b"n" * 300), "is no name"),
    "an entry that stands twice": (with_file(entry(b"a", FILE, [0, []]), entry(b"a", FILE, [0, []])), "stands twice"),
    "a leaf that stands twice": (leaf_twice, "a name stands twice"),
    "an entry of no type": (with_file(entry(b"a", 0o644)), "mode 644"),
    "an entry that is none": (with_file([b"a", FILE]), "an entry that is none"),
    "an owner out of range": (with_file(entry(b"a", FILE, [0, []], uid=2**32)), "owner"),
    "a redirect": (attribute("trusted.overlay.redirect", b"/etc"), "trusted.overlay.redirect"),
    "a metadata-only copy": (attribute("trusted.overlay.metacopy", b"", FILE), "trusted.overlay.metacopy"),
    "a handle of a host": (attribute("trusted.overlay.origin", b"x"), "trusted.overlay.origin"),
    "an opaque file": (attribute("trusted.overlay.opaque", b"y", FILE), "trusted.overlay.opaque"),
    "a label": (attribute("security.selinux", b"x"), "security.selinux"),
    "a disk": (with_file(entry(b"sda", stat.S_IFBLK | 0o666, os.makedev(8, 0))), "device 8:0"),
    "a watchdog": (with_file(entry(b"w", stat.S_IFCHR | 0o666, os.makedev(10, 130))), "device 10:130"),
    "a root that is no directory": (with_file(root=entry(b"", FILE, [0, []])), "root is no directory"),
    "a link of two megabytes": (with_file(entry(b"l", stat.S_IFLNK | 0o777, b"/x" * 10**6)), "does not fit its mode"),
    "a file longer than its content": (wrong_lengths, "has not 1073741824 bytes"),
    "segments over one another": (
        with_file(entry(b"f", FILE, [99, SEGMENT * 2]), more=(DATA,)),
        "one behind the other",
    ),
    "segments without end": (repeated_spans, "one behind the other"),
    "a tree without end": (laughs, "entries, a capture takes at most"),
    "a node of nine megabytes": (with_file(entry(b"f", FILE, [0, []], [["user.x", bytes(9 << 20)]])), "too large"),
    "a layer without a word in the head": (lambda archive: archive.put("image/layers/0000.tar", b"x"), "0000.tar"),
    "another image's configuration": (lambda archive: archive.put(form.IMAGE_CONFIG, b"{}"), "image/config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_archive_is_refused_by_name_and_leaves_nothing(case: str, host: Host, original: Path) -> None:
    change, words = FORGED[case]
    archive = Archive(original)
    change(archive)
    if not case.startswith(("the head is", "a head", "a run id", "a snapshot id")):
        archive.fitted()
    archive.write(host.archive)
    code, said = host.refuses()
    assert code in (2, 4) and words in said, said
