"""What one could use instead, on the same changes: the engine's own commit, git, restic, cp."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.series import Row, docker, row, timed
from orchestrator.session import Session

Change = Callable[[int], object]
"""What changes in the container before the round of that number."""


def engine_commit(state: str, session: Session, change: Change, rounds: int) -> list[Row]:
    """``docker commit``, and the same with a container of what was committed."""
    name, tag = session.container.name, f"bench-peer-{os.getpid()}"

    def commit(number: int) -> None:
        docker("commit", "--pause=true", name, f"{tag}:{number}")

    def run(number: int) -> None:
        words = ["--name", f"{tag}-{number}", "--network", "none", "--entrypoint", "sleep"]
        docker("run", "-d", *words, f"{tag}:{number}", "60")

    try:
        committed = timed(commit, rounds, change)
        started = timed(run, rounds)
    finally:
        for number in range(rounds):
            for words in (["rm", "-f", f"{tag}-{number}"], ["rmi", f"{tag}:{number}"]):
                subprocess.run(["docker", *words], capture_output=True)
    both = [one + other for one, other in zip(committed, started, strict=True)]
    return [row(state, "docker commit", committed), row(state, "docker commit + run", both)]


def on_files(state: str, session: Session, change: Change, place: Path, rounds: int) -> list[Row]:
    """The changed files alone, as they stand in the writable layer: git and restic keep what they know of them."""
    upper = session.container.target().upper_hint
    assert upper is not None
    tree = upper / "w"
    rows = [row(state, "git commit (these files only)", timed(_git(tree, place), rounds, change))]
    if shutil.which("restic"):
        rows.append(row(state, "restic backup (these files only)", timed(_restic(tree, place), rounds, change)))
    with _copies(place) as copies:
        copy = timed(lambda number: _run("cp", "-a", tree, copies / str(number)), rounds, change)
    return [*rows, row(state, "cp -a (these files only)", copy)]


def synced_copy(state: str, session: Session, change: Change, place: Path, rounds: int) -> Row:
    """``cp -a`` and a sync of what it wrote, of the directory that the change wrote to."""
    upper = session.container.target().upper_hint
    assert upper is not None

    def copy(number: int) -> None:
        newest = max((upper / "w").iterdir(), key=lambda path: path.lstat().st_mtime_ns)
        _run("cp", "-a", newest, copies / str(number))
        _run("sync", *(path for path in [copies / str(number), *(copies / str(number)).rglob("*")] if path.is_file()))

    with _copies(place) as copies:
        return row(state, "cp -a + fsync (what changed)", timed(copy, rounds, change))


def _git(tree: Path, place: Path) -> Callable[[int], None]:
    bare = place / "bare.git"
    _run("git", "init", "-q", "--bare", bare)
    git = ["git", "--git-dir", bare, "--work-tree", tree, "-c", "user.name=b", "-c", "user.email=b@b"]

    def commit(number: int) -> None:
        _run(*git, "add", "-A")
        _run(*git, "commit", "-q", "--allow-empty", "-m", str(number))

    commit(-1)
    return commit


def _restic(tree: Path, place: Path) -> Callable[[int], None]:
    environment = {**os.environ, "RESTIC_PASSWORD": "b", "RESTIC_CACHE_DIR": str(place / "restic-cache")}
    restic = ["restic", "-q", "-r", place / "restic"]
    _run(*restic, "init", env=environment)

    def backup(_: int) -> None:
        _run(*restic, "backup", tree, env=environment)

    backup(-1)
    return backup


@contextmanager
def _copies(place: Path) -> Iterator[Path]:
    copies = place / "copies"
    copies.mkdir()
    try:
        yield copies
    finally:
        shutil.rmtree(copies)


def _run(*words: str | Path, env: dict[str, str] | None = None) -> None:
    subprocess.run(words, check=True, capture_output=True, env=env)
