"""The one gateway to CRIU: ``criu swrk`` of the private prefix, one process a request, inside a container.

Its loader, libraries and plugins come from the prefix before the container is joined (``images/criu-join``); its
environment, its plugin directory and its search path are empty, and it reads no configuration. Its cache of kernel
features is a file of the work directory (``deploy/criu`` takes the directory out of the path that is compiled in): with
one there it neither looks for it in the container nor mounts anything to find them out.
"""

from __future__ import annotations

import ctypes
import os
import select
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
from snapshot_drivers.criu.log import LOG, log_reason
from snapshot_drivers.criu.work_directory import OPEN_DIRECTORIES, memory_directory
from snapshot_drivers.errors import EngineError, SnapshotError, UnsupportedHost

DEFAULT_PREFIX: Final = Path("/usr/local/lib/orchestrator/criu")
FEATURES: Final = "criu.kdat"
_OPEN_TREE: Final = 428
_AT_FDCWD: Final = -100
_OPEN_TREE_CLONE: Final = 1
_CLOSE_S: Final = 5.0


class CriuError(SnapshotError):
    """CRIU did not do it; the message is the reason."""


@dataclass(frozen=True)
class Place:
    """Where a CRIU works: descriptors of the container's namespaces, of cgroups to join; pid numbers to use."""

    namespaces: Mapping[str, int]
    groups: Sequence[int] = ()
    enter_pid: int = 0
    leave_pid: int = 0
    freezer: Path | None = None
    """The frozen cgroup in which the tree to be dumped is."""


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
                    log = log_reason(work) or "it left no log"
                    raise UnsupportedHost(
                        f"{self._program()} tells no kernel features ({log}): run deploy/criu"
                    ) from error
        return self._features

    def plain_command(self, *options: str) -> list[str]:
        """CRIU's command line, where nothing is to be joined. ``options``: of the loader."""
        words = [str(self._loader()), "--inhibit-cache", "--library-path", str(self.prefix / "lib")]
        return [*words, *options, str(self._program())]

    def _command(self) -> list[str]:
        return [*self.plain_command("--preload", str(self.prefix / "join.so")), "--no-default-config"]

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
                directory, plugins = _detached(work, passed), memory_directory()
                passed.callback(os.close, plugins)
                last = os.open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY | os.O_CLOEXEC)
                passed.callback(os.close, last)
                spaces = [place.namespaces.get(name, -1) for name in ("pid", "net", "uts", "cgroup", "mnt")]
                words = [*spaces, directory, last, len(place.groups), *place.groups, place.enter_pid, place.leave_pid]
                self._stderr = os.memfd_create("criu-stderr", os.MFD_CLOEXEC)
                started.callback(os.close, self._stderr)
                freezer = _detached(place.freezer, passed) if place.freezer else -1
                descriptors = [one for one in (*spaces, directory, plugins, last, freezer, *place.groups) if one >= 0]
                self._process = subprocess.Popen(
                    [*command, "--libdir", f"/proc/self/fd/{plugins}", "swrk", str(theirs.fileno())],
                    pass_fds=[theirs.fileno(), *descriptors],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
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
            if place.freezer:
                always["freeze_cgroup"] = f"/proc/self/fd/{freezer}"
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
        said = os.pread(self._stderr, 400, 0).decode("utf-8", "replace").strip()
        return log_reason(self._work) or said or "it left no log"

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


def _detached(path: Path, stack: ExitStack) -> int:
    """Descriptor of a mount of its own of that directory: nothing above it can be reached from there."""
    if path.is_relative_to(OPEN_DIRECTORIES):  # it is one already
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        return descriptor
    call = ctypes.CDLL(None, use_errno=True).syscall
    descriptor = int(call(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | os.O_CLOEXEC))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise EngineError(f"cannot open {path} as a mount: {os.strerror(code)}")
    stack.callback(os.close, descriptor)
    return descriptor
