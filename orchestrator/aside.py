"""Large raw answers, put in files of their own beside the log: a line of ``events.jsonl`` stays readable.

``<run>/raw/<SHA-256 of the JSON text>.json.gz``; the event holds ``{"aside": <file name>, "bytes": <of the text>}``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.errors import HostError, LogDamaged
from orchestrator.run_dir import write_file

INLINE_BYTES = 256 * 1024
"""JSON text of an answer up to this length stands in the event itself."""
DIRECTORY = "raw"


def put_aside(run_path: Path, raw: Any, redacted: Callable[[str], str]) -> Any:
    """``raw``, if it is small; else what stands for it, its redacted text being on disk. May be repeated.

    Raises: HostError: it cannot be written.
    """
    text = json.dumps(raw)
    if len(text) <= INLINE_BYTES:
        return raw
    data = redacted(text).encode("ascii")
    name = f"{hashlib.sha256(data).hexdigest()}.json.gz"
    directory = run_path / DIRECTORY
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise HostError(f"{directory}: cannot be made: {error.strerror}") from error
    if not (directory / name).exists():
        write_file(directory / name, gzip.compress(data, compresslevel=1, mtime=0))
    return {"aside": name, "bytes": len(data)}


def taken_back(run_path: Path, raw: Any) -> Any:
    """What ``put_aside`` was given.

    Raises: LogDamaged: the file is gone or damaged.
    """
    path = _place(run_path, raw)
    if path is None:
        return raw
    try:
        return json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise LogDamaged(
            f"{path}: the raw answer cannot be read ({error}); the conversation does not need it"
        ) from error


def check_aside(run_path: Path, raw: Any, *, read: bool) -> None:
    """What ``put_aside`` answered still has its file; ``read``: whole.

    Raises: LogDamaged.
    """
    path = _place(run_path, raw)
    if path is not None and not read and not path.is_file():
        raise LogDamaged(f"{path}: the raw answer is gone; the conversation does not need it")
    if read:
        taken_back(run_path, raw)


def _place(run_path: Path, raw: Any) -> Path | None:
    if not isinstance(raw, dict) or set(raw) != {"aside", "bytes"}:
        return None
    return run_path / DIRECTORY / Path(str(raw["aside"])).name
