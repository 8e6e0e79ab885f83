"""The command ``orchestrator``: its commands by name, and the one place where errors become exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
from collections.abc import Sequence

import typer

from orchestrator import __version__
from orchestrator.cli import archive, change, diff, host, launch, read, remove, resume, shell, store, verify
from orchestrator.cli.answer import INTERNAL, INTERRUPTED, fail
from orchestrator.errors import OrchestratorError
from snapshot_drivers import crash_points
from snapshot_drivers.errors import SnapshotError

USAGE = 2
CRASH_VARIABLE = "ORCHESTRATOR_CRASH_AT"
"""``POINT`` or ``POINT:PASSES`` of ``snapshot_drivers.crash_points``, for the tests of crash safety."""

app = typer.Typer(
    name="orchestrator",
    help="Run an agent in a container, and take its conversation and the whole container back together.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(launch.launch)
app.command()(resume.resume)
app.command()(launch.validate)
app.command()(read.runs)
app.command()(read.show)
app.command()(read.breakpoints)
app.command()(read.log)
app.command()(change.checkpoint)
app.command()(change.restore)
app.command()(change.rewind)
app.command()(change.stop)
app.command()(diff.diff)
app.command("exec")(change.execute)
app.command()(shell.shell)
app.command()(archive.pack)
app.command()(archive.unpack)
app.command()(archive.image)
app.command()(verify.verify)
app.command()(store.gc)
app.command()(store.fsck)
app.command()(remove.rm)
app.command()(remove.clean)
app.command()(host.doctor)
app.command()(host.drivers)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"orchestrator {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Options that stand before the command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command has run; answers its exit code. Never raises, never shows a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    as_json = "--json" in (given[: given.index("--")] if "--" in given else given)
    _guard_process()
    if crash_at := os.environ.get(CRASH_VARIABLE):
        point, _, passes = crash_at.partition(":")
        crash_points.arm(point, passes=int(passes or 0))
    try:
        # Not the command's own `main`, which takes interrupts and closed pipes for itself.
        command = typer.main.get_command(app)
        with command.make_context("orchestrator", given) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as done:
        return done.exit_code
    except (OrchestratorError, SnapshotError) as error:
        return fail(type(error).__name__, str(error), error.exit_code, as_json=as_json)
    except KeyboardInterrupt:
        return fail("Interrupted", "interrupted", INTERRUPTED, as_json=as_json)
    except BrokenPipeError:
        # The reader has seen enough (`| head`); nothing must be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:  # noqa: BLE001 - the top of the program
        return _unexpected(error, as_json=as_json)
    return 0


def _unexpected(error: Exception, *, as_json: bool) -> int:
    """Wrong usage, as typer found it, or something that nobody foresaw."""
    explain = getattr(error, "format_message", None)
    if explain is None:
        message = f"unexpected {type(error).__name__}: {error} (this is a fault of the orchestrator: please report it)"
        return fail(type(error).__name__, message, INTERNAL, as_json=as_json)
    context = getattr(error, "ctx", None)
    hint = f"\n{context.get_usage()}\nTry: {context.command_path} --help" if context is not None else ""
    return fail("UsageError", f"{explain()}{hint}", USAGE, as_json=as_json)


def _guard_process() -> None:
    """Files are made private, no core dump shows a secret, and no terminal's encoding can make printing fail."""
    os.umask(0o077)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
