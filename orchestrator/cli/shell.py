"""The command ``shell``: the operator in a run's container, on a terminal or with a script on standard input."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from orchestrator.cli.options import DataDirPath, Run, connect, existing_data_dir
from orchestrator.cli.reach import WAIT_S, Wait, reach
from orchestrator.errors import HostError
from snapshot_drivers.errors import EngineError

if TYPE_CHECKING:
    from orchestrator.engine import Engine
    from orchestrator.engine_stream import AttachedStream
    from orchestrator.run_dir import RunDir
    from orchestrator.session import Session
    from orchestrator.wishes import Status

_SHELL = "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi"
_CHUNK = 64 * 1024
_STDERR = 2


def shell(run: Run, wait: Wait = WAIT_S, data_dir: DataDirPath = None) -> None:
    """Open a shell in a run's container; what it changes belongs to the next breakpoint, and a restore ends it.

    Without a terminal, standard input is its script.
    """
    from orchestrator.wishes import Status, VisitWish

    place = existing_data_dir(data_dir)
    found = place.find(run)
    with ExitStack() as resources:
        visit = _Visit(found, resources)
        # No capture and no restore begins while it is being started; after that it is a process like any other.
        reach(place, found, VisitWish(), Status, visit.enter_alone, wait_s=wait, when_begun=visit.enter)
        code = visit.talk()
    raise typer.Exit(code)


class _Visit:
    """One shell, from its start to its end."""

    def __init__(self, run: RunDir, resources: ExitStack) -> None:
        self._run = run
        self._resources = resources
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._engine: Engine
        self._stream: AttachedStream
        self._exec_id = ""

    def enter_alone(self, session: Session) -> Status:
        """The shell runs, in a run that nobody drives; its lock is free again when this has returned."""
        from orchestrator.wishes import Status

        self.enter()
        return Status(run_id=session.run_id, pid=os.getpid(), step=0, doing="nothing", since_s=0.0, waiting=0)

    def enter(self) -> None:
        """The shell runs. Raises: TaskError, LogDamaged, HostError, EngineError."""
        from orchestrator.task import load_recorded

        record = self._run.read_record()
        loaded = load_recorded(self._run.task_path, source_dir=Path(record.source_dir), environ=os.environ)
        env = loaded.spec.env_for_exec(loaded.secrets)
        if self._terminal:
            env["TERM"] = os.environ.get("TERM", "dumb")
        self._engine = connect()
        self._resources.callback(self._engine.close)
        self._exec_id, self._stream = self._engine.exec_attached(
            record.container.name,
            ["/bin/sh", "-c", _SHELL],
            user="0" if loaded.spec.user == "root" else loaded.spec.user,
            env=env,
            workdir=loaded.spec.workdir,
            terminal=self._terminal,
        )
        self._resources.callback(self._stream.close)

    def talk(self) -> int:
        """The shell has ended; its exit code.

        Raises: HostError: it was ended with its container.
        """
        with self._raw_terminal():
            self._pump()
        try:
            code = self._engine.exec_exit_code(self._exec_id)
        except EngineError as error:
            raise HostError(f"the shell ended with its container, which was taken back or removed ({error})") from error
        return 0 if code is None else code

    def _pump(self) -> None:
        stdin = sys.stdin.fileno()
        poller = select.poll()
        poller.register(self._stream.fileno(), select.POLLIN)
        poller.register(stdin, select.POLLIN)
        ahead = True
        while True:
            ready = dict(poller.poll(0 if ahead else None))
            ahead = False
            if stdin in ready:
                data = os.read(stdin, _CHUNK)
                try:
                    self._stream.write(data) if data else self._stream.end_input()
                except OSError:
                    data = b""  # it has ended; the rest of its output follows
                if not data:
                    poller.unregister(stdin)
            if self._stream.fileno() in ready or not ready:
                pieces = self._stream.read(0)
                if pieces is None:
                    return
                for stream, data in pieces:
                    _write_all(2 if stream == _STDERR else 1, data)

    @contextmanager
    def _raw_terminal(self) -> Iterator[None]:
        """While the block runs every key goes to the shell, whose terminal has the size of ours."""
        if not self._terminal:
            yield
            return
        stdin = sys.stdin.fileno()
        before = termios.tcgetattr(stdin)
        former = signal.signal(signal.SIGWINCH, lambda *_: self._resize())
        try:
            tty.setraw(stdin, termios.TCSADRAIN)  # what was typed already is the shell's, too
            self._resize()
            yield
        finally:
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)
            signal.signal(signal.SIGWINCH, former)

    def _resize(self) -> None:
        size = os.get_terminal_size(sys.stdin.fileno())
        with contextlib.suppress(EngineError):  # it may have ended just now
            self._engine.exec_resize(self._exec_id, rows=size.lines, columns=size.columns)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
