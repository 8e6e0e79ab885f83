"""Snapshots leave their host in a form that means the same elsewhere, or not at all; and come above other layers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.cli.main import main
from snapshot_drivers.errors import RestoreRefused, StoreDamaged
from snapshot_drivers.overlay.foreign import ForeignSnapshots
from snapshot_drivers.overlay.portable import Meaning, Porter, bound_entry, meaning_of
from snapshot_drivers.store.manifest import Manifest
from snapshot_drivers.tree import Node, children_of, decode_root, digest_of, pack
from tests.unit.archive_maker import RUN, entry, make_run
from tests.unit.plain_upper import PlainUpper

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: trusted attributes")

ELSEWHERE = ("/var/lib/another/overlay2/x/diff",)


@pytest.fixture
def plain(tmp_path: Path) -> PlainUpper:
    found = PlainUpper(tmp_path)
    (found.upper / "a/b").mkdir(parents=True)
    (found.upper / "a/b/f").write_text("content")
    return found


def captured(plain: PlainUpper) -> Manifest:
    return plain.manifests.read(plain.capture()[0].snapshot_id)


def ported(plain: PlainUpper, manifest: Manifest) -> tuple[Manifest, Porter, dict[bytes, bytes]]:
    made: dict[bytes, bytes] = {}

    def put(node: bytes) -> bytes:
        return made.setdefault(digest_of(node), node) and digest_of(node)

    porter = Porter(plain.content.read, put)
    return porter.ported(manifest, processes=False), porter, made


def test_notes_of_this_host_are_left_out_and_everything_else_is_as_it_was(plain: PlainUpper) -> None:
    for path, name, value in (
        ("a", "trusted.overlay.origin", b"a handle"),
        ("a/b", "trusted.overlay.impure", b"y"),
        ("a/b", "trusted.overlay.opaque", b"y"),
        ("a/b/f", "trusted.note", b"mine"),
        ("a/b/f", "user.kept", b"\0\xff"),
    ):
        os.setxattr(plain.upper / path, name, value)
    manifest = captured(plain)
    made, porter, nodes = ported(plain, manifest)
    assert made.lower_dirs == () and made.trees[0].root != manifest.trees[0].root
    assert dict(porter.left_out) == {"trusted.note": 1}

    def get(digest: bytes) -> bytes:
        return nodes.get(digest) or plain.content.read(digest)

    a = children_of(decode_root(bytes.fromhex(made.trees[0].root), get), get)[b"a"]
    b = children_of(a, get)[b"b"]
    file = children_of(b, get)[b"f"]
    assert (a.xattrs, b.xattrs) == ((), (("trusted.overlay.opaque", b"y"),))
    assert file.xattrs == (("user.kept", b"\0\xff"),) and plain.content.read(file.segments[0].digest) == b"content"


def test_a_tree_without_such_notes_keeps_its_digest(plain: PlainUpper) -> None:
    manifest = captured(plain)
    assert ported(plain, manifest)[0].trees == manifest.trees


@pytest.mark.parametrize(("name", "value"), [("redirect", b"/usr"), ("metacopy", b""), ("opaque", b"x"), ("new", b"1")])
def test_what_takes_its_content_from_the_layers_of_this_host_stays_here(
    plain: PlainUpper, name: str, value: bytes
) -> None:
    os.setxattr(plain.upper / "a/b", f"trusted.overlay.{name}", value)
    manifest = captured(plain)
    with pytest.raises(RestoreRefused, match=rf"/a/b carries trusted\.overlay\.{name}"):
        ported(plain, manifest)
    there = manifest.model_copy(update={"lower_dirs": ELSEWHERE})
    plain.manifests.delete(manifest.snapshot.snapshot_id)
    plain.manifests.write(there)
    before = sorted(path.name for path in plain.upper.rglob("*"))
    refused = pytest.raises(RestoreRefused, match=r"takes content from them: /a/b carries")
    with refused, plain.staged(manifest.snapshot.snapshot_id):
        pass
    assert sorted(path.name for path in plain.upper.rglob("*")) == before


def test_a_snapshot_is_restored_above_the_same_layers_in_other_directories(plain: PlainUpper) -> None:
    os.setxattr(plain.upper / "a", "trusted.overlay.origin", b"a handle of another host")
    manifest = captured(plain)
    assert bound_entry(manifest, plain.content.read) is None
    plain.manifests.delete(manifest.snapshot.snapshot_id)
    plain.manifests.write(manifest.model_copy(update={"lower_dirs": ELSEWHERE}))
    (plain.upper / "a/b/f").write_text("changed")
    with plain.staged(manifest.snapshot.snapshot_id) as staged:
        staged.apply(verify="full")
    assert (plain.upper / "a/b/f").read_text() == "content"


def test_attributes_that_belong_to_the_state_travel_and_labels_of_a_host_do_not() -> None:
    kept = ("user.x", "security.capability", "system.posix_acl_access", "system.posix_acl_default")
    assert {meaning_of(name, b"v") for name in kept} == {Meaning.KEPT}
    assert meaning_of("trusted.overlay.protattr", b"ai") is Meaning.KEPT
    assert meaning_of("trusted.overlay.protattr", b"zz") is Meaning.BOUND
    assert {meaning_of(name, b"v") for name in ("security.selinux", "security.ima", "trusted.x")} == {Meaning.LEFT_OUT}


@pytest.mark.parametrize("name", [b"../x", b"..", b".", b"", b"a/b", b"a\0"])
def test_no_stored_name_leads_out_of_its_directory(name: bytes) -> None:
    leaf = pack([entry(name, 0o100644, [0, []])])
    directory = Node(b"d", 0o40755, 0, 0, 0)
    directory.digests = (digest_of(leaf),)
    with pytest.raises(StoreDamaged, match="no directory holds such a one"):
        children_of(directory, lambda _: leaf)


def test_a_foreign_tree_may_be_as_deep_as_a_captured_one_and_no_deeper(plain: PlainUpper) -> None:
    manifest = captured(plain)
    for levels, is_refused in ((20_000, False), (50_001, True)):
        nodes = {digest_of(leaf): leaf for leaf in [pack([entry(b"end", 0o100644, [0, []])])]}
        below = next(iter(nodes))
        for level in range(levels):
            node = pack([entry(b"d", 0o40755, [below])] if level < levels - 1 else entry(b"", 0o40755, [below]))
            below = digest_of(node)
            nodes[below] = node
        tree = manifest.trees[0].model_copy(update={"root": below.hex()})
        foreign = ForeignSnapshots(
            nodes.__getitem__, {digest: len(node) for digest, node in nodes.items()}, devices=False
        )
        forged = manifest.model_copy(update={"lower_dirs": (), "trees": (tree,)})
        if is_refused:
            with pytest.raises(StoreDamaged, match="50001 levels, a capture takes at most 50000"):
                foreign.check(forged)
        else:
            foreign.check(forged)


def test_a_damaged_log_is_not_packed_and_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = make_run(tmp_path)
    events = place.run(RUN).events_path
    events.write_bytes(events.read_bytes().replace(b"step 0", b"step O", 1))
    before = sorted(tmp_path.iterdir())
    words = ["pack", RUN, "--data-dir", str(place.root), "--to", str(tmp_path / "a.tar"), "--without-image"]
    assert main(words) == 4
    assert "its checksum does not fit" in capsys.readouterr().err and sorted(tmp_path.iterdir()) == before
