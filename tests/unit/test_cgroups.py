"""Names of cgroups and lines of mount tables."""

from __future__ import annotations

import pytest

from snapshot_drivers.cgroups import group_path
from snapshot_drivers.mountinfo import parse_mountinfo


@pytest.mark.parametrize(
    ("group", "path"),
    [
        ("/orchestrator/r1", "orchestrator/r1"),
        ("orchestrator/r1", "orchestrator/r1"),
        ("orchestrator-r1.slice", "orchestrator.slice/orchestrator-r1.slice"),
        ("a-b-c.slice", "a.slice/a-b.slice/a-b-c.slice"),
        ("system.slice", "system.slice"),
    ],
)
def test_slices_nest_at_their_dashes(group: str, path: str) -> None:
    assert group_path(group) == path


@pytest.mark.parametrize("group", ["", "/", "/a/../b", "..", "-a.slice", "a--b.slice", ".slice"])
def test_names_that_lead_elsewhere_are_refused(group: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        group_path(group)


def test_a_mount_line_is_decoded() -> None:
    line = (
        rb"46 42 0:39 /a\040b /mnt/x\011y\134 rw,relatime shared:2 master:1 - "
        rb"overlay over\040lay rw,lowerdir=l/A:l/B\054c,upperdir=/u"
        b"\n"
    )
    (mount,) = parse_mountinfo(line)
    assert (mount.mount_id, mount.parent_id, mount.device) == (46, 42, "0:39")
    assert (mount.root, mount.mount_point, mount.options) == ("/a b", "/mnt/x\ty\\", "rw,relatime")
    assert (mount.fs_type, mount.source) == ("overlay", "over lay")
    assert mount.super_values("lowerdir") == ["l/A:l/B,c"]
    assert mount.super_values("userxattr") == []


def test_bytes_that_are_no_utf8_survive() -> None:
    (mount,) = parse_mountinfo(b"1 2 0:3 / /\xff\xfe rw - tmpfs tmpfs rw")
    assert mount.mount_point.encode("utf-8", "surrogateescape") == b"/\xff\xfe"
