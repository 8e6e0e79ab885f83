"""What the git driver does with a workspace that is not only files, and with one that means harm."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snapshot_drivers.base import CaptureOptions, CoverageState, Mount, Sharer, Snapshot, StateKind, Target
from snapshot_drivers.errors import RestoreRefused, UnsupportedHost
from snapshot_drivers.git.driver import GitDriver
from tests.contract.git_subject import GitSubject
from tests.contract.overlay_subject import assert_ci_has_engine, is_engine_there

pytestmark = pytest.mark.engine


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[GitSubject]:
    if not is_engine_there():
        assert_ci_has_engine()
        pytest.skip("no engine with the base image answers (deploy/setup brings one)")
    subject = GitSubject(tmp_path)
    try:
        yield subject
    finally:
        subject.close()


def missing(snapshot: Snapshot) -> dict[str, str | None]:
    return {item.path: item.reason for item in snapshot.coverage.items if item.state is CoverageState.MISSING}


def is_stored(subject: GitSubject, content: bytes) -> bool:
    blob = hashlib.sha256(b"blob %d\0" % len(content) + content).hexdigest()
    repository = subject.directory / "store/git/objects.git"
    return subprocess.run(["git", f"--git-dir={repository}", "cat-file", "-e", blob], check=False).returncode == 0


def test_what_git_cannot_hold_is_named_and_left_where_it_stands(subject: GitSubject) -> None:
    subject.driver.close()
    subject.driver = GitDriver(subject.directory / "store", max_file_bytes=1000)  # type: ignore[assignment]
    subject.sh(
        "mkdir -p /w/empty /w/dir/deep/er /w/cache; mkfifo /w/fifo; head -c 2000 /dev/zero > /w/large; "
        "echo 1 > /w/dir/f; mkdir /w/__pycache__; echo c > /w/__pycache__/c; echo key > /w/.env; chown 7:8 /w/dir/f; "
        "chmod 640 /w/dir/f"
    )
    snapshot = subject.capture()
    assert set(missing(snapshot)) == {"/w/empty", "/w/dir/deep/er", "/w/cache", "/w/fifo", "/w/large"}
    assert not snapshot.coverage.complete
    assert not is_stored(subject, b"key\n")
    subject.sh(
        "echo 2 > /w/dir/f; echo x > /w/empty/new; rm -r /w/cache; mkdir -p /w/other/empty; echo other > /w/.env"
    )
    subject.restore(snapshot)
    found = subject.sh("cd /w; find . | sort; cat .env dir/f; stat -c '%u:%g %a' dir/f").split()
    assert found == [
        ".", "./.env", "./dir", "./dir/deep", "./dir/deep/er", "./dir/f", "./empty", "./fifo", "./large",
        "other", "1", "7:8", "640",
    ]  # fmt: skip


def test_a_workspace_that_is_gone_is_empty_and_comes_back_whole(subject: GitSubject) -> None:
    subject.sh("mkdir /w/d; echo 1 > /w/d/f; ln -s d /w/l")
    snapshot, before = subject.capture(), subject.tree()
    subject.sh("rm -r /w")
    gone = subject.capture(snapshot)
    statuses = [change.status for change in subject.driver.diff(snapshot.snapshot_id, gone.snapshot_id)]
    assert statuses == ["D", "D"]
    subject.restore(snapshot)
    assert subject.tree() == before
    subject.sh("mv /w /elsewhere; ln -s /etc /w")
    assert subject.capture(gone).root_digest == gone.root_digest
    subject.restore(snapshot)
    assert subject.tree() == before
    assert subject.sh("cat /elsewhere/d/f; test -e /etc/passwd") == "1\n"


def test_differences_are_told_by_path_and_kind(subject: GitSubject) -> None:
    subject.sh("cd /w; for name in changed gone mode type same; do echo 1 > $name; done; mkdir -p d/e; echo 1 > d/e/f")
    first = subject.capture()
    subject.sh("cd /w; echo 2 > changed; rm -r gone type d; chmod +x mode; ln -s x type; echo 1 > added; echo 1 > d")
    second = subject.capture(first)
    found = [(one.path, one.status) for one in subject.driver.diff(first.snapshot_id, second.snapshot_id)]
    assert found == [
        ("/w/added", "A"), ("/w/changed", "M"), ("/w/d", "T"), ("/w/d/e/f", "D"), ("/w/gone", "D"), ("/w/mode", "m"),
        ("/w/type", "T"),
    ]  # fmt: skip


class OnVolume(GitSubject):
    """Its workspace is a directory of a volume."""

    shared_with: tuple[Sharer, ...] = ()
    capture_volume = True

    def target(self) -> Target:
        place = Path(str(self.client.info()["DockerRootDir"])) / "volumes" / self.name / "_data"
        captured = self.capture_volume
        volume = Mount(StateKind.VOLUME, "/vol", place, self.name, captured, shared_with=self.shared_with)
        return replace(super().target(), mounts=(volume,), workdir="/vol/w")


def test_a_workspace_may_lie_on_a_volume_of_the_run_alone(tmp_path: Path) -> None:
    if not is_engine_there():
        assert_ci_has_engine()
        pytest.skip("no engine with the base image answers (deploy/setup brings one)")
    subject = OnVolume(tmp_path)
    try:
        subject.sh("mkdir /vol/w; echo 1 > /vol/w/f; echo 1 > /vol/beside")
        snapshot = subject.capture()
        assert snapshot.coverage.items[0].kind is StateKind.VOLUME
        subject.sh("echo 2 > /vol/w/f; echo 2 > /vol/beside")
        subject.shared_with = (Sharer("somebody", running=False),)
        with pytest.raises(RestoreRefused, match="somebody"):
            subject.restore(snapshot)
        subject.shared_with = ()
        subject.restore(snapshot)
        assert subject.sh("cat /vol/w/f /vol/beside").split() == ["1", "2"]
        subject.capture_volume = False
        with pytest.raises(UnsupportedHost, match="not captured"):
            subject.capture()
    finally:
        subject.close()


def test_a_repository_that_would_run_code_is_content_and_no_link_leads_out(subject: GitSubject, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    secret = b"of the host\n"
    (canary / "secret").write_bytes(secret)
    ran = canary / "ran"
    script = f"#!/bin/sh\ntouch {ran}\n"
    config = f'[core]\nfsmonitor = touch {ran}\nhooksPath = .git/hooks\n[filter "x"]\n'
    config += "".join(f"{key} = touch {ran}\n" for key in ("clean", "smudge", "process"))
    files = {
        ".git/config": config,
        "config": config,
        ".gitconfig": config,
        ".git/hooks/reference-transaction": script,
        ".git/hooks/post-checkout": script,
        ".gitattributes": "* filter=x diff=x merge=x text eol=crlf working-tree-encoding=UTF-16\n",
        ".gitmodules": f'[submodule "s"]\npath = sub\nurl = ext::sh -c touch% {ran}\n',
        "sub/.git/config": config,
        "text": "a\r\nb\n",
        "real/secret": "inside\n",
    }
    subject.python(
        f"for path, text in {files!r}.items():\n"
        "    os.makedirs(os.path.dirname('/w/' + path), exist_ok=True)\n"
        "    open('/w/' + path, 'w', newline='').write(text)\n"
        "    os.chmod('/w/' + path, 0o755)\n"
        f"os.symlink({str(canary)!r}, '/w/link')"
    )
    subject.spawn(
        f"cd /w; (while :; do mv real d; mv d real; ln -s {canary} d; rm d; done) < /dev/null > /dev/null 2>&1 &"
    )
    taken = [subject.capture() for _ in range(20)]
    assert not is_stored(subject, secret)
    assert is_stored(subject, b"inside\n")
    subject.sh("rm -f /w/text /w/config")
    for snapshot in (taken[0], taken[-1]):
        subject.restore(snapshot)
    assert subject.sh("od -An -c /w/text").split() == ["a", "\\r", "\\n", "b", "\\n"]
    assert [path.name for path in canary.iterdir()] == ["secret"]
    assert (canary / "secret").read_bytes() == secret


def test_what_is_forgotten_is_collected_when_the_driver_is_closed(subject: GitSubject) -> None:
    subject.options = CaptureOptions()
    first = subject.capture()
    subject.sh("echo only here > /w/f")
    second = subject.capture(first)
    subject.sh("rm /w/f")
    third = subject.capture(second)
    subject.driver.forget(second.snapshot_id)
    assert is_stored(subject, b"only here\n")
    subject.driver.forget(third.snapshot_id)
    subject.reopen()
    assert not is_stored(subject, b"only here\n")
    assert subject.driver.load(first.snapshot_id) == first
