"""Layers put together show the files that the stack of them shows, above any image."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot_drivers.commit.squash import Squash

File = bytes
Tree = dict[str, File | None]
"""``None``: a directory."""


@dataclass
class Stack:
    """A tree below which layers are laid as an engine does, and the layers as tar files."""

    tree: Tree
    layers: list[io.BytesIO] = field(default_factory=list)

    def step(self, wanted: Tree) -> None:
        """A layer that makes the tree ``wanted``, as overlayfs and an engine's packing would."""
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
            gone = {path for path in self.tree if path not in wanted}
            for path in sorted({*wanted, *gone}):
                above, _, name = path.rpartition("/")
                if path in gone:
                    if above not in gone and (above == "" or wanted.get(above, b"") is None):
                        tar.addfile(tarfile.TarInfo(f"{above}/.wh.{name}".lstrip("/")))
                elif self.tree.get(path, 0) != wanted[path]:
                    add(tar, path, wanted[path])
        self.layers.append(made)
        self.tree = wanted


def add(tar: tarfile.TarFile, path: str, content: File | None) -> None:
    member = tarfile.TarInfo(path)
    member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
    member.size = len(content or b"")
    tar.addfile(member, io.BytesIO(content or b""))


def laid(below: Tree, layer: io.BytesIO) -> Tree:
    """What an overlay of that layer shows above a tree."""
    layer.seek(0)
    tree = dict(below)
    with tarfile.open(fileobj=layer) as tar:
        members = [(member.name, member) for member in tar]
        for name, _ in members:
            above, _, last = name.rpartition("/")
            if last == ".wh..wh..opq":
                tree = {path: one for path, one in tree.items() if not path.startswith(f"{above}/")}
            elif last.startswith(".wh."):
                gone = f"{above}/{last[4:]}".lstrip("/")
                tree = {path: one for path, one in tree.items() if path != gone and not path.startswith(f"{gone}/")}
        for name, member in members:
            if name.rpartition("/")[2].startswith(".wh."):
                continue
            if member.isdir():
                tree[name] = None
                continue
            tree = {path: one for path, one in tree.items() if not path.startswith(f"{name}/")}
            file = tar.extractfile(member)
            assert file is not None
            tree[name] = file.read()
    return tree


def squashed(layers: list[io.BytesIO]) -> io.BytesIO:
    made = io.BytesIO()
    Squash(layers).write(made)
    return made


names = st.sampled_from(["a", "b", "c"])
paths = st.lists(names, min_size=1, max_size=3).map("/".join)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    tree: Tree = {}
    for path in draw(st.lists(paths, max_size=7)):
        parts = path.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        if any(tree.get(part, None) is not None for part in above) or path in tree:
            continue
        tree.update(dict.fromkeys((part for part in above if part not in tree), None))
        tree[path] = draw(st.one_of(st.none(), st.binary(min_size=1, max_size=2)))
    return tree


@settings(max_examples=300, deadline=None)
@given(st.lists(trees(), min_size=2, max_size=5))
def test_one_layer_shows_what_the_stack_shows(stages: list[Tree]) -> None:
    stack = Stack(stages[0])
    for stage in stages[1:]:
        stack.step(stage)
    assert laid(stages[0], squashed(stack.layers)) == stages[-1]


def test_a_hard_link_outlives_the_file_that_it_was_packed_behind() -> None:
    lower, upper = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=lower, mode="w") as tar:
        add(tar, "one", b"data")
        for name in ("three", "two"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.LNKTYPE, "one"
            tar.addfile(link)
    with tarfile.open(fileobj=upper, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(".wh.one"))
    made = squashed([lower, upper])
    made.seek(0)
    with tarfile.open(fileobj=made) as tar:
        assert [(member.name, member.type) for member in tar] == [
            (".wh.one", tarfile.REGTYPE),
            ("three", tarfile.REGTYPE),
            ("two", tarfile.LNKTYPE),
        ]
        file = tar.extractfile("three")
        assert file is not None
        assert file.read() == b"data"
        assert tar.getmember("two").linkname == "three"


def test_extended_headers_come_through_as_bytes() -> None:
    lower = io.BytesIO()
    capability = b"\x01\x00\x00\x02\x00\x20\xff\xfe".decode("utf-8", "surrogateescape")
    with tarfile.open(fileobj=lower, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("\udcffname")
        member.pax_headers = {"SCHILY.xattr.security.capability": capability}
        tar.addfile(member)
    made = squashed([lower])
    made.seek(0)
    with tarfile.open(fileobj=made) as tar:
        (found,) = tar.getmembers()
    assert (found.name, found.pax_headers["SCHILY.xattr.security.capability"]) == ("\udcffname", capability)
