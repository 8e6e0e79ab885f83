"""Commands about this host: doctor, drivers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from orchestrator.cli.answer import print_json, say
from orchestrator.cli.options import DataDirPath, Json, connect
from orchestrator.cli.options import data_dir as data_dir_of
from orchestrator.cli.render import console, one_line, show_table, styled
from snapshot_drivers.registry import known_drivers

if TYPE_CHECKING:
    from orchestrator.finding import Finding

_HOST_FAILS = 6


def doctor(json: Json = False, data_dir: DataDirPath = None) -> None:
    """Show what works on this host, and the remedy for what does not."""
    from orchestrator.doctor import examine
    from orchestrator.finding import works

    findings = examine(data_dir_of(data_dir).root, connect=connect)
    good = works(findings)
    if json:
        print_json({"ok": good, "findings": findings})
    else:
        out = console()
        for finding in findings:
            mark, style = _mark(finding)
            out.print(styled(f"{mark:<6} {finding.name:<22} {one_line(finding.found)}", style))
            if finding.remedy:
                out.print(styled(f"{'':<6} {'':<22} → {one_line(finding.remedy)}"))
        say()
        say(
            "Everything that runs need works here."
            if good
            else "Runs cannot work here yet: see the lines marked FAILS."
        )
    raise typer.Exit(0 if good else _HOST_FAILS)


def _mark(finding: Finding) -> tuple[str, str]:
    """The word and the style in which a finding is shown."""
    if finding.ok is None:
        return "-", "dim"
    if finding.ok:
        return "ok", "green"
    return ("FAILS", "red") if finding.needed else ("warn", "yellow")


def drivers(json: Json = False) -> None:
    """List the snapshot drivers that are installed."""
    found = sorted(known_drivers().values(), key=lambda driver: driver.name)
    if json:
        print_json(
            [{"name": driver.name, "path": driver.path, "distribution": driver.distribution} for driver in found]
        )
        return
    show_table(
        ["DRIVER", "FROM", "CLASS"],
        [[driver.name, driver.distribution or "built in", driver.path] for driver in found],
    )
