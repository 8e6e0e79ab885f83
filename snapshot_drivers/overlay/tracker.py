"""Our end of the ``tracker`` helper: which inodes of a file system changed since it was asked last.

The helper sees every change on the file system but those that are made through a mapping (see ``mapped``). Whatever
keeps its word from being whole (its death, an overflow of the kernel's queue or of its own memory, silence) is
``TrackerLost``, and the trees are walked as a whole.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import time
from array import array
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

HELPER_NAME: Final = "tracker"
_START_S: Final = 5.0
_ANSWER_S: Final = 1.0
"""A container may stand still meanwhile."""
_HEAD: Final = struct.Struct("=III")


class TrackerLost(Exception):
    """What changed is not known."""


@dataclass(frozen=True)
class Changes:
    """What was reported on one file system; everybody's, so most of it concerns no tree of ours."""

    inodes: array[int]
    """Whose content or attributes changed, or which were closed after they had been open for writing."""
    directories: array[int]
    ends: array[int]
    text: bytes

    def __len__(self) -> int:
        return len(self.inodes) + len(self.directories)

    def names(self, known: Container[int]) -> Iterator[tuple[int, bytes]]:
        """Entries that came, went or became something else, in directories with these inodes."""
        for number, directory in enumerate(self.directories):
            if directory in known:
                yield directory, self.text[self.ends[number - 1] if number else 0 : self.ends[number]]


class Tracker:
    """One helper process with its mark. Used by one thread at a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        self._questions, self._answers = process.stdin, process.stdout
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)

    @classmethod
    def start(cls, directory_fd: int, helper: Path) -> Self:
        """Every change on the file system of that directory is noted from now on.

        Raises: TrackerLost: there is no such helper, or this kernel or file system has no such mark.
        """
        try:
            process = subprocess.Popen(
                [helper, str(directory_fd)],
                pass_fds=[directory_fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={},
                cwd="/",
                start_new_session=True,  # Ctrl-C must not end it before its owner
            )
        except OSError as error:
            raise TrackerLost(f"cannot run {helper}: {error.strerror}") from error
        made = cls(process)
        try:
            made._read(1, time.monotonic() + _START_S)
        except TrackerLost:
            made.close()
            raise
        return made

    @property
    def pid(self) -> int:
        """Of the helper."""
        return self._process.pid

    def changes(self) -> Changes:
        """What changed since the last question, or since the start.

        Raises: TrackerLost: it is not known. It may be asked again only if ``is_alive``.
        """
        deadline = time.monotonic() + _ANSWER_S
        try:
            self._questions.write(b"?")
            lost, inodes, names = _HEAD.unpack(self._read(_HEAD.size, deadline))
            numbers, directories, ends = array("Q"), array("Q"), array("I")
            numbers.frombytes(self._read(8 * inodes, deadline))
            directories.frombytes(self._read(8 * names, deadline))
            ends.frombytes(self._read(4 * names, deadline))
            text = self._read(ends[-1] if ends else 0, deadline)
        except OSError as error:
            self.close()
            raise TrackerLost(f"the tracker cannot be asked: {error.strerror}") from error
        except TrackerLost:  # the next answer would be the rest of this one
            self.close()
            raise
        if lost:
            raise TrackerLost("more changed than the tracker or the kernel's queue holds")
        return Changes(numbers, directories, ends, text)

    @property
    def is_alive(self) -> bool:
        """False once it has ended or was closed."""
        return not self._questions.closed and self._process.poll() is None

    def close(self) -> None:
        """The helper is gone. Repeatable."""
        if not self._questions.closed:
            self._questions.close()
            self._answers.close()
            self._process.kill()
            self._process.wait()

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise TrackerLost("the tracker does not answer in time")
            part = os.read(self._answers.fileno(), size - len(data))
            if not part:
                raise TrackerLost("the tracker has ended")
            data += part
        return bytes(data)
