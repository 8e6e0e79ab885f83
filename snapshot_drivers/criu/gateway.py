"""The one gateway to CRIU: ``criu swrk`` of the private prefix, one process a request, inside a container.

Its loader, libraries and plugins come from the prefix before the container is joined (``images/criu-join``); its
environment, its plugin directory and its search path are empty, and it reads no configuration. Its cache of kernel
features is a file of the work directory (``deploy/criu`` takes the directory out of the path that is compiled in): with
one there it neither looks for it in the container nor mounts anything to find them out.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from snapshot_drivers.criu import rpc
from snapshot_drivers.errors import EngineError, SnapshotError, UnsupportedHost

DEFAULT_PREFIX: Final = Path("/usr/local/lib/orchestrator/criu")
LOG: Final = "criu.log"
FEATURES: Final = "criu.kdat"
_IGNORE_CGROUPS: Final = 0
_GHOST_BYTES: Final = 2**31 - 1
_OPEN_TREE: Final = 428
_AT_FDCWD: Final = -100
_OPEN_TREE_CLONE: Final = 1
_CLOSE_S: Final = 5.0
_REASONS: Final = (
    (r"io_uring", "it uses io_uring, which CRIU cannot take"),
    (r"external stream socket|external socket|Can't dump half of stream unix", "a unix socket's peer is outside"),
    (r"Can't dump that handle|inotify|irmap", "a watch (inotify) of it cannot be named by a path"),
    (r"ghost file .* of \d+ size", "a deleted file that it holds open is larger than the limit"),
    (r"Connected TCP socket", "it has an established TCP connection"),
    (r"RLIMIT|rlimit|CAP_SYS_RESOURCE", "root lacks CAP_SYS_RESOURCE on this host"),
    (r"leaked out of the session|session leader", "its session's leader is outside of what is captured"),
    (r"Link remap", "a file that it holds open has lost the name by which it was opened"),
)


class CriuError(SnapshotError):
    """CRIU did not do it; the message is the reason."""


@dataclass(frozen=True)
class Place:
    """Where a CRIU works: descriptors of the container's namespaces, of cgroups to join, of pid numbers to use."""

    namespaces: Mapping[str, int]
    groups: Sequence[int] = ()
    enter_pid: int = 0
    leave_pid: int = 0


HOST: Final = Place({})


class Gateway:
    """CRIU of one prefix."""

    def __init__(self, prefix: Path = DEFAULT_PREFIX) -> None:
        self.prefix = prefix
        self._features: bytes | None = None

    def check(self) -> None:
        """Raises: UnsupportedHost: it is not there."""
        for path in (self._program(), self._loader(), self.prefix / "join.so"):
            if not path.is_file():
                raise UnsupportedHost(f"no {path}: run deploy/criu, or choose `driver: overlay`")

    def call(self, kind: rpc.Kind, options: Mapping[str, rpc.Value], work: Path, place: Place) -> Call:
        """A request is under way. ``work``: the images' directory, which gets the log too."""
        if place is not HOST:
            (work / FEATURES).write_bytes(self._kernel_features())
        return Call(self._command(), kind, options, work, place)

    def version(self) -> tuple[int, int, int]:
        """Raises: UnsupportedHost, CriuError."""
        self.check()
        with tempfile.TemporaryDirectory() as work, self.call(rpc.Kind.VERSION, {}, Path(work), HOST) as call:
            return call.wait(None, 10.0).version

    def _kernel_features(self) -> bytes:
        """CRIU's own cache, made once outside of any container; it keeps it on a tmpfs only."""
        if self._features is None:
            self.check()
            with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
                work = Path(name)
                with self.call(rpc.Kind.CHECK, {}, work, HOST) as call, suppress(CriuError):
                    call.wait(None, 20.0)
                try:
                    self._features = (work / FEATURES).read_bytes()
                except OSError as error:
                    log = _excerpt(work)
                    raise UnsupportedHost(
                        f"{self._program()} tells no kernel features ({log}): run deploy/criu"
                    ) from error
        return self._features

    def _command(self) -> list[str]:
        libraries = self.prefix / "lib"
        words = [str(self._loader()), "--inhibit-cache", "--library-path", str(libraries)]
        return [*words, "--preload", str(self.prefix / "join.so"), str(self._program()), "--no-default-config"]

    def _program(self) -> Path:
        return self.prefix / "usr/sbin/criu"

    def _loader(self) -> Path:
        machine = os.uname().machine
        name = "ld-linux-x86-64.so.2" if machine == "x86_64" else f"ld-linux-{machine}.so.1"
        return self.prefix / "lib" / name


class Call:
    """One CRIU at work. Leave the ``with`` block and it is gone."""

    def __init__(
        self, command: Sequence[str], kind: rpc.Kind, options: Mapping[str, rpc.Value], work: Path, place: Place
    ) -> None:
        self._work = work
        self._stack = ExitStack()
        with ExitStack() as started:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket = started.enter_context(ours)
            with ExitStack() as passed:
                passed.enter_context(theirs)
                empty = tempfile.mkdtemp(prefix="orchestrator-empty-")
                started.callback(shutil.rmtree, empty, ignore_errors=True)
                directory, plugins = (_detached(path, passed) for path in (work, Path(empty)))
                last = os.open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY | os.O_CLOEXEC)
                passed.callback(os.close, last)
                spaces = [place.namespaces.get(name, -1) for name in ("pid", "net", "uts", "cgroup", "mnt")]
                words = [*spaces, directory, last, len(place.groups), *place.groups, place.enter_pid, place.leave_pid]
                descriptors = [one for one in (*spaces, directory, plugins, last, *place.groups) if one >= 0]
                self._process = subprocess.Popen(
                    [*command, "--libdir", f"/proc/self/fd/{plugins}", "swrk", str(theirs.fileno())],
                    pass_fds=[theirs.fileno(), *descriptors],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={
                        "JOIN": " ".join(map(str, words)),
                        "PATH": f"/proc/self/fd/{plugins}",
                        "LD_BIND_NOW": "1",
                        "GNUTLS_NO_IMPLICIT_INIT": "1",
                    },
                    cwd="/",
                    start_new_session=True,
                )
            started.callback(self._end)
            self._pidfd = os.pidfd_open(self._process.pid)
            started.callback(os.close, self._pidfd)
            always: dict[str, rpc.Value] = {
                "images_dir_fd": -1,
                "images_dir": f"/proc/self/fd/{directory}",
                "log_file": LOG,
                "log_level": 2,
            }
            self._socket.send(rpc.request(kind, {**always, **options}))
            self._stack = started.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def wait(self, moment: str | None, timeout_s: float) -> rpc.Answer:
        """CRIU stands at ``moment`` (one of its notifications) and waits for ``go_on``; ``None``: it is done.

        Raises: CriuError: it failed, died or took longer; it is gone, and what it held runs.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._socket.recv(1 << 20)
            except TimeoutError as error:
                self._end()
                raise CriuError(f"CRIU took longer than {timeout_s:g} s and was ended") from error
            except OSError:
                data = b""
            if not data:
                self._end()
                raise CriuError(f"CRIU ended without an answer: {self.reason()}")
            try:
                said = rpc.answer(data)
            except ValueError as error:
                raise CriuError(f"CRIU's answer cannot be read: {error}") from error
            if said.kind != rpc.Kind.NOTIFY:
                if not said.success:
                    raise CriuError(self.reason() or said.text or f"code {said.code}")
                if moment is not None:
                    raise CriuError(f"CRIU finished without telling of {moment}")
                return said
            if said.script == moment:
                return said
            self.go_on()

    def go_on(self, *, success: bool = True) -> None:
        """CRIU goes on from the moment at which it stands."""
        with suppress(OSError):
            self._socket.send(rpc.go_on(success=success))

    def children(self) -> set[int]:
        """Host pids of CRIU's own processes, and of a root that it has just restored."""
        found: set[int] = set()
        with suppress(OSError):
            pid = self._process.pid
            found = set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        return found

    def reason(self) -> str:
        """Why it failed, in words, from its log; foreign text is left as it is."""
        return _excerpt(self._work)

    def _end(self) -> None:
        """It is gone."""
        with suppress(OSError):
            self._socket.close()
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(200 if self._process.poll() is None else 0):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)


def dump_options(pid: int, *, tcp: str, timeout_s: float) -> dict[str, rpc.Value]:
    """Options of a dump of the tree below ``pid`` (its number in the container); it runs on afterwards."""
    return {
        "pid": pid,
        "leave_running": 1,
        "ghost_limit": _GHOST_BYTES,
        "network_lock": rpc.NETWORK_LOCK_SKIP,
        "tcp_skip_in_flight": 1,
        "timeout": max(1, int(timeout_s)),
        **_common(tcp),
    }


def restore_options(*, tcp: str) -> dict[str, rpc.Value]:
    """Options of a restore."""
    return {"network_lock": rpc.NETWORK_LOCK_SKIP, **_common(tcp)}


def _common(tcp: str) -> dict[str, rpc.Value]:
    return {
        "shell_job": 1,
        "file_locks": 1,
        "notify_scripts": 1,
        "force_irmap": 1,
        "manage_cgroups": 1,
        "manage_cgroups_mode": _IGNORE_CGROUPS,
        "tcp_close" if tcp == "close" else "tcp_established": 1,
    }


def _detached(path: Path, stack: ExitStack) -> int:
    """Descriptor of a mount of its own of that directory: nothing above it can be reached from there."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    descriptor = int(call(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | os.O_CLOEXEC))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise EngineError(f"cannot open {path} as a mount: {os.strerror(code)}")
    stack.callback(os.close, descriptor)
    return descriptor


def _excerpt(work: Path) -> str:
    try:
        lines = (work / LOG).read_text("utf-8", "replace").splitlines()
    except OSError:
        return "it left no log"
    errors = [
        re.sub(r"^\([\d.]+\)\s*(\d+: )?", "", line) for line in lines if "Error" in line and "for self" not in line
    ]
    text = "; ".join(errors[:3])[:400]
    for pattern, meaning in _REASONS:
        if re.search(pattern, "\n".join(errors)):
            return f"{meaning} (CRIU: {text})"
    return text or "its log names no error"
