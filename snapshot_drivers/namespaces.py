"""The gateway to ``enter``, the static helper that joins a container's namespaces (``images/enter``).

This process never does: what enters is exec'ed with an empty environment from a sealed memory file, so that nothing a
container can reach through it is a file, a descriptor or a secret of the host. ``/proc/<pid>/root`` and ``cwd`` of a
container's process are never used: they are what that process made them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from snapshot_drivers.errors import ContainerNotRunning, EngineError, UnsupportedHost
from snapshot_drivers.mountinfo import MountLine, parse_mountinfo

HELPER_NAME: Final = "enter"
_HELPER_BYTES: Final = 16 * 2**20
_MOUNTS_S: Final = 20.0
_ANSWER: Final = struct.Struct("=II")
_CONTROL_BYTES: Final = socket.CMSG_LEN(4)
_NO_MOUNT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL})
_MFD_EXEC: Final = 0x10
_F_ADD_SEALS: Final = 1033
_ALL_SEALS: Final = 0x1 | 0x2 | 0x4 | 0x8


def helper_path(directory: Path | None = None) -> Path:
    """The built helper: in ``directory`` (``<data dir>/bin``), else where the Makefile leaves it in a source tree.

    Raises: UnsupportedHost: there is none.
    """
    place = directory or Path(__file__).resolve().parent.parent / "images" / HELPER_NAME
    if not (place / HELPER_NAME).is_file():
        raise UnsupportedHost(f"no helper `{HELPER_NAME}` in {place}; build it: make -C images/{HELPER_NAME}")
    return place / HELPER_NAME


class ContainerProcess:
    """A container's process that cannot become another one: a pidfd, and its directory in the host's procfs."""

    def __init__(self, init_pid: int, container_id: str | None, stack: ExitStack) -> None:
        self.pid = init_pid
        try:
            self._pidfd = _held(stack, os.pidfd_open(init_pid))
            self._directory = _held(stack, os.open(f"/proc/{init_pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        except (ProcessLookupError, FileNotFoundError) as error:
            raise self._gone() from error
        groups = self.read("cgroup")
        self.check()
        if container_id is not None and container_id.encode() not in groups:
            raise ContainerNotRunning(f"process {init_pid} does not belong to container {container_id[:12]}")

    def namespace(self, kind: str, stack: ExitStack) -> int:
        """Descriptor of its namespace (``mnt``, ``net``, …), never our own.

        Raises: ContainerNotRunning; EngineError: it shares the host's.
        """
        try:
            descriptor = _held(stack, os.open(f"ns/{kind}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory))
        except (ProcessLookupError, FileNotFoundError) as error:
            raise self._gone() from error
        self.check()
        ours, theirs = Path(f"/proc/self/ns/{kind}").stat(), os.fstat(descriptor)
        if (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino):
            raise EngineError(f"process {self.pid} has no {kind} namespace of its own: it is no container's")
        return descriptor

    def kill(self) -> None:
        """It is sent SIGKILL. Raises: ContainerNotRunning: it is gone. PermissionError."""
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError as error:
            raise self._gone() from error

    def check(self) -> None:
        """Still alive, so what was opened since the pidfd is its own.

        Raises: ContainerNotRunning.
        """
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if poller.poll(0):
            raise self._gone()

    def read(self, name: str) -> bytes:
        """A file of its directory; who relies on it calls ``check`` afterwards.

        Raises: ContainerNotRunning.
        """
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory)
            with open(descriptor, "rb") as file:  # noqa: PTH123 a descriptor
                return file.read()
        except (ProcessLookupError, FileNotFoundError) as error:
            raise self._gone() from error

    def link(self, name: str) -> str:
        """What a link of its directory says; as ``read``.

        Raises: ContainerNotRunning.
        """
        try:
            return os.readlink(name, dir_fd=self._directory)
        except (ProcessLookupError, FileNotFoundError) as error:
            raise self._gone() from error

    def _gone(self) -> ContainerNotRunning:
        return ContainerNotRunning(f"the container's process {self.pid} is gone; start the container and try again")


def _held(stack: ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


def open_mounts(
    init_pid: int, paths: Sequence[str], *, helper: Path | None = None, container_id: str | None = None
) -> dict[str, int]:
    """Descriptors (``O_PATH``) of detached clones of the mounts at ``paths`` in the container; the caller closes them.

    A path that is no mount's root, is not there, or has a symbolic link on its way is absent: the container moved or
    hid it. ``container_id``: refuse a process of another one.

    Raises: ContainerNotRunning, UnsupportedHost, EngineError.
    """
    return opened_mounts(init_pid, paths, helper=helper, container_id=container_id).roots


def mount_table(init_pid: int, *, helper: Path | None = None, container_id: str | None = None) -> list[MountLine]:
    """The mounts of the container's mount namespace, as the kernel tells the helper.

    Raises: ContainerNotRunning, UnsupportedHost, EngineError.
    """
    return opened_mounts(init_pid, [], helper=helper, container_id=container_id).table


class OpenedMounts(NamedTuple):
    """See ``open_mounts`` and ``mount_table``."""

    roots: dict[str, int]
    table: list[MountLine]


def opened_mounts(
    init_pid: int, paths: Sequence[str], *, helper: Path | None = None, container_id: str | None = None
) -> OpenedMounts:
    """Both in one visit.

    Raises: ContainerNotRunning, UnsupportedHost, EngineError.
    """
    found: dict[str, int] = {}
    with ExitStack() as stack:
        process = ContainerProcess(init_pid, container_id, stack)
        mounts = process.namespace("mnt", stack)
        proc = _held(stack, os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(ours)
        ours.settimeout(_MOUNTS_S)
        with theirs:
            started = start("mounts", [mounts, theirs.fileno(), proc], [*paths], helper=helper, stderr=subprocess.PIPE)
            child = stack.enter_context(started)
        try:
            for _ in paths:
                # Not socket.recv_fds: it drops the flags it is given (Python 3.11), so children could inherit them.
                answer, attached, _, _ = ours.recvmsg(_ANSWER.size, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
                if not answer:
                    break  # it ended early and says why
                index, code = _ANSWER.unpack(answer)
                if attached:
                    (found[paths[index]],) = struct.unpack("=i", attached[0][2])
                elif code not in _NO_MOUNT:
                    reason = os.strerror(code or errno.EMFILE)
                    raise EngineError(f"cannot open the container's mount {paths[index]}: {reason}")
            table, complaint = child.communicate(timeout=_MOUNTS_S)
            if child.returncode:
                text = complaint.decode(errors="replace").strip()
                raise EngineError(f"the namespace helper failed on process {init_pid}: {text or child.returncode}")
        except BaseException as error:
            for descriptor in found.values():
                os.close(descriptor)
            if isinstance(error, (TimeoutError, subprocess.TimeoutExpired)):
                raise EngineError(f"the mounts of process {init_pid} gave no answer in {_MOUNTS_S:.0f} s") from error
            raise
    return OpenedMounts(found, parse_mountinfo(table))


@contextmanager
def start(
    verb: str, descriptors: Sequence[int], arguments: Sequence[str], *, helper: Path | None, stderr: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The helper runs inside the block and is gone after it; its output is a pipe.

    Raises: UnsupportedHost: it is not built, or cannot be run.
    """
    path = helper or helper_path()
    with ExitStack() as stack:
        program = _sealed(path, stack)
        words = [HELPER_NAME, verb, str(len(descriptors)), *map(str, descriptors), *arguments]
        try:
            child = subprocess.Popen(
                words,
                executable=f"/proc/self/fd/{program}",
                pass_fds=[program, *descriptors],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise UnsupportedHost(f"cannot run {path}: {error.strerror}; is vm.memfd_noexec 2 on this host?") from error
    with child:
        try:
            yield child
        finally:
            with suppress(ProcessLookupError):
                child.kill()


def _sealed(path: Path, stack: ExitStack) -> int:
    """An unchangeable copy of a program in memory: what runs is no file of the host to be written through it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnsupportedHost(f"cannot read the helper {path}: {error.strerror}") from error
    return sealed_file(content, stack, executable=True)


def sealed_file(content: bytes, stack: ExitStack, *, executable: bool = False) -> int:
    """Descriptor of a memory file that nobody can change any more; closed with ``stack``."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create("sealed", flags | _MFD_EXEC * executable)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before kernel 6.3 every memory file is executable
            raise
        descriptor = os.memfd_create("sealed", flags)
    _held(stack, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _ALL_SEALS)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
