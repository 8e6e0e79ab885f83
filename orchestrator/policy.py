"""What a task may ask of the host: closed lists, and what is refused unless the operator trusts the task.

The agent is root in its container. Some rights turn that into root on the host, or break what the product promises
about its own processes; they are only granted to a task that the operator vouches for (``--trust-task``). What is in
no list here does not exist: there is no way to spell a privileged container or a host namespace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

DEFAULT_CAPABILITIES = frozenset(
    {
        "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "NET_RAW",
        "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
    }
)  # fmt: skip
"""What a container has when the task says nothing: Docker's defaults less MKNOD (nodes are real for the host)."""

HARMLESS_CAPABILITIES = DEFAULT_CAPABILITIES | {"IPC_LOCK", "SYS_NICE"}
"""What any task may add. WAKE_ALARM is in no list: host helpers keep it so that the container cannot read them."""

TRUSTED_CAPABILITIES = frozenset(
    {
        "BPF", "CHECKPOINT_RESTORE", "DAC_READ_SEARCH", "IPC_OWNER", "LEASE", "LINUX_IMMUTABLE", "MKNOD", "NET_ADMIN",
        "PERFMON", "SYSLOG", "SYS_ADMIN", "SYS_BOOT", "SYS_MODULE", "SYS_PTRACE", "SYS_RAWIO", "SYS_RESOURCE",
        "SYS_TIME",
    }
)  # fmt: skip
"""What a task may add only when the operator trusts it."""

HARMLESS_SECURITY_OPTIONS = frozenset({"no-new-privileges:false"})
"""``no-new-privileges:false`` lets sudo and su work inside; the default is true."""

TRUSTED_SECURITY_OPTIONS = frozenset({"seccomp=unconfined", "apparmor=unconfined"})
"""Docker's filters switched off."""

CREDENTIAL_PARAMETERS = frozenset(
    {
        "api_key", "api_token", "authorization", "aws_access_key_id", "aws_secret_access_key", "aws_session_token",
        "azure_ad_token", "default_headers", "extra_headers", "headers", "token", "vertex_credentials",
    }
)  # fmt: skip
"""Model parameters that a task may not carry, since all parameters are logged. Keys come from the environment."""

HOST_OPTIONS = frozenset({"prefix"})
"""Options of snapshot drivers that say where on this host something is that they run."""

OWN_PARAMETERS = {
    "api_base": "use model.api_base",
    "base_url": "use model.api_base",
    "custom_llm_provider": "it is the first part of model.name",
    "fallbacks": "a run has one model",
    "max_retries": "use model.retries",
    "messages": "the conversation is the run's own",
    "mock_response": "use a scripted model",
    "model": "use model.name",
    "num_retries": "use model.retries",
    "stream": "use model.stream",
    "temperature": "use model.temperature",
    "timeout": "use model.timeout_s",
    "tools": "the tools are the run's own",
}
"""Model parameters that have a field of their own or none at all, and what to do instead."""

ENGINE_FILES = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
"""Files that the engine mounts into every container."""

OWN_DIRECTORY = "/.orchestrator"
"""Where the product's own helpers are mounted in a container, read-only."""

KERNEL_DIRECTORIES = ("/proc", "/sys", "/dev")

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a path in the container
"""The one place below /dev that a task may mount (as a tmpfs, to choose its size)."""

HOST_SENSITIVE = (
    "/proc", "/sys", "/dev", "/boot", "/etc",
    "/run/docker.sock", "/run/docker", "/run/containerd", "/run/podman",
    "/var/lib/docker", "/var/lib/containerd",
)  # fmt: skip
"""Host paths that no untrusted task may bind, nor anything above them (``/``, ``/run``, ``/var``)."""

SOCKET_NAMES = frozenset({"docker.sock", "containerd.sock", "podman.sock", "crio.sock"})


class Problem(NamedTuple):
    """Something in a task that is wrong or refused, at a place in the file."""

    loc: tuple[str | int, ...]
    message: str


def normalise_capability(name: str) -> str:
    """The name as Docker's API has it: upper case, without ``CAP_``.

    Raises: ValueError: no such capability can be given to or taken from a container here.
    """
    upper = name.upper().removeprefix("CAP_")
    if upper not in HARMLESS_CAPABILITIES | TRUSTED_CAPABILITIES:
        known = ", ".join(sorted(HARMLESS_CAPABILITIES | TRUSTED_CAPABILITIES))
        raise ValueError(f"{name!r} is not a capability that a task may name (known: {known})")
    return upper


def container_path(value: str) -> str:
    """``value``, when it is an absolute, normalised path without ``..``.

    Raises: ValueError: it is not; the message says how to write it.
    """
    if not value.startswith("/"):
        raise ValueError(f"{value!r} is not absolute: write the full path in the container, beginning with /")
    if ".." in value.split("/"):
        raise ValueError(f"{value!r} has '..' in it: write the path that is meant")
    normal = os.path.normpath(value)
    normal = "/" + normal.lstrip("/")
    if normal != value.rstrip("/") and value != "/":
        raise ValueError(f"{value!r} is not normalised: write {normal!r}")
    return normal


def api_address(value: str) -> str:
    """``value``, when it is the address of an API that may stand in a log.

    Raises: ValueError: it is not; the message says how to write it.
    """
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{value!r} is no address: write http://… or https://…")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("addresses are logged: write it without user, password, query and fragment")
    return value.rstrip("/")


def is_within(path: str, directory: str) -> bool:
    """``path`` is ``directory`` or lies below it (text only: nothing is looked up)."""
    return PurePosixPath(path).is_relative_to(directory)


def destination_problem(path: str, *, tmpfs: bool = False) -> str | None:
    """Why nothing may be mounted at ``path`` in the container; ``None``: it may."""
    if path == "/":
        return "nothing can be mounted over the root: name a directory below it"
    if tmpfs and path == SHARED_MEMORY:
        return None
    for taken in (*KERNEL_DIRECTORIES, OWN_DIRECTORY):
        if is_within(path, taken):
            return f"nothing can be mounted at or below {taken}: choose another directory"
    for file in ENGINE_FILES:
        if is_within(path, file) or is_within(file, path):
            return f"the engine mounts {file} itself: choose another directory"
    return None


def overlap_problems(mounts: list[tuple[tuple[str | int, ...], str]]) -> list[Problem]:
    """Mounts (place in the file, destination) that stand at or below one another."""
    found = []
    for index, (loc, path) in enumerate(mounts):
        for _, other in mounts[:index]:
            if is_within(path, other) or is_within(other, path):
                found.append(Problem(loc, f"{path} overlaps the mount at {other}: mounts may not lie in one another"))
                break
    return found


def contradictions(excluded: Iterable[str], volatile: Iterable[str]) -> list[Problem]:
    """Volatile paths, which a restore deletes, at, above or below excluded ones, which it leaves as they are."""
    left = tuple(excluded)
    found = []
    for index, path in enumerate(volatile):
        for other in left:
            if is_within(path, other) or is_within(other, path):
                message = f"{path} would be deleted on a restore, but {other} is excluded from it: name one of the two"
                found.append(Problem(("snapshots", "volatile", index), message))
    return found


def api_base_problem(address: str) -> str | None:
    """Why an untrusted task may not have the operator's key sent to ``address``; ``None``: it is this host."""
    host = urlsplit(address).hostname or ""
    if host == "localhost" or host == "::1" or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host):
        return None
    return f"the key in your environment and the whole conversation are sent to {host}"


def bind_problem(source: Path, protected: Iterable[Path] = ()) -> str | None:
    """Why an untrusted task may not bind ``source``; ``None``: it may. Symbolic links are followed.

    ``protected``: further host directories that no container may see, such as the data directory.
    """
    real = os.path.realpath(source)
    if PurePosixPath(real).name in SOCKET_NAMES:
        return f"binding {real} gives the agent the engine, and with it root on this host"
    for sensitive in (*HOST_SENSITIVE, *(str(path) for path in protected)):
        target = os.path.realpath(sensitive)
        if is_within(real, target) or is_within(target, real):
            return f"binding {real} shows the agent {sensitive} of this host"
    return None
