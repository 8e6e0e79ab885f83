"""Archives of a recorded run, true ones and forged ones, for tests; no engine is needed to make them."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from blake3 import blake3

from orchestrator.archive import form
from orchestrator.aside import put_aside
from orchestrator.cli.main import main
from orchestrator.container_config import ImageFacts, config_of
from orchestrator.context_log import ContextLog
from orchestrator.data_dir import DataDir
from orchestrator.events import RunEvent
from orchestrator.run_record import RunRecord
from orchestrator.task import TaskSpec, recorded_text
from snapshot_drivers.overlay.capture import Index
from snapshot_drivers.tree import pack
from tests.unit.plain_upper import PlainUpper
from tests.unit.run_builder import RunBuilder

RUN = "packed"
STEPS = 3


def make_run(top: Path, **task: Any) -> DataDir:
    """A data directory with a run of three steps, whose snapshots are real; its second answer lies beside the log."""
    place = DataDir(top / "origin").open()
    spec = TaskSpec.model_validate({"name": "t", "image": "base", "agent": {"kind": "manual"}, **task})
    run = place.create_run(RUN, task_text=recorded_text(spec))
    image = ImageFacts(image_id="i", layer_ids=("l",), architecture="a")
    config = config_of(spec, image, run_id=RUN, data_dir=place.root, helpers=place.bin, cgroup_driver="cgroupfs")
    run.write_record(
        RunRecord(
            run_id=RUN,
            created_at="2026-01-01T00:00:00+00:00",
            orchestrator_version="0.1.0",
            task_name="t",
            driver="overlay",
            source_dir="/src",
            container=config,
        )
    )
    with ContextLog.open(run.events_path, RUN, writer=True) as log:
        first = RunEvent(step=0, parent_seq=None, task=spec.redacted(), tools=[], driver="overlay", container="c")
        log.append(first)
    builder, upper, index = RunBuilder(run.events_path, RUN), PlainUpper(place.root), Index()
    (upper.upper / "deep/er").mkdir(parents=True)
    (upper.upper / "deep/er/same").write_bytes(os.urandom(5000))
    os.setxattr(upper.upper / "deep", "trusted.overlay.origin", b"a handle of this host")
    os.setxattr(upper.upper / "deep", "trusted.overlay.opaque", b"y")
    os.mknod(upper.upper / "gone", stat.S_IFCHR, 0)
    for number in range(STEPS):
        (upper.upper / "file").write_text(f"state {number}")
        snapshot, index = upper.capture(index)
        pair = {"before": snapshot.snapshot_id, "after": snapshot.snapshot_id}
        builder.checkpoint(driver="overlay", coverage=snapshot.coverage, **pair)
        text = f"step {number}" if number != 1 else "x" * 300_000
        builder.call(text, tools=["bash"], response=put_aside(run.path, {"text": text}, lambda raw: raw), **pair)
        builder.tool(before=snapshot.snapshot_id)
    builder.close()
    upper.content.close()
    return place


class Archive:
    """The members of an archive, to be changed and written again."""

    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as tar:
            self.members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]

    def names(self, group: str) -> list[str]:
        return [name for name in self.members if name.startswith(group)]

    def json(self, name: str) -> Any:
        return json.loads(self.members[name])

    def put(self, name: str, value: Any) -> None:
        self.members[name] = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()

    def edit(self, name: str, change: Callable[[Any], object]) -> None:
        value = self.json(name)
        change(value)
        self.put(name, value)

    def task(self, **keys: Any) -> None:
        """The task is another one, in the log too."""
        task = yaml.safe_load(self.members[form.TASK]) | keys
        self.put(form.TASK, yaml.safe_dump(task).encode())
        self.line(0, lambda event: event.update(task=task))

    def line(self, number: int, change: Callable[[dict[str, Any]], object]) -> None:
        """A changed line with the checksum that fits."""
        lines = self.members[form.EVENTS].splitlines(keepends=True)
        event = json.loads(lines[number])
        event.pop("crc")
        change(event)
        whole = json.dumps(event, separators=(",", ":")).encode()
        lines[number] = b'%b,"crc":"%08x"}\n' % (whole[:-1], zlib.crc32(whole))
        self.put(form.EVENTS, b"".join(lines))

    def tree(self, *entries: list[Any], root: list[Any] | None = None, more: tuple[bytes, ...] = ()) -> None:
        """All snapshots hold these entries in their root directory, and nothing else."""
        leaf = pack(list(entries))
        top = pack(root or entry(b"", stat.S_IFDIR | 0o755, [blake3(leaf).digest()]))
        for name in self.names("objects/"):
            del self.members[name]
        for data in (leaf, top, *more):
            self.put(f"objects/{blake3(data).hexdigest()}", data)
        for name in self.names("manifests/"):
            self.edit(name, lambda manifest: manifest["trees"][0].update(root=blake3(top).hexdigest()))

    def fitted(self) -> Archive:
        """The head says what is there."""

        def change(head: dict[str, Any]) -> None:
            for key, name in (("task", form.TASK), ("events", form.EVENTS)):
                if name in self.members:
                    head[key] = _packed(self.members[name])
            names = self.names("manifests/")
            head["manifests"] = {name[len("manifests/") : -len(".json")]: _packed(self.members[name]) for name in names}
            head["objects"] = len(self.names("objects/"))

        self.edit(form.HEAD, change)
        return self

    def write(self, path: Path) -> Path:
        groups = [(form.place_of(name) or (99, name), name) for name in self.members]
        path.write_bytes(b"".join(member(name, self.members[name]) for _, name in sorted(groups)) + form.END)
        return path


def member(name: str, data: bytes, **fields: Any) -> bytes:
    """A member as any tar program may write it."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def entry(name: bytes, mode: int, payload: Any = None, xattrs: Any = None, link: Any = None, **more: Any) -> list[Any]:
    """A stored entry, by default root's."""
    return [name, mode, more.get("uid", 0), more.get("gid", 0), more.get("mtime_ns", 0), xattrs, link, payload]


def _packed(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "digest": blake3(data).hexdigest()}


def seen(top: Path) -> dict[str, str]:
    """Everything below a directory: type, mode, content."""
    found = {}
    for path in sorted(top.rglob("*")):
        looked = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(looked.st_mode) else ""
        found[str(path.relative_to(top))] = f"{looked.st_mode:o} {content}"
    return found


def run_cli(*words: str) -> int:
    return main(list(words))


class Host:
    """A data directory that an archive is to come into, and what stands around it."""

    def __init__(self, top: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.top = top
        self.archive = top / "hostile.tar"
        self._capsys = capsys
        (top / "outside").write_text("canary")
        self._data = top / "data"

    def refuses(self, *words: str) -> tuple[int, str]:
        """The exit code and the words of ``unpack``, which has changed nothing."""
        before = seen(self.top)
        code = run_cli("unpack", str(self.archive), "--data-dir", str(self._data), *words)
        after = seen(self.top)
        empty = {"data/runs", "data/store", "data/bin", "data"}
        assert {name: what for name, what in after.items() if before.get(name) != what}.keys() <= empty
        assert before.keys() <= after.keys()
        return code, self._capsys.readouterr().err
