"""The shape of the repository: layers, reading order, sizes, and what stands at the top."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshot_drivers import registry

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "snapshot_drivers")
MOST_LINES = 400
TOP_LEVEL = {
    "README.md", "DESIGN.md", "LICENSE", "pyproject.toml", "requirements.lock", "requirements-oldest.lock",
    "orchestrator", "snapshot_drivers",
    "images", "deploy", "docs", "examples", "benchmarks", "tests", ".ci", ".gitignore",
}  # fmt: skip
IGNORED = {
    ".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".import_linter_cache", "build",
    "dist", "__pycache__",
}  # fmt: skip


def pyproject() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def reading_order() -> list[str]:
    """Modules of ``orchestrator`` in the order in which one reads them; the linter's contract is where it is kept."""
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "reading-order")
    return [name.strip("()") for name in reversed(layers)]


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (REPOSITORY / folder).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    """Absolute names of what a file imports, wherever in the file it does so."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path: Path) -> str:
    """``data_dir`` for ``orchestrator/data_dir.py``, ``cli`` for all that lies in ``orchestrator/cli``."""
    return path.relative_to(REPOSITORY / "orchestrator").parts[0].removesuffix(".py")


def test_the_drivers_never_import_the_orchestrator() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in sources("snapshot_drivers")
        for name in imported_modules(path)
        if name.split(".")[0] == "orchestrator"
    ]
    assert not wrong


def test_every_module_has_its_place_in_the_reading_order() -> None:
    modules = {module_of(path) for path in sources("orchestrator")} - {"__init__"}
    assert modules <= set(reading_order())


def test_a_module_imports_only_what_is_read_before_it() -> None:
    place = {name: index for index, name in enumerate(reading_order())}
    wrong = []
    for path in sources("orchestrator"):
        own = module_of(path)
        if own == "__init__":
            continue
        for name in imported_modules(path):
            package, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if package == "orchestrator" and other in place and other != own and place[other] > place.get(own, -1):
                wrong.append(f"{own} imports {other}")
    assert not wrong


def test_no_file_is_longer_than_one_can_read() -> None:
    files = [*sources(*PACKAGES, "tests"), *(REPOSITORY / "images").rglob("*.[ch]")]
    lengths = {str(path.relative_to(REPOSITORY)): path.read_bytes().count(b"\n") for path in files}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_no_file_is_named_after_nothing() -> None:
    empty_names = {"utils", "util", "helpers", "common", "manager", "misc"}
    assert [path for path in sources(*PACKAGES) if path.stem in empty_names] == []


def test_the_top_level_holds_what_it_should() -> None:
    names = {path.name for path in REPOSITORY.iterdir() if not path.name.endswith(".egg-info")}
    assert names - IGNORED - TOP_LEVEL == set()


def test_the_lock_file_names_every_dependency_once_and_no_registry() -> None:
    lines = (REPOSITORY / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.match(r"[a-z0-9.-]+==[^ ]+( ; .+)?$", pin) for pin in pins)
    pinned = [pin.partition("==")[0] for pin in pins]
    assert len(pinned) == len(set(pinned))
    project = pyproject()["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(line for extra in extras for line in extra)]
    assert {re.split(r"[^A-Za-z0-9-]", line)[0].lower() for line in wanted} <= set(pinned)


def test_every_driver_of_ours_is_in_the_entry_point_group() -> None:
    ours = {name: source.path for name, source in registry.known_drivers().items() if source.distribution is None}
    assert pyproject()["project"]["entry-points"][registry.ENTRY_POINT_GROUP] == ours


@pytest.mark.parametrize(
    "pattern", [r"/(home|root|work|Users)/[a-z]", r"https?://(?!(www\.apache\.org|localhost|127\.))"]
)
def test_no_file_of_the_set_up_names_a_machine_or_a_registry(pattern: str) -> None:
    files = [
        path for folder in ("deploy", "images", ".ci") for path in (REPOSITORY / folder).rglob("*") if path.is_file()
    ]
    files += [REPOSITORY / "pyproject.toml", REPOSITORY / "requirements.lock", REPOSITORY / ".gitignore"]
    found = [str(path) for path in files if re.search(pattern, path.read_text(encoding="utf-8"))]
    assert found == []
