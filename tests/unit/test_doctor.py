"""What the doctor says on a host as it is and on hosts that lack something; no engine is needed."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

import pytest

from orchestrator import doctor, host
from orchestrator.engine import Engine
from orchestrator.finding import Finding, works
from snapshot_drivers.cgroups import hierarchies

NAMES = [
    "platform", "rights", "kernel calls", "freezer", "helpers", "data directory", "engine", "engine mode",
    "storage driver", "control groups", "upper directory", "runc", "free space", "base image", "criu", "git",
]  # fmt: skip


def without_engine(data_dir: Path) -> list[Finding]:
    return doctor.examine(data_dir, connect=lambda: Engine.connect("unix:///nonexistent/docker.sock"))


def finding(findings: list[Finding], name: str) -> Finding:
    return next(one for one in findings if one.name == name)


def test_without_an_engine_everything_is_named_and_only_the_engine_part_is_unknown(tmp_path: Path) -> None:
    findings = without_engine(tmp_path / "data")
    assert [one.name for one in findings] == NAMES
    engine = finding(findings, "engine")
    assert engine.ok is False
    assert "unix:///nonexistent/docker.sock" in engine.found
    assert engine.remedy == "run deploy/engine"
    assert {one.ok for one in findings if "no engine answers" in one.found and one is not engine} == {None}
    assert not works(findings)


def test_every_failure_has_a_remedy(tmp_path: Path) -> None:
    assert [one.name for one in without_engine(tmp_path) if one.ok is False and not one.remedy] == []


def test_only_a_needed_thing_that_failed_keeps_runs_from_working() -> None:
    fine = Finding(name="a", ok=True, found="there")
    unknown = Finding(name="b", ok=None, found="cannot be told")
    advice = Finding(name="c", ok=False, found="old", remedy="use a newer one", needed=False)
    assert works([fine, unknown, advice])
    assert not works([fine, advice.model_copy(update={"needed": True})])


def test_looking_makes_no_data_directory(tmp_path: Path) -> None:
    data_dir = tmp_path / "a" / "b"
    assert finding(without_engine(data_dir), "data directory").ok is True
    assert not (tmp_path / "a").exists()


def test_a_data_directory_that_others_may_read_is_a_failure_with_the_command_that_closes_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    found = finding(without_engine(tmp_path), "data directory")
    assert found.ok is False
    assert found.remedy == f"run: chmod 0700 {tmp_path}"


def test_helpers_of_the_data_directory_are_looked_at_first_and_their_faults_are_named(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir(mode=0o700)
    shutil.copy("/bin/sh", tmp_path / "bin" / "launch")
    (tmp_path / "bin" / "enter").write_text("#!/bin/sh\n")
    found = finding(without_engine(tmp_path), "helpers")
    assert found.ok is False
    assert f"{tmp_path}/bin/launch is linked dynamically" in found.found
    assert f"{tmp_path}/bin/enter is no 64-bit program" in found.found
    assert found.remedy == "run deploy/helpers"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_freezer_is_tried_and_leaves_no_group_behind(tmp_path: Path) -> None:
    assert finding(without_engine(tmp_path), "freezer").ok is True
    groups = [tree.directory(f"/orchestrator-doctor-{os.getpid()}") for tree in hierarchies()]
    assert not any(group.exists() for group in groups)


def test_missing_capabilities_are_named(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nCapEff:\t00000000a80425fb\nCapBnd:\t0\n")
    assert host.missing_capabilities(status) == ["DAC_READ_SEARCH", "SYS_PTRACE", "SYS_ADMIN"]
    status.write_text("CapEff:\t000001ffffffffff\n")
    assert host.missing_capabilities(status) == []


def test_a_program_cannot_be_a_helper_when_it_is_not_there_or_not_executable(tmp_path: Path) -> None:
    assert "No such file" in (host.fault_of_static_program(tmp_path / "none") or "")
    plain = tmp_path / "plain"
    plain.write_bytes(Path("/bin/sh").read_bytes())
    if os.geteuid() != 0 or not os.access(plain, os.X_OK):
        assert host.fault_of_static_program(plain) == "is not executable"


def test_a_program_for_another_processor_cannot_be_a_helper(tmp_path: Path) -> None:
    program = tmp_path / "program"
    data = bytearray(Path("/bin/sh").read_bytes())
    data[18:20] = b"\xf3\x00"  # RISC-V
    program.write_bytes(data)
    program.chmod(0o755)
    assert host.fault_of_static_program(program) == "is a program for another processor"


def test_a_truncated_program_cannot_be_a_helper(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(Path("/bin/sh").read_bytes()[:70])
    program.chmod(0o755)
    assert host.fault_of_static_program(program) == "is a damaged program"


@pytest.mark.parametrize(
    ("version", "fixed"),
    [
        ("1.2.8", True),
        ("v1.2.8-0-geeb7e602", True),
        ("1.2.7", False),
        ("1.3.3", True),
        ("1.3.2", False),
        ("1.4.0-rc.2", False),
        ("1.4.0-rc.3", True),
        ("1.4.0~rc3+ds1", True),
        ("1.4.0", True),
        ("1.5.0-rc.1", True),
        ("2.0.0", True),
        ("1.1.15", False),
        ("a916309fff0f838eb94e928713dbc3c0d0ac7aa4", None),
        ("", None),
        ("1.1.5+ds1-1+deb12u1", None),
        ("1.1.12-0ubuntu3.1", None),
    ],
)
def test_runc_is_compared_with_the_fixed_version_of_its_series(
    version: str, fixed: bool | None, tmp_path: Path
) -> None:
    assert host.runc_is_fixed(version, changelog=tmp_path / "none") is fixed


@pytest.mark.parametrize("named", [True, False])
def test_a_distribution_names_its_fix_of_runc_in_the_changelog(named: bool, tmp_path: Path) -> None:
    changelog = tmp_path / "changelog.Debian.gz"
    text = f"runc (1.1.5+ds1-1+deb12u9) bookworm; urgency=medium\n  * {host.FIXED_CVE if named else 'none'}\n"
    changelog.write_bytes(gzip.compress(text.encode()))
    assert host.runc_is_fixed("1.1.5+ds1", changelog) is named
    changelog.write_bytes(changelog.read_bytes()[:-12])
    assert host.runc_is_fixed("1.1.5+ds1", changelog) is None


def test_space_is_that_of_the_nearest_directory_above(tmp_path: Path) -> None:
    room = host.space(tmp_path / "not" / "yet")
    assert room.device == tmp_path.stat().st_dev
    assert room.free_bytes > 0
