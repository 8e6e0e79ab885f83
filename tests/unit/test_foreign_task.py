"""What the task in an archive asks of this host is shown, and is to be granted."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.unit.archive_maker import Archive, Host, entry

WISHES: dict[str, tuple[dict[str, Any], str]] = {
    "the root of the host": ({"binds": [{"source": "/", "path": "/host"}]}, "source: / of this host, read-only"),
    "the engine's socket": ({"binds": [{"source": "/run/docker.sock", "path": "/s"}]}, "binds.0.source"),
    "a harmless directory": ({"binds": [{"source": "/usr/share", "path": "/s"}]}, "/usr/share of this host"),
    "capabilities": ({"capabilities": {"add": ["SYS_ADMIN"]}}, "capabilities.add.0: SYS_ADMIN"),
    "privileges": ({"security_options": ["seccomp=unconfined"]}, "security_options.0"),
    "a network": ({"network": "bridge"}, "network: the network bridge"),
    "a variable of the operator": ({"env": {"K": {"from_env": "OPENAI_KEY"}}}, "OPENAI_KEY of your environment"),
    "a secret of the operator": ({"env": {"AWS_KEY": {"secret": True, "value": "<secret>"}}}, "variable AWS_KEY"),
    "a volume of another one": ({"volumes": [{"path": "/v", "name": "prod"}]}, "the volume prod of this engine"),
    "an address for the key": ({"model": {"name": "openai/x", "api_base": "http://e.org"}}, "sent to http://e.org"),
    "a script of the host": ({"model": {"name": "scripted//etc/passwd"}}, "to read /etc/passwd"),
    "a program on the host": ({"agent": {"kind": "python", "entry": "os:system"}}, "to run os:system on this host"),
    "a driver of another one": ({"snapshots": {"driver": "theirs"}}, "the driver theirs"),
    "a program for the driver": ({"snapshots": {"options": {"prefix": "/tmp/evil"}}}, "'/tmp/evil' for the driver"),
    "a network for a check": (
        {"checklist": [{"name": "c", "scratch": "x", "feedback": "f", "network": "bridge"}]}, "checklist.0.network"),
}  # fmt: skip


@pytest.mark.parametrize("case", WISHES)
def test_what_a_foreign_task_asks_of_the_host_is_shown_and_refused(case: str, host: Host, original: Path) -> None:
    keys, words = WISHES[case]
    archive = Archive(original)
    archive.task(**keys)
    archive.fitted().write(host.archive)
    code, said = host.refuses()
    assert code in (2, 3) and (code == 2 or ("--trust-task" in said and words in said)), said
    assert case not in ("the root of the host", "a harmless directory") or code == 3


def test_a_trusted_task_may_hold_devices_and_ask_for_a_network(host: Host, original: Path) -> None:
    archive = Archive(original)
    archive.tree(entry(b"sda", stat.S_IFBLK | 0o600, os.makedev(8, 0)), entry(b"su", stat.S_IFREG | 0o4755, [0, []]))
    archive.task(network="bridge")
    archive.fitted().write(host.archive)
    assert host.refuses()[0] == 3
    code, said = host.refuses("--trust-task")
    assert code == 6 and "no container engine" in said, said
