"""Reads a YAML file so that every value is known with its line, and nothing in the file can do harm.

Duplicate keys are errors (YAML parsers keep the last one in silence), aliases cannot grow the document without bound,
and no tag makes an object.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestrator.errors import TaskError

MAX_FILE_BYTES = 2**20
MAX_NODES = 50_000
"""Values in the document after its aliases are followed: more is an alias bomb."""
MAX_DEPTH = 50

Loc = tuple[str | int, ...]
"""Where a value stands: keys and list positions from the top."""

_UNWRITABLE = re.compile("[\x00\ud800-\udfff]")


@dataclass(frozen=True)
class TaskFile:
    """A YAML document and where its parts stand."""

    name: str
    """The file as messages name it."""
    text: str
    data: Any
    key_lines: dict[Loc, int] = field(repr=False)
    """Line (from 1) of each key, or of a list's item."""
    value_lines: dict[Loc, int] = field(repr=False)

    def line(self, loc: Loc, *, key: bool = False) -> int:
        """The line of the value at ``loc`` (its key, with ``key``); of the nearest part above, where there is none."""
        lines = self.key_lines if key else self.value_lines
        while loc and loc not in lines:
            loc = loc[:-1]
        return lines.get(loc, 1)


def read_task_file(path: Path) -> TaskFile:
    """The file's document, with lines.

    Raises: TaskError: missing, unreadable, larger than 1 MiB, not UTF-8, not YAML, duplicate keys, no mapping.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise TaskError(f"{path}: no such file: give the path of a task.yaml") from None
    except IsADirectoryError:
        raise TaskError(f"{path}: is a directory: give the path of the task.yaml in it") from None
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise TaskError(f"{path}: larger than 1 MiB: a task is a small text; put data into the image or a bind")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise TaskError(f"{path}:{line}: not UTF-8 (byte 0x{raw[error.start]:02x}): save the file as UTF-8") from error
    return parse_task_text(text, str(path))


def parse_task_text(text: str, name: str) -> TaskFile:
    """The document in ``text``; ``name`` stands for the file in messages.

    Raises: TaskError, as ``read_task_file``.
    """
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise TaskError(f"{name}:1: empty: a task needs at least name, image and instruction")
        if not isinstance(root, yaml.MappingNode):
            raise TaskError(f"{name}:{_line(root)}: a task is a mapping (key: value), not a {_kind(root)}")
        reader = _Reader(name, loader)
        data = reader.value(root, (), ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = f" ({error.context})" if error.context else ""
        line = mark.line + 1 if mark else 1
        raise TaskError(f"{name}:{line}: not valid YAML: {error.problem or error.note}{context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise TaskError(f"{name}:{line}: not valid YAML: character U+{ord(text[error.position]):04X}") from error
    except yaml.YAMLError as error:
        raise TaskError(f"{name}:1: not valid YAML: {error}") from error
    except RecursionError as error:
        raise TaskError(f"{name}:1: nested too deeply") from error
    finally:
        if loader is not None:
            loader.dispose()
    return TaskFile(name=name, text=text, data=data, key_lines=reader.key_lines, value_lines=reader.value_lines)


class _Reader:
    """Turns composed nodes into plain values and notes their lines."""

    def __init__(self, name: str, loader: yaml.SafeLoader) -> None:
        self.name = name
        self.loader = loader
        self.key_lines: dict[Loc, int] = {(): 1}
        self.value_lines: dict[Loc, int] = {(): 1}
        self.nodes = 0

    def value(self, node: yaml.Node, loc: Loc, above: tuple[int, ...]) -> Any:
        """The plain value of ``node``; ``above``: identities of the nodes around it."""
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise TaskError(f"{self.name}:{_line(node)}: more than {MAX_NODES} values once aliases are followed")
        if id(node) in above:
            raise TaskError(f"{self.name}:{_line(node)}: an alias (*) that contains itself")
        if len(above) >= MAX_DEPTH:
            raise TaskError(f"{self.name}:{_line(node)}: nested deeper than {MAX_DEPTH} levels")
        self.value_lines[loc] = _line(node)
        around = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, loc, around)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.key_lines[(*loc, index)] = _line(item)
                items.append(self.value(item, (*loc, index), around))
            return items
        return self.scalar(node)

    def mapping(self, node: yaml.MappingNode, loc: Loc, around: tuple[int, ...]) -> dict[Any, Any]:
        """The plain dict of a mapping node; keys are text, each once."""
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            line = _line(key_node)
            if not isinstance(key, str):
                raise TaskError(f"{self.name}:{line}: a key must be text: put it in quotes")
            if key in found:
                first = self.key_lines[(*loc, key)]
                where = ".".join(str(part) for part in (*loc, key))
                raise TaskError(f"{self.name}:{line}: {where}: duplicate key (the first stands in line {first})")
            self.key_lines[(*loc, key)] = line
            found[key] = self.value(value_node, (*loc, key), around)
        return found

    def scalar(self, node: yaml.Node) -> Hashable:
        """Text, number, boolean, date or null."""
        try:
            value: Hashable = self.loader.construct_object(node)
        except ValueError as error:
            raise TaskError(f"{self.name}:{_line(node)}: {node.value!r} cannot be read as a value: {error}") from error
        if isinstance(value, str) and (bad := _UNWRITABLE.search(value)):
            raise TaskError(
                f"{self.name}:{_line(node)}: character U+{ord(bad.group()):04X} cannot be passed to a container"
            )
        return value


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _kind(node: yaml.Node) -> str:
    return "list" if isinstance(node, yaml.SequenceNode) else "single value"
