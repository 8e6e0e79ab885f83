"""States of a container whose checkpoints are measured: how each is made, and what changes between two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FLAT: Final = """
import os
os.makedirs("/w")
for number in range({files}):
    open(f"/w/f{{number}}", "w").write(str(number))
"""
NESTED: Final = """
import os
for directory in range({directories}):
    os.makedirs(f"/w/d{{directory}}")
    for number in range(50):
        open(f"/w/d{{directory}}/f{{number}}", "w").write(str(number))
"""
SMALL_CHANGE: Final = """
open(f"/w/changed-{round}", "w").write("{round}")
open(f"/w/again", "w").write("{round}")
"""
MEGABYTE: Final = """
import os
open("/w/megabyte", "wb").write(os.urandom(1_000_000))
"""
GIGABYTE: Final = """
import os
with open("/w/gigabyte", "wb") as file:
    for _ in range(1000):
        file.write(os.urandom(1_000_000))
"""
MANY_FILES: Final = """
import os, shutil
shutil.rmtree("/w/many", ignore_errors=True)
os.makedirs("/w/many")
for number in range(10_000):
    open(f"/w/many/f{{number}}", "wb").write(os.urandom(4000))
"""


@dataclass(frozen=True)
class Shape:
    """One state. The programs are Python's, run in the container; ``{round}`` stands for the number of the round."""

    name: str
    make: str
    changes: dict[str, str]
    """What is done before each checkpoint of a series, by the name of the series."""
    is_large: bool = False
    """The changes themselves are what costs: few rounds, and copies of the changed files beside them."""


SHAPES: Final = (
    Shape("1,000 files", FLAT.format(files=1000), {"two small files": SMALL_CHANGE, "1 MB": MEGABYTE}),
    Shape("10,000 files", NESTED.format(directories=200), {"two small files": SMALL_CHANGE, "1 MB": MEGABYTE}),
    Shape(
        "100,000 files, 2,000 directories",
        NESTED.format(directories=2000),
        {"two small files": SMALL_CHANGE, "1 MB": MEGABYTE},
    ),
    Shape(
        "100,000 files, one directory",
        FLAT.format(files=100_000),
        {"two small files": SMALL_CHANGE, "1 MB": MEGABYTE},
    ),
    Shape("one file of 1 GB", "import os; os.makedirs('/w')", {"all of it": GIGABYTE}, is_large=True),
    Shape("10,000 new files of 4 kB", "import os; os.makedirs('/w')", {"all of them": MANY_FILES}, is_large=True),
)
