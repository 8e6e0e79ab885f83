"""The container of the overlay driver's subject, its directory ``/w`` the workspace of the git driver."""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Final

from snapshot_drivers.base import Mount, StateKind, Target
from snapshot_drivers.git.driver import GitDriver
from tests.contract.overlay_subject import OverlaySubject
from tests.tree_walker import walk

_LINE: Final = re.compile(
    r"(?P<path>b'.*?(?<!\\)'|b\".*?(?<!\\)\") (?P<type>[0-7]+)(?P<mode>[0-7]{4}) \d+:\d+ \d+ (?P<size>\d+) \d+ "
    r"(?:b'.*?'|b\".*?\") (?P<body>.*) \[.*\] \w+",
    re.DOTALL,
)


class GitSubject(OverlaySubject):
    """See ``Subject``. Its tree is what git promises: paths of files and links, execute bit, content."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.driver.close()
        self.driver = GitDriver(directory / "store")  # type: ignore[assignment]

    def target(self) -> Target:
        others = (Mount(StateKind.TMPFS, "/dev", None), Mount(StateKind.TMPFS, "/dev/shm", None))
        return replace(super().target(), mounts=others, workdir="/w")

    def tree(self) -> list[str]:
        return [line for line in map(_promised, walk(f"{self.root}/w", [])) if line is not None]

    def full_tree(self) -> list[str]:
        """Everything, by the independent walker."""
        return super().tree()

    def reopen(self) -> None:
        self.driver.close()
        self.driver = GitDriver(self.directory / "store")  # type: ignore[assignment]

    def damage_content(self) -> None:
        """A bit of the last byte of each blob."""
        for path in (self.directory / "store/git/objects.git/objects").rglob("*"):
            if path.is_file() and len(path.parent.name) == 2:
                data = zlib.decompress(path.read_bytes())
                if data.startswith(b"blob "):
                    path.chmod(0o600)
                    path.write_bytes(zlib.compress(data[:-1] + bytes([data[-1] ^ 1])))


def _promised(line: str) -> str | None:
    found = _LINE.fullmatch(line)
    assert found, line
    if found["type"] == "4":
        return None
    is_executable = bool(int(found["mode"], 8) & 0o100)
    return f"{found['path']} {found['type']} {is_executable} {found['size']} {found['body']}"
