"""One suite that every driver passes. A subject is a small container (or what a driver takes for one) and its driver.

Commands see the captured tree below ``$R``. What a driver cannot promise, its test class names in
``not_promised``.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest

from snapshot_drivers.base import CaptureOptions, CoverageState, Snapshot, SnapshotDriver, StateKind, Target
from snapshot_drivers.errors import SnapshotError, StoreDamaged, UnknownSnapshot


class Subject(abc.ABC):
    """What the suite drives."""

    driver: SnapshotDriver
    options = CaptureOptions()

    @abc.abstractmethod
    def target(self) -> Target:
        """The container as it stands now."""

    @abc.abstractmethod
    def sh(self, command: str) -> str:
        """Runs a shell command in it (``$R`` is the tree's root, without a slash at its end); answers its output."""

    @abc.abstractmethod
    def tree(self) -> list[str]:
        """The captured tree by the independent walker."""

    @abc.abstractmethod
    def reopen(self) -> None:
        """A new driver on the same store, as another process would have it."""

    @abc.abstractmethod
    def damage_content(self) -> None:
        """Flip bytes of stored content."""

    def python(self, code: str) -> str:
        """Runs Python in it; ``R`` is the root as bytes."""
        setup = "import os, stat, time, socket\nR = os.environ['R'].encode()\n"
        return self.sh(f"python3 - <<'END'\n{setup}{code}\nEND")

    def capture(self, parent: Snapshot | None = None) -> Snapshot:
        return self.driver.capture(self.target(), parent.snapshot_id if parent else None, self.options)

    def restore(self, snapshot: Snapshot, verify: str = "full") -> None:
        staged = self.driver.stage(self.target(), snapshot.snapshot_id, self.options)
        try:
            staged.apply(verify=verify)
        finally:
            staged.discard()


STATES: dict[str, str] = {
    "empty directories and modes": "mkdir -p $R/w/empty; mkdir -m 1777 $R/w/t; mkdir -m 0 $R/w/none; "
    "chmod 2750 $R/w/empty",
    "owners that nobody knows": "echo a > $R/w/f; chown 3999999999:4000000001 $R/w/f; ln -s f $R/w/l; "
    "chown -h 4294967294:1 $R/w/l; chown 2000000000:7 $R/w",
    "setuid and owners": "echo a > $R/w/s; chown 1000:1000 $R/w/s; chmod 6755 $R/w/s; chown -h 7:8 $R/w",
    "symlinks, dangling and absolute": "ln -s nowhere $R/w/a; ln -s /etc/passwd $R/w/b; chown -h 5:6 $R/w/a",
    "hardlinks across directories": "mkdir $R/w/d; echo x > $R/w/one; ln $R/w/one $R/w/d/two; ln $R/w/one $R/three; "
    "ln -s q $R/w/l; ln -P $R/w/l $R/w/d/l2",
    "fifo": "mkfifo -m 640 $R/w/p",
    "empty and large files": "touch $R/w/nil; head -c 5000000 /dev/urandom > $R/w/big; "
    "head -c 3145728 /dev/zero > $R/w/z",
    "directory over file over link": "mkdir $R/w/x; echo 1 > $R/w/x/y; ln -s x $R/w/lx",
}
AFTERWARDS = (
    "rm -rf $R/w/* $R/three; mkdir $R/w/one $R/w/a $R/w/nil; echo f > $R/w/x; echo f > $R/w/d; echo f > $R/w/lx; "
    "echo new > $R/fresh; chmod 700 $R/w; touch $R/w/p; echo s > $R/w/s"
)


class DriverContract(abc.ABC):
    """Subclass it, give it a ``subject`` fixture."""

    not_promised: ClassVar[Mapping[str, str]] = {}
    """Tests that must fail with this driver, by their names without ``test_``, and why; a case of one in brackets."""
    not_run: ClassVar[Mapping[str, str]] = {}
    """The same of tests that would take too long to fail."""

    @pytest.fixture(autouse=True)
    def _exceptions(self, request: pytest.FixtureRequest) -> None:
        name = request.node.name.removeprefix("test_")
        if name in self.not_run:
            pytest.xfail(self.not_run[name])
        if name in self.not_promised:
            request.node.add_marker(pytest.mark.xfail(reason=self.not_promised[name], strict=True))

    @pytest.fixture
    @abc.abstractmethod
    def subject(self) -> Iterator[Subject]:
        """A fresh container with an empty ``/w`` and its driver."""

    @pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
    def test_a_restored_tree_is_the_captured_one(self, subject: Subject, state: str) -> None:
        subject.sh(state)
        before = subject.tree()
        snapshot = subject.capture()
        assert subject.tree() == before, "a capture must not change the container"
        subject.sh(AFTERWARDS)
        assert subject.tree() != before
        subject.restore(snapshot)
        assert subject.tree() == before

    def test_names_may_be_any_bytes(self, subject: Subject) -> None:
        subject.python(
            "names = (b'new\\nline', b'\\xff\\xfe', b' ', b'-rf', b'\\x1b[31m', 'ä'.encode(), b'x' * 255)\n"
            "names += (b'.wh.x', b'x', b'.wh..wh..opq', b'.wh.', b'.wh..wh.plnk')\n"
            "for name in names:\n"
            "    open(R + b'/w/' + name, 'wb').write(name)"
        )
        before = subject.tree()
        snapshot = subject.capture()
        subject.sh("rm -rf $R/w; mkdir $R/w")
        subject.restore(snapshot)
        assert subject.tree() == before

    def test_nanoseconds_of_times_come_back(self, subject: Subject) -> None:
        subject.python(
            "open(R + b'/w/f', 'w').close(); os.symlink('f', R + b'/w/l')\n"
            "for name in (b'/w/f', b'/w/l', b'/w'):\n"
            "    os.utime(R + name, ns=(1, 1_700_000_000_123_456_789), follow_symlinks=False)"
        )
        before = subject.tree()
        snapshot = subject.capture()
        subject.sh("sleep 0.01; rm $R/w/f $R/w/l; touch $R/w/f $R/w/l")
        subject.restore(snapshot)
        assert subject.tree() == before
        assert "1700000000123456789" in "".join(subject.tree())

    def test_a_sparse_file_costs_what_it_holds(self, subject: Subject) -> None:
        subject.python("f = open(R + b'/w/s', 'wb'); f.seek(2_000_000_000); f.write(b'end'); f.truncate(3 << 30)")
        snapshot = subject.capture()
        assert snapshot.stored_bytes < 16 << 20
        subject.sh("rm $R/w/s")
        subject.restore(snapshot, verify="difference")
        size, blocks = subject.sh("stat -c '%s %b' $R/w/s").split()
        assert int(size) == 3 << 30
        assert int(blocks) < 64

    def test_holes_come_back_where_they_were(self, subject: Subject) -> None:
        subject.python(
            "f = os.open(R + b'/w/s', os.O_CREAT | os.O_RDWR)\n"
            "for at in (0, 65536, 1 << 20, (5 << 20) - 4096, 9 << 20): os.pwrite(f, b'x' * 4096, at)\n"
            "os.truncate(f, (9 << 20) + 100_000)"
        )
        runs = (
            "f = os.open(R + b'/w/s', os.O_RDONLY); at, end, found = 0, os.fstat(f).st_size, []\n"
            "while at < end:\n"
            "    for whence in (os.SEEK_HOLE, os.SEEK_DATA):\n"
            "        try: at = os.lseek(f, at, whence)\n"
            "        except OSError: at = end\n"
            "        found.append(at)\n"
            "print(found)"
        )
        before = subject.python(runs)
        assert len(before.split()) >= 10
        snapshot = subject.capture()
        subject.sh("rm $R/w/s")
        subject.restore(snapshot)
        assert subject.python(runs) == before

    def test_an_entry_changes_its_type_and_back_in_any_order(self, subject: Subject) -> None:
        kinds = (
            "mkdir -p $R/w/x/deep; echo 1 > $R/w/x/deep/f",
            "echo file > $R/w/x",
            "ln -s /etc/passwd $R/w/x",
            "mkfifo $R/w/x",
            "mkdir $R/w/x; ln -s ../x $R/w/x/deep",
        )
        taken = []
        for command in kinds:
            subject.sh(f"rm -rf $R/w/x; {command}")
            taken.append((subject.capture(taken[-1][0] if taken else None), subject.tree()))
        for which in (0, 2, 1, 4, 3, 0, 0):
            subject.restore(taken[which][0], verify="difference")
            assert subject.tree() == taken[which][1]

    def test_one_of_ten_thousand_entries_costs_one_of_them(self, subject: Subject) -> None:
        subject.sh("mkdir $R/w/many; cd $R/w/many; seq -f %06.0f 10000 | xargs touch; sleep 0.1")
        first, before = subject.capture(), subject.tree()
        subject.sh("echo x > $R/w/many/005000; rm $R/w/many/007777")
        second = subject.capture(first)
        assert second.stored_bytes < first.stored_bytes // 10 + 1000
        subject.restore(first)
        assert subject.tree() == before

    def test_older_newer_and_sibling_snapshots_restore_in_any_order_and_twice(self, subject: Subject) -> None:
        subject.sh("echo 1 > $R/w/n; mkdir $R/w/only1")
        first, tree1 = subject.capture(), subject.tree()
        subject.sh("echo 2 > $R/w/n; rmdir $R/w/only1; echo x > $R/w/only2")
        second, tree2 = subject.capture(first), subject.tree()
        subject.restore(first)
        subject.sh("echo sibling > $R/w/n; ln $R/w/n $R/w/m")
        sibling, tree3 = subject.capture(first), subject.tree()
        for snapshot, tree in ((second, tree2), (first, tree1), (sibling, tree3), (second, tree2), (second, tree2)):
            subject.restore(snapshot)
            assert subject.tree() == tree

    def test_untouched_entries_keep_their_inode_and_all_their_times(self, subject: Subject) -> None:
        subject.sh("echo keep > $R/w/keep; ln -s keep $R/w/link; mkdir $R/w/d; echo k > $R/w/d/keep; echo a > $R/w/go")
        snapshot = subject.capture()
        look = "cd $R/w; stat -c '%n %i %y %z %h' keep link d d/keep"
        before = subject.sh(look)
        for _ in range(2):
            subject.sh("rm -f $R/w/go; echo b > $R/w/came")
            subject.restore(snapshot)
            assert subject.sh(look) == before

    def test_a_second_capture_of_the_same_state_stores_nothing(self, subject: Subject) -> None:
        subject.sh("head -c 3000000 /dev/urandom > $R/w/f; mkdir $R/w/d; echo x > $R/w/d/y; sleep 0.1")
        first = subject.capture()
        second = subject.capture(first)
        assert second.stored_bytes == 0
        assert second.root_digest == first.root_digest

    def test_a_change_of_the_same_size_and_time_is_seen(self, subject: Subject) -> None:
        subject.sh("echo aaa > $R/w/f; touch -d @1000000000 $R/w/f")
        first = subject.capture()
        subject.sh("echo bbb > $R/w/f; touch -d @1000000000 $R/w/f")
        second = subject.capture(first)
        assert second.root_digest != first.root_digest
        subject.restore(first)
        assert subject.sh("cat $R/w/f").strip() == "aaa"

    def test_a_new_process_can_restore(self, subject: Subject) -> None:
        subject.sh("echo 1 > $R/w/f")
        snapshot, before = subject.capture(), subject.tree()
        subject.sh("rm $R/w/f")
        subject.reopen()
        assert subject.driver.load(snapshot.snapshot_id) == snapshot
        subject.restore(snapshot)
        assert subject.tree() == before

    def test_damaged_content_is_found_before_anything_is_touched(self, subject: Subject) -> None:
        subject.sh("head -c 100000 /dev/urandom > $R/w/f")
        snapshot = subject.capture()
        subject.sh("rm $R/w/f; echo now > $R/w/now")
        before = subject.tree()
        subject.damage_content()
        subject.reopen()
        with pytest.raises(StoreDamaged):
            subject.driver.stage(subject.target(), snapshot.snapshot_id, subject.options)
        assert subject.tree() == before

    def test_verify_tells_whole_snapshots_from_damaged_and_missing_ones(self, subject: Subject) -> None:
        subject.sh("head -c 100000 /dev/urandom > $R/w/f")
        first = subject.capture()
        subject.sh("echo 2 > $R/w/g")
        second = subject.capture(first)
        names = [first.snapshot_id, second.snapshot_id, "s-" + "0" * 26]
        for content in (False, True):
            found = subject.driver.verify(names, content=content)
            assert [bool(found[name]) for name in names] == [False, False, True]
        subject.driver.forget(second.snapshot_id)
        assert [bool(problems) for problems in subject.driver.verify(names).values()] == [False, True, True]
        subject.damage_content()
        subject.reopen()
        assert all(subject.driver.verify(names, content=True).values())

    @pytest.mark.parametrize("name", ["s-" + "0" * 26, "../../etc/passwd", ""])
    def test_an_unknown_snapshot_is_named(self, subject: Subject, name: str) -> None:
        with pytest.raises(UnknownSnapshot):
            subject.driver.stage(subject.target(), name, subject.options)

    def test_a_forgotten_snapshot_is_unknown_and_others_stay(self, subject: Subject) -> None:
        subject.sh("echo 1 > $R/w/f")
        first, before = subject.capture(), subject.tree()
        subject.sh("echo 2 > $R/w/f")
        second = subject.capture(first)
        subject.driver.forget(second.snapshot_id)
        subject.driver.forget(second.snapshot_id)
        with pytest.raises(UnknownSnapshot):
            subject.driver.load(second.snapshot_id)
        subject.restore(first)
        assert subject.tree() == before

    def test_excluded_paths_stay_and_volatile_ones_go(self, subject: Subject) -> None:
        subject.options = CaptureOptions(excluded=("/w/keep", "/w/deep/in"), volatile=("/w/cache",))
        subject.sh("mkdir $R/w/cache; echo c > $R/w/cache/c; echo 1 > $R/w/keep; echo 1 > $R/w/f")
        snapshot = subject.capture()
        subject.sh("echo 2 > $R/w/keep; echo 2 > $R/w/f")
        subject.sh("mkdir -p $R/w/deep/in; echo s > $R/w/deep/in/s; echo t > $R/w/deep/t")
        subject.restore(snapshot)
        assert subject.sh("cat $R/w/keep $R/w/f $R/w/deep/in/s").split() == ["2", "1", "s"]
        assert subject.sh("ls -A $R/w").split() == ["deep", "f", "keep"]
        assert subject.sh("ls -A $R/w/deep").split() == ["in"]

    def test_the_difference_names_what_changed(self, subject: Subject) -> None:
        subject.sh("for name in changed gone mode type same; do echo 1 > $R/w/$name; done")
        first = subject.capture()
        subject.sh("echo 2 > $R/w/changed; rm $R/w/gone $R/w/type; chmod 600 $R/w/mode; mkdir $R/w/type")
        subject.sh("echo 1 > $R/w/added")
        second = subject.capture(first)
        found = {change.path: change.status for change in subject.driver.diff(first.snapshot_id, second.snapshot_id)}
        assert found == {"/w/changed": "M", "/w/gone": "D", "/w/mode": "m", "/w/type": "T", "/w/added": "A"}
        assert list(subject.driver.diff(first.snapshot_id, first.snapshot_id)) == []

    def test_a_file_of_a_snapshot_can_be_read(self, subject: Subject) -> None:
        subject.sh("printf old > $R/w/f; mkdir $R/w/d")
        snapshot = subject.capture()
        subject.sh("rm $R/w/f")
        pieces = subject.driver.read_file(snapshot.snapshot_id, "/w/f")
        assert pieces is not None
        assert b"".join(pieces) == b"old"
        assert subject.driver.read_file(snapshot.snapshot_id, "/w/missing") is None
        assert subject.driver.read_file(snapshot.snapshot_id, "/w/d") is None

    def test_the_coverage_says_what_is_held(self, subject: Subject) -> None:
        snapshot = subject.capture()
        rootfs = [item for item in snapshot.coverage.items if item.kind is StateKind.ROOTFS]
        assert rootfs[0].state is CoverageState.CAPTURED
        assert snapshot.coverage.complete

    def test_too_many_entries_fail_the_capture_with_that_word_and_hurt_nothing(self, subject: Subject) -> None:
        subject.sh("echo 1 > $R/w/f")
        good, before = subject.capture(), subject.tree()
        subject.sh("mkdir $R/w/many; cd $R/w/many; touch $(seq 200)")
        subject.options = CaptureOptions(max_entries=100)
        with pytest.raises(SnapshotError, match="max_entries"):
            subject.capture(good)
        subject.options = CaptureOptions()
        subject.restore(good)
        assert subject.tree() == before

    def test_a_tree_of_great_depth_is_taken_whole(self, subject: Subject) -> None:
        subject.python(
            "os.chdir(R + b'/w')\n"
            "for _ in range(3000):\n"
            "    os.mkdir('d' * 50); os.chdir('d' * 50)\n"
            "open('bottom', 'w').write('here')"
        )
        before = subject.tree()
        snapshot = subject.capture()
        assert snapshot.entries >= 3000
        subject.sh("rm -rf $R/w; mkdir $R/w")
        subject.restore(snapshot)
        assert subject.tree() == before
