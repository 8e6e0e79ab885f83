"""The in-memory driver keeps the contract; its container is a plain directory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_drivers.base import Target
from snapshot_drivers.memory import MemoryDriver
from tests.contract.suite import DriverContract, Subject
from tests.tree_walker import walk


class MemorySubject(Subject):
    """See ``Subject``."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        (self.root / "w").mkdir(parents=True)
        self.store = directory / "store"
        self.driver = MemoryDriver(self.store)

    def target(self) -> Target:
        return Target(
            run_id="contract",
            container_id="directory",
            init_pid=os.getpid(),
            engine_root=self.root.parent,
            storage_driver="directory",
            upper_hint=self.root,
            freeze_group="/contract",
            image_id="none",
            layer_ids=(),
            architecture="none",
            mounts=(),
            etc_files=(),
            etc_is_new=False,
            lifecycle=self,
        )

    def kill(self) -> None:
        """See ``Lifecycle``: nothing runs."""

    def start(self) -> int:
        """See ``Lifecycle``."""
        return os.getpid()

    def sh(self, command: str) -> str:
        environment = {"PATH": os.environ["PATH"], "R": str(self.root)}
        done = subprocess.run(["sh", "-ec", command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def tree(self) -> list[str]:
        return walk(str(self.root), leave_out=())

    def reopen(self) -> None:
        self.driver.close()
        self.driver = MemoryDriver(self.store)

    def damage_content(self) -> None:
        for held in MemoryDriver._stores[self.store.resolve()].snapshots.values():
            for entry in held.trees["/"].children[b"w"].children.values():
                entry.segments = tuple((offset, data[::-1]) for offset, data in entry.segments)


class TestMemoryContract(DriverContract):
    """No exceptions."""

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Iterator[Subject]:
        yield MemorySubject(tmp_path)
        # pytest's own removal of old directories gives up on the deep ones.
        subprocess.run(["rm", "-rf", str(tmp_path)], check=True)
