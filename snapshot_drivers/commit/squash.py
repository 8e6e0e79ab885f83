"""One layer that does what several did, so that no number of restores reaches an engine's limit (about 125 layers).

The layers below, those of the run's own image, stay as they are: what is relative to them remains so.

Source: OCI image layer specification, "Whiteouts".
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Final

_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"


@dataclass(frozen=True)
class _Entry:
    """The member of one layer that shows at a path."""

    layer: int
    member: tarfile.TarInfo


class Squash:
    """Layers put together, from the lowest to the topmost."""

    def __init__(self, layers: Sequence[IO[bytes]]) -> None:
        """``layers``: seekable tar files; they stay open as long as this is used."""
        for layer in layers:
            layer.seek(0)
        self._tars = [tarfile.open(fileobj=layer, mode="r:") for layer in layers]  # noqa: SIM115 see above
        self._shown: dict[str, _Entry] = {}
        self._deleted: dict[str, tarfile.TarInfo] = {}
        self._opaque: set[str] = set()
        self._above: set[str] = set()
        """Every directory above something that was shown or deleted."""
        for number, tar in enumerate(self._tars):
            self._add(number, tar)

    def write(self, output: IO[bytes]) -> None:
        """The one layer, as a tar file.

        Raises: OSError. tarfile.TarError.
        """
        with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(self._deleted):
                above, _, name = path.rpartition("/")
                if not any(part in self._deleted for part in _above(path)):
                    tar.addfile(_mark(self._deleted[path], f"{above}/{_WHITEOUT}{name}".lstrip("/")))
            links: list[str] = []
            for path in sorted(self._shown):
                entry = self._shown[path]
                if entry.member.islnk():
                    links.append(path)
                    continue
                tar.addfile(entry.member, self._content(entry))
                if path in self._opaque:
                    tar.addfile(_mark(entry.member, f"{path}/{_OPAQUE}"))
            self._write_links(tar, links)

    def _add(self, number: int, tar: tarfile.TarFile) -> None:
        members = [(member.name.strip("/").removeprefix("./"), member) for member in tar]
        # What a layer takes away is of the layers below it, wherever in the file that is said.
        for path, member in members:
            above, _, name = path.rpartition("/")
            if name == _OPAQUE:
                self._drop_below(above)
                self._opaque.add(above)
            elif name.startswith(_WHITEOUT):
                gone = f"{above}/{name.removeprefix(_WHITEOUT)}".lstrip("/")
                self._drop(gone)
                self._deleted[gone] = member
                self._above.update(_above(gone))
        for path, member in members:
            if path in ("", ".") or path.rpartition("/")[2].startswith(_WHITEOUT):
                continue
            before = self._shown.get(path)
            if not member.isdir():
                self._drop(path)
            elif self._deleted.pop(path, None) is not None or (before is not None and not before.member.isdir()):
                self._opaque.add(path)  # what the image below has there must not show again
            self._deleted.pop(path, None)
            self._shown[path] = _Entry(number, member)
            self._above.update(_above(path))

    def _drop(self, path: str) -> None:
        self._shown.pop(path, None)
        self._opaque.discard(path)
        self._drop_below(path)

    def _drop_below(self, path: str) -> None:
        if path not in self._above:
            return
        inside = f"{path}/"
        for known in (self._shown, self._deleted):
            for other in [other for other in known if other.startswith(inside)]:
                del known[other]
        self._opaque = {other for other in self._opaque if not other.startswith(inside)}

    def _content(self, entry: _Entry) -> IO[bytes] | None:
        return self._tars[entry.layer].extractfile(entry.member) if entry.member.isreg() else None

    def _write_links(self, tar: tarfile.TarFile, paths: list[str]) -> None:
        """Hard links; where their file does not show any more, the first of them becomes the file."""
        stands_for: dict[tuple[int, str], str] = {}
        for path in paths:
            entry = self._shown[path]
            first = entry.member.linkname.strip("/").removeprefix("./")
            target = self._shown.get(first)
            if target is None or target.layer != entry.layer:
                key = (entry.layer, first)
                if key not in stands_for:
                    stands_for[key] = path
                    original = self._tars[entry.layer].getmember(entry.member.linkname)
                    content = self._tars[entry.layer].extractfile(original) if original.isreg() else None
                    tar.addfile(_renamed(original, name=path, linkname=original.linkname), content)
                    continue
                first = stands_for[key]
            tar.addfile(_renamed(entry.member, name=path, linkname=first))


def _mark(like: tarfile.TarInfo, name: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.mtime = int(like.mtime)
    made.mode = 0o600
    return made


def _renamed(member: tarfile.TarInfo, *, name: str, linkname: str) -> tarfile.TarInfo:
    """With another name, which the extended header must not overrule."""
    made = member.replace(name=name, linkname=linkname, deep=True)
    made.pax_headers = {key: text for key, text in member.pax_headers.items() if key not in ("path", "linkpath")}
    return made


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
