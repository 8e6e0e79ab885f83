"""Docker's three files under /etc: bind mounts of host files that a container may write, so they go back too.

They are restored in place, since the mount holds the inode. Source: they belong to the network holder's directory below
the engine's data root.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from snapshot_drivers import beneath
from snapshot_drivers.base import Target
from snapshot_drivers.errors import CaptureError, RestoreError
from snapshot_drivers.store.manifest import StoredFile
from snapshot_drivers.tree import Get, Put, digest_of

_MOST_BYTES: Final = 1 << 20


def capture_etc(target: Target, put: Put) -> tuple[StoredFile, ...]:
    """Content, mode, owner and time of the three files are stored.

    Raises: CaptureError: one cannot be read or is larger than 1 MiB.
    """
    stored = []
    for path, host_path in target.etc_files:
        try:
            found, data = _read(target.engine_root, host_path)
        except OSError as error:
            raise CaptureError(f"cannot read {path} ({host_path}): {error.strerror}") from error
        if len(data) > _MOST_BYTES:
            raise CaptureError(f"{path} is larger than {_MOST_BYTES} bytes")
        stored.append(
            StoredFile(
                path=path,
                digest=put(data).hex(),
                mode=stat.S_IMODE(found.st_mode),
                uid=found.st_uid,
                gid=found.st_gid,
                mtime_ns=found.st_mtime_ns,
            )
        )
    return tuple(stored)


def restore_etc(target: Target, stored: tuple[StoredFile, ...], get: Get) -> int:
    """The three files are as stored; answers how many had to be changed.

    In a new network holder the engine's own line for the container's address is kept, since the old address is gone.

    Raises: RestoreError, StoreDamaged.
    """
    places = dict(target.etc_files)
    changed = 0
    for file in stored:
        host_path = places.get(file.path)
        if host_path is None:
            continue
        wanted = get(bytes.fromhex(file.digest))
        try:
            found, present = _read(target.engine_root, host_path)
            if target.etc_is_new and file.path == "/etc/hosts":
                wanted = _with_new_address(wanted, present)
            there = StoredFile(
                path=file.path,
                digest=digest_of(present).hex(),
                mode=stat.S_IMODE(found.st_mode),
                uid=found.st_uid,
                gid=found.st_gid,
                mtime_ns=found.st_mtime_ns,
            )
            if there != file or present != wanted:
                _write(target.engine_root, host_path, wanted, file)
                changed += 1
        except OSError as error:
            raise RestoreError(f"cannot restore {file.path} ({host_path}): {error.strerror}") from error
    return changed


def _with_new_address(stored: bytes, present: bytes) -> bytes:
    """The stored hosts file with the engine's present line for this host in place of the old one."""
    loopback = (b"127.", b"::1", b"fe00:", b"ff0")
    ours = [line for line in present.splitlines() if line.strip() and not line.startswith(loopback)]
    names = {line.split()[-1] for line in ours if len(line.split()) > 1}
    kept = [line for line in stored.splitlines() if not (line.split() and line.split()[-1] in names)]
    return b"\n".join([*kept, *ours]) + b"\n"


def _read(engine_root: Path, host_path: Path) -> tuple[os.stat_result, bytes]:
    with (
        beneath.closing(beneath.open_below(engine_root, host_path.parent)) as directory,
        beneath.closing(beneath.look(directory, os.fsencode(host_path.name))) as looked,
        beneath.closing(beneath.open_regular(looked)) as file,
    ):
        return os.fstat(file), beneath.read(file, _MOST_BYTES + 1, 0)


def _write(engine_root: Path, host_path: Path, data: bytes, stored: StoredFile) -> None:
    with (
        beneath.closing(beneath.open_below(engine_root, host_path.parent)) as directory,
        beneath.closing(beneath.look(directory, os.fsencode(host_path.name))) as looked,
    ):
        if not stat.S_ISREG(os.fstat(looked).st_mode):
            raise OSError(22, "not a regular file", str(host_path))
        with beneath.closing(os.open(f"/proc/self/fd/{looked}", os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)) as file:
            beneath.write(file, data, 0)
            os.fchown(file, stored.uid, stored.gid)
            os.fchmod(file, stored.mode)
            os.utime(file, ns=(stored.mtime_ns, stored.mtime_ns))
