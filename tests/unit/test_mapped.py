"""Files that a process maps are found however it hides the mapping; writes through one move no timestamp."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from snapshot_drivers import beneath
from snapshot_drivers.overlay import mapped
from snapshot_drivers.overlay.held import Held

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="reading other processes' mappings needs root")
START = """
import ctypes, mmap, os, sys, threading, time
def map_file(fd):
    os.ftruncate(fd, 4096); held = mmap.mmap(fd, 4096); held[0:1] = b'b'; return held
def new(name):
    return os.open(name, os.O_RDWR | os.O_CREAT)
def ready():
    print('ready', flush=True); time.sleep(60)
"""
# The file's name at the end is always `f`, or what stands behind the colon.
WAYS = {
    "openly": "m = map_file(new('f')); ready()",
    "by a name like an escape:a\\012b": "m = map_file(new('a\\\\012b')); ready()",
    "by a name of two lines:a\nb": "m = map_file(new('a\\nb')); ready()",
    "under a name that is gone": "m = map_file(new('g')); os.link('g', 'f'); os.unlink('g'); ready()",
    "before it had a name": (
        "fd = os.open('.', os.O_RDWR | os.O_TMPFILE); m = map_file(fd)\n"
        "here = os.open('.', os.O_RDONLY); os.link('/proc/self/fd/%d' % fd, 'f', dst_dir_fd=here); ready()"
    ),
    "not writable just now": (
        "m = map_file(new('f')); libc = ctypes.CDLL(None)\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "assert libc.mprotect(ctypes.c_void_p(at), 4096, 1) == 0; ready()"
    ),
    "in a process whose first thread has ended": (
        "m = map_file(new('f')); threading.Thread(target=lambda: (time.sleep(0.1), ready())).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)"
    ),
}


@contextmanager
def process(place: Path, code: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", START + code], cwd=place, stdout=subprocess.PIPE) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == b"ready\n"
            yield started.pid
        finally:
            started.kill()


@pytest.mark.parametrize("way", WAYS)
def test_a_file_is_found_that_is_mapped(way: str, tmp_path: Path) -> None:
    with process(tmp_path, WAYS[way]) as pid, beneath.closing(os.open(tmp_path, os.O_RDONLY)) as root_fd:
        paths = mapped.mapped_paths(mapped.memory_maps([pid]))
        inodes = mapped.inodes_of(paths, str(tmp_path), root_fd)
    name = way.partition(":")[2] or "f"
    assert mapped.ANYWHERE in paths or os.stat(tmp_path / name).st_ino in inodes


def test_memory_that_is_shared_but_no_file_of_a_tree_costs_nothing(tmp_path: Path) -> None:
    code = (
        "m = mmap.mmap(-1, 4096); n = map_file(os.memfd_create('x')); o = map_file(new('o')); os.unlink('o'); ready()"
    )
    with process(tmp_path, code) as pid:
        assert mapped.mapped_paths(mapped.memory_maps([pid])) == frozenset()


def test_files_that_are_only_read_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(4096))
    code = "m = mmap.mmap(os.open('f', os.O_RDONLY), 4096, prot=mmap.PROT_READ); ready()"
    with process(tmp_path, code) as pid:
        assert mapped.mapped_paths(mapped.memory_maps([pid])) == frozenset()


def test_a_process_that_is_gone_maps_nothing() -> None:
    assert mapped.mapped_paths(mapped.memory_maps([2**22 + 5])) == frozenset()


def test_a_file_that_only_a_private_mapping_keeps_open_for_writing_is_found(tmp_path: Path) -> None:
    code = (
        "fd = new('f'); m = map_file(fd); p = mmap.mmap(fd, 4096, flags=mmap.MAP_PRIVATE); m.close(); os.close(fd)\n"
        "ready()"
    )
    with process(tmp_path, code) as pid:
        maps = mapped.memory_maps([pid])
        assert mapped.mapped_paths(maps) == frozenset()
        assert mapped.privately_mapped_paths(maps) == {os.fsencode(tmp_path / "f")}
        with beneath.closing(os.open(tmp_path, os.O_RDONLY)) as root:
            assert Held([pid]).open_inodes(str(tmp_path), root) == {os.stat(tmp_path / "f").st_ino}


def test_what_only_the_name_calls_deleted_is_told_from_what_is(tmp_path: Path) -> None:
    code = "m = map_file(new('f (deleted)')); ready()"
    with process(tmp_path, code) as pid:
        assert mapped.mapped_paths(mapped.memory_maps([pid])) == {mapped.ANYWHERE}


def test_a_ring_that_may_hold_files_makes_everything_suspect(tmp_path: Path) -> None:
    code = "c = ctypes.c_ulong(); assert ctypes.CDLL(None).syscall(206, 8, ctypes.byref(c)) == 0; ready()"
    with process(tmp_path, code) as pid, beneath.closing(os.open(tmp_path, os.O_RDONLY)) as root:
        assert Held([pid]).open_inodes(str(tmp_path), root) is None
