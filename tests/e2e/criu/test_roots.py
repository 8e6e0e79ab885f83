"""Images with another libc, and with nothing but one program: CRIU loads nothing of theirs."""

from __future__ import annotations

import io
import secrets
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest

from tests.e2e.criu.rewindable import Make

REPOSITORY = Path(__file__).parents[3]
COUNTER = r"""
#include <arpa/inet.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

/* counter serve: answers each connection with the next number, and writes it to /state; counter: asks. */
int main(int argc, char **argv)
{
	struct sockaddr_in name = { AF_INET, htons(8000), { htonl(INADDR_LOOPBACK) }, { 0 } };
	int sock = socket(AF_INET, SOCK_STREAM, 0), one = 1, peer, count = 0;
	char text[16];

	if (argc == 1) {
		if (connect(sock, (void *)&name, sizeof(name)))
			return 1;
		return write(1, text, read(sock, text, sizeof(text))) < 1;
	}
	setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(sock, (void *)&name, sizeof(name)) || listen(sock, 9))
		return 1;
	while ((peer = accept(sock, 0, 0)) >= 0) {
		int size = sprintf(text, "%d", ++count), file = open("/state", O_WRONLY | O_CREAT | O_TRUNC, 0600);

		write(file, text, size);
		close(file);
		write(peer, text, size);
		close(peer);
	}
}
"""

Import = Callable[[dict[str, bytes]], str]


@pytest.fixture
def imported() -> Iterator[Import]:
    """Makes an image of programs by their path; it is removed afterwards."""
    client = docker.from_env()
    names: list[str] = []

    def make(programs: dict[str, bytes]) -> str:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for path, data in programs.items():
                entry = tarfile.TarInfo(path)
                entry.mode, entry.size = 0o755, len(data)
                tar.addfile(entry, io.BytesIO(data))
        names.append(f"orchestrator-root-{secrets.token_hex(4)}:latest")
        client.api.import_image_from_data(file.getvalue(), *names[-1].split(":"))
        return names[-1]

    yield make
    for name in names:
        client.images.remove(name, force=True)
    client.close()


def test_a_static_program_in_an_image_without_a_shell_goes_on(make: Make, imported: Import, tmp_path: Path) -> None:
    (tmp_path / "counter.c").write_text(COUNTER)
    compile_ = [REPOSITORY / "deploy" / "helpers", "--compile", tmp_path / "counter", tmp_path / "counter.c"]
    subprocess.run(compile_, check=True)
    place = make({"image": imported({"counter": (tmp_path / "counter").read_bytes()})})
    place.container.background(["/counter", "serve"], user="root")
    deadline = time.monotonic() + 30
    while place.container.exec(["/counter"]).output != b"1":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for turn in range(1, 3):
        snapshot = place.taken()
        assert place.container.exec(["/counter"]).output == b"%d" % (turn + 1)
        place.restore(snapshot)
        assert b"".join(place.driver.read_file(snapshot.snapshot_id, "/state") or ()) == b"%d" % turn
        assert place.container.exec(["/counter"]).output == b"%d" % (turn + 1)


def test_a_pipeline_of_a_static_busybox_root_goes_on(make: Make, imported: Import, programs_image: str) -> None:
    client = docker.from_env()
    source = client.containers.create(programs_image)
    try:
        stream, _ = source.get_archive("/bin/busybox")
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as tar:
            member = tar.extractfile("busybox")
            assert member is not None
            busybox = member.read()
    finally:
        source.remove()
        client.close()
    tools = {f"bin/{name}": busybox for name in ("sh", "sleep", "cat", "wc", "rm", "pkill", "test")}
    place = make({"image": imported(tools)})
    place.sh(
        "(while :; do echo x; sleep 0.05; done | while read -r x; do n=$((n+1)); echo $n >> /out; done) >/dev/null &"
    )
    place.wait("test -s /out")
    snapshot = place.taken()
    lines = b"".join(place.driver.read_file(snapshot.snapshot_id, "/out") or ()).split()
    place.sh("pkill sleep; rm /out")
    place.restore(snapshot)
    place.wait(f"test $(wc -l < /out) -gt {len(lines) + 3}")
    counted = [int(word) for word in place.sh("cat /out").split()]
    assert counted == list(range(1, len(counted) + 1))
