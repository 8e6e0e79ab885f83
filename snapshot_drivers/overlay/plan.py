"""What must be done to a tree so that it equals another one: pure, and proportional to the difference.

Directories with equal digests are never looked into. Where a hardlink group of the wanted tree is not as it was, all
its members are made anew, so that they share one inode again; only then is the whole wanted tree walked.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from snapshot_drivers.errors import RestoreRefused
from snapshot_drivers.inode_flags import HOLDING
from snapshot_drivers.overlay.paths import PathSet
from snapshot_drivers.overlay.runs import Runs
from snapshot_drivers.tree import Get, Node, children_of, entries_in

_NO_RUNS: Final[Mapping[int, Runs]] = MappingProxyType({})


@dataclass(eq=False)
class DirectoryPlan:
    """What to do in one directory, in the order of the fields; then its attributes are set."""

    node: Node
    """The directory as wanted."""
    create: bool = False
    remove: list[bytes] = field(default_factory=list)
    release: set[bytes] = field(default_factory=set)
    """Entries of the next two lists that the flags of their inodes keep, or will by then, from being changed."""
    put: list[Node] = field(default_factory=list)
    """Entries that are no directories, to be made (or to replace what stands there)."""
    adjust: list[Node] = field(default_factory=list)
    """Entries that are no directories, of which only the attributes differ."""
    below: list[DirectoryPlan] = field(default_factory=list)
    attributes_differ: bool = False

    @property
    def is_empty(self) -> bool:
        """True when nothing is to be done here or below."""
        return not (self.create or self.remove or self.put or self.adjust or self.below or self.attributes_differ)


def make_plan(real: Node, wanted: Node, get: Get, skip: PathSet, runs: Mapping[int, Runs] = _NO_RUNS) -> DirectoryPlan:
    """How ``real`` becomes ``wanted``. What stands at paths in ``skip`` is left as it is, in the directories above it.

    ``runs``: of directories of ``real``, by inode: where these are known, equal leaves are not looked into.

    Raises: StoreDamaged; RestoreRefused: one of these directories would have to give way to something else.
    """
    broken: set[bytes] = set()
    plan = _plan(real, wanted, get, skip, frozenset(), broken, runs)
    return _plan(real, wanted, get, skip, frozenset(broken), set(), _NO_RUNS) if broken else plan


def _plan(
    real: Node,
    wanted: Node,
    get: Get,
    skip: PathSet,
    remake: frozenset[bytes],
    broken: set[bytes],
    runs: Mapping[int, Runs],
) -> DirectoryPlan:
    top = DirectoryPlan(wanted, attributes_differ=real.attributes() != wanted.attributes())
    work: list[tuple[DirectoryPlan, Node | None, PathSet]] = [(top, real, skip)]
    visited: list[tuple[DirectoryPlan, DirectoryPlan]] = []
    while work:
        plan, present, out = work.pop()
        here, want = _unequal(present, plan.node, get, runs)
        for name, found in here.items():
            if name in want or out.holds(name):
                continue
            if found.stays:
                kept = copy.copy(found)
                kept.children, kept.digests = {}, None
                _visit(plan, DirectoryPlan(kept), found, out.below(name), work, visited)
            else:
                plan.remove.append(name)
        for name, node in want.items():
            there = here.get(name)
            if node.unreadable or out.holds(name):
                continue
            if there is not None and there.stays and not node.is_directory:
                raise RestoreRefused(
                    f"{os.fsdecode(name)!r} is no directory in the snapshot, but is one now and holds what the task "
                    "excludes; move that away"
                )
            if node.is_directory:
                if there is not None and (not there.is_directory or there.unreadable):
                    plan.remove.append(name)
                    there = None
                if (
                    there is not None
                    and there.digests == node.digests
                    and there.digests is not None
                    and there.attributes() == node.attributes()
                    and not remake
                ):
                    continue
                below = DirectoryPlan(node, create=there is None)
                below.attributes_differ = there is not None and there.attributes() != node.attributes()
                _visit(plan, below, there, out.below(name), work, visited)
            elif there is None or there.content() != node.content() or node.link in remake or _is_bound(there, node):
                if there is not None and there.is_directory:
                    plan.remove.append(name)
                elif there is not None and there.flags & HOLDING:
                    plan.release.add(name)
                plan.put.append(node)
                if node.link is not None:
                    broken.add(node.link)
            elif there.attributes() != node.attributes():
                plan.adjust.append(node)
                if (there.flags | node.flags) & HOLDING:  # another name of it may have been adjusted already
                    plan.release.add(name)
    for parent, below in reversed(visited):
        if not below.is_empty:
            parent.below.append(below)
    return top


def _unequal(
    present: Node | None, wanted: Node, get: Get, runs: Mapping[int, Runs]
) -> tuple[Mapping[bytes, Node], Mapping[bytes, Node]]:
    """The entries of both directories, without those in leaves that both have, where these are known."""
    if present is None:
        return {}, children_of(wanted, get)
    known = runs.get(present.ino)
    if known is None or present.children is None or wanted.children is not None or wanted.digests is None:
        return children_of(present, get), children_of(wanted, get)
    equal = set(known.digests).intersection(wanted.digests)
    here = {name: present.children[name] for name in known.names_outside(equal)}
    return here, entries_in([digest for digest in wanted.digests if digest not in equal], get)


def _is_bound(there: Node, wanted: Node) -> bool:
    """True if other attributes would show on a file that is to be left as it is."""
    return there.shared and there.attributes() != wanted.attributes()


def _visit(
    parent: DirectoryPlan,
    below: DirectoryPlan,
    present: Node | None,
    skip: PathSet,
    work: list[tuple[DirectoryPlan, Node | None, PathSet]],
    visited: list[tuple[DirectoryPlan, DirectoryPlan]],
) -> None:
    visited.append((parent, below))
    work.append((below, present, skip))


def wanted_files(plan: DirectoryPlan) -> Iterator[Node]:
    """Every entry that a plan makes anew and that is no directory."""
    work = [plan]
    while work:
        present = work.pop()
        yield from present.put
        work += present.below


def first_difference(plan: DirectoryPlan) -> str:
    """One path that a plan would touch, to be named in an error."""
    parts: list[bytes] = []
    while True:
        for names in (plan.remove, [node.name for node in (*plan.put, *plan.adjust)]):
            if names:
                parts.append(names[0])
                return "/" + b"/".join(parts).decode("utf-8", "surrogateescape")
        if not plan.below:
            return "/" + b"/".join(parts).decode("utf-8", "surrogateescape")
        plan = plan.below[0]
        parts.append(plan.node.name)
