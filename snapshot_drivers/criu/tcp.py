"""Established TCP after a restore: connections whose other end is in the container go on, the others are destroyed.

A connection to the outside would hang: its peer has long forgotten it. Destroyed, the program sees an error at once.

Source: sock_diag(7), the kernel's ``inet_diag.h`` (``SOCK_DESTROY``, needs CONFIG_INET_DIAG_DESTROY).
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from snapshot_drivers.namespaces import ContainerProcess

_CLONE_NEWNET: Final = 0x40000000
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DESTROY: Final = 21
_REQUEST_ACK: Final = 0x5
_LISTEN: Final = 10
_GONE: Final = frozenset({3, 6, 7, 12})
"""SYN_RECV, TIME_WAIT, CLOSE, NEW_SYN_RECV: no process holds them."""


class Connection(NamedTuple):
    """One line of ``/proc/net/tcp``; addresses as the kernel prints them."""

    family: int
    local: str
    remote: str
    state: int


def connections(pid: int) -> list[Connection]:
    """Every connection of the network namespace of ``pid`` that has two ends."""
    found = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        try:
            lines = Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            state = int(words[3], 16)
            if state != _LISTEN and state not in _GONE:
                found.append(Connection(family, words[1], words[2], state))
    return found


def outside(found: list[Connection]) -> list[Connection]:
    """Those without their other end among them."""
    ends = {(_plain(one.local), _plain(one.remote)) for one in found}
    return [one for one in found if (_plain(one.remote), _plain(one.local)) not in ends]


def destroy_outside(init_pid: int, container_id: str) -> int:
    """Connections of the container to the outside are destroyed; answers how many there were.

    Raises: OSError: the kernel does not do it.
    """
    doomed = outside(connections(init_pid))
    if not doomed:
        return 0
    problems: list[OSError] = []
    with ExitStack() as stack:
        space = ContainerProcess(init_pid, container_id, stack).namespace("net", stack)
        thread = threading.Thread(target=_destroy, args=(space, doomed, problems))
        thread.start()
        thread.join()
    if problems:
        raise problems[0]
    return len(doomed)


def _destroy(space: int, doomed: list[Connection], problems: list[OSError]) -> None:
    """In a thread of its own, which alone is in that network namespace and ends there."""
    try:
        if ctypes.CDLL(None, use_errno=True).setns(space, _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as diag:
            for one in doomed:
                local, remote = _address(one.local), _address(one.remote)
                body = struct.pack("=BBBxI", one.family, socket.IPPROTO_TCP, 0, 0xFFFF)
                body += local[1] + remote[1] + local[0] + remote[0] + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
                diag.send(struct.pack("=IHHII", 16 + len(body), _SOCK_DESTROY, _REQUEST_ACK, 1, 0) + body)
                code = -struct.unpack_from("=i", diag.recv(4096), 16)[0]
                if code not in (0, 2):  # ENOENT: gone by itself
                    raise OSError(code, f"destroying a connection: {os.strerror(code)}")
    except OSError as error:
        problems.append(error)


def _address(text: str) -> tuple[bytes, bytes]:
    """Address (16 bytes) and port as the kernel wants them."""
    words, _, port = text.partition(":")
    raw = b"".join(struct.pack("=I", int(words[place : place + 8], 16)) for place in range(0, len(words), 8))
    return raw.ljust(16, b"\0"), struct.pack("!H", int(port, 16))


def _plain(text: str) -> str:
    """A mapped IPv4 address as IPv4."""
    return text.removeprefix("0000000000000000FFFF0000")
