"""What a hostile container can do to a capture or a restore: nothing of it runs, nothing hangs, nothing gains rights.

``ORCHESTRATOR_HOSTILE=long`` takes 50 snapshots beside each attacker instead of 8.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshot_drivers.base import CoverageState
from snapshot_drivers.criu import rpc
from snapshot_drivers.criu.images import sealed
from snapshot_drivers.errors import RestoreError, RestoreRefused
from snapshot_drivers.store.content import ContentStore
from snapshot_drivers.store.manifest import Manifest, ManifestStore, StoredImage, new_snapshot_id
from tests.e2e.criu.rewindable import ASK, OPTIONS, SERVE, Make, Rewindable, processes

COUNTER = SERVE + "count = 0\ndef answer():\n    global count; count += 1; return count\nserve(answer)"
PAIR = (
    SERVE + "listener = socket.create_server(('127.0.0.1', 9000))\n"
    "one = socket.create_connection(('127.0.0.1', 9000)); two, _ = listener.accept(); serve(lambda: 'here')"
)
ROUNDS = 50 if os.environ.get("ORCHESTRATOR_HOSTILE") == "long" else 8
ATTACK = """
import os, signal, socket
def kill(pid): os.kill(pid, signal.SIGKILL)
def stop(pid): os.kill(pid, signal.SIGSTOP)
def talk(pid):
    for line in open("/proc/net/unix"):
        if "crtools" in line:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.setblocking(False)
            peer.connect("\\0" + line.split("@", 1)[1].strip())
            peer.send(b"x" * 4096)
            mine.append(peer)
mine = []
own = set(os.listdir("/proc"))
open(__file__[:-3] + ".ready", "w").close()
while True:
    for name in set(os.listdir("/proc")) - own:
        try:
            if name.isdigit() and open(f"/proc/{name}/comm").read().strip() in ("criu", "ld-linux-x86-64"):
                %s(int(name))
        except OSError:
            pass
"""


def test_a_container_that_sets_traps_gets_none_of_them_run(make: Make) -> None:
    place = make()
    place.start(PAIR)
    place.sh(
        "printf '#!/bin/sh\\necho trap >> /trapped\\n' > /usr/local/sbin/iptables; cd /usr/local/sbin;"
        "chmod +x iptables;"
        "cp iptables nft; cp iptables ip6tables; cp iptables sh; mkdir -p /etc/criu /root/.criu /usr/lib/criu;"
        "echo action-script /usr/local/sbin/iptables | tee /etc/criu/default.conf > /root/.criu/default.conf;"
        "cp iptables /usr/lib/criu/x.so; echo rubbish > /run/criu.kdat; rm /usr/local/sbin/sh"
    )
    place.sh("cp /usr/local/sbin/iptables /usr/local/sbin/sh; echo /nowhere.so > /etc/ld.so.preload")
    place.container.exec(["/bin/rm", "-f", "/trapped"])
    before = place.sh("stat -c %Y.%y /tmp /run 2>/dev/null")
    snapshot = place.taken()
    place.restore(snapshot)
    assert place.container.exec(["/bin/cat", "/trapped"]).exit_code == 1
    assert before == place.sh("stat -c %Y.%y /tmp /run 2>/dev/null")
    assert not Path("/trapped").exists()


@pytest.mark.parametrize("attack", ["kill", "stop", "talk"])
def test_loops_against_criu_neither_hang_a_capture_nor_harm_a_program(make: Make, attack: str) -> None:
    place = make(timeout_s=2.0)
    place.start(COUNTER)
    place.start(ATTACK % attack, name="attack")
    before = place.sh("stat -c %y /tmp /run")
    taken = 0
    for turn in range(1, ROUNDS + 1):
        began = time.monotonic()
        snapshot = place.capture()
        found = processes(snapshot)
        assert time.monotonic() - began < 60
        assert len(found) == 2, snapshot.coverage.items
        assert all(reason for state, reason in found if state is not CoverageState.CAPTURED), found
        taken += all(state is CoverageState.CAPTURED for state, _ in found)
        assert place.sh(ASK) == str(turn)
    place.sh("pkill -f '^python3 attack'; while pgrep -f '^python3 attack' >/dev/null; do sleep 0.01; done")
    snapshot = place.taken()
    place.restore(snapshot)
    assert place.sh(ASK) == str(ROUNDS + 1)
    assert place.sh("stat -c %y /tmp /run; ls -A /tmp /run | grep criu || true") == before
    print(f"{attack}: {taken} of {ROUNDS} taken")


def test_an_attacker_beside_the_tree_stands_still_meanwhile(make: Make) -> None:
    from tests.e2e.criu.test_memory import exec_in

    place = make()
    place.start(COUNTER)
    place.write("/w/attack.py", ATTACK % "kill")
    exec_in(place, "exec python3 /w/attack.py")
    place.wait("test -e /w/attack.ready")
    for turn in range(1, ROUNDS + 1):
        states = sorted(state for state, _ in processes(place.capture()))
        assert states == [CoverageState.CAPTURED, CoverageState.MISSING]
        assert place.sh(ASK) == str(turn)


def test_edited_images_and_manifests_are_refused(make: Make) -> None:
    place = make()
    place.start(COUNTER)
    snapshot = place.taken()
    path = place.data_dir.store / "manifests" / f"{snapshot.snapshot_id}.json"
    whole = path.read_text()
    edited = json.loads(whole)
    edited["processes"]["images"] = [one for one in edited["processes"]["images"] if one["name"] != "seccomp.img"]
    assert edited != json.loads(whole)
    for text in (json.dumps(edited), whole.replace("CapEff", "CapEfg"), whole.replace("core-", "ding-")):
        path.write_text(text)
        with pytest.raises(RestoreRefused, match="seal"):
            place.restore(snapshot)
    path.write_text(whole)
    assert place.sh(ASK) == "1"
    place.restore(snapshot)
    assert place.sh(ASK) == "1"


RIGHTS = "cd /proc/$(pgrep -f '^python3 p.py'); grep -E 'Cap|Seccomp|NoNew' status; cat cgroup"


def all_capabilities(name: str, data: bytes) -> bytes | None:
    """Every capability set of a process has CAP_SYS_ADMIN and the other 30."""
    less, more = (varint(int(mask, 16)) for mask in ("a00425fb", "ffffffff"))
    return data.replace(less, more) if name.startswith("core-") else data


def varint(number: int) -> bytes:
    """As CRIU's images hold numbers."""
    return rpc.request(rpc.Kind.DUMP, {"pid": number})[5:]


def no_seccomp(name: str, data: bytes) -> bytes | None:
    """The filters are left out."""
    return None if name == "seccomp.img" else data


def other_cgroup(name: str, data: bytes) -> bytes | None:
    """Of the same length, so that the image can still be read."""
    return data.replace(b"/docker", b"/escape").replace(b"freezer", b"freezes") if name == "cgroup.img" else data


@pytest.mark.parametrize("edit", [all_capabilities, no_seccomp, other_cgroup])
def test_an_edit_by_one_who_has_the_key_gains_no_right(make: Make, edit: Callable[[str, bytes], bytes | None]) -> None:
    place = make()
    place.start(COUNTER)
    snapshot = place.taken()
    assert place.sh(ASK) == "1"
    before = place.sh(RIGHTS)
    forged = forge(place, snapshot.snapshot_id, edit)
    staged = place.driver.stage(place.container.target(), forged, OPTIONS)
    try:
        staged.apply()
    except RestoreError:
        assert place.container.exec("pgrep -f '^python3 p.py'").exit_code == 1
        return
    finally:
        staged.discard()
    assert place.sh(RIGHTS) == before


def forge(place: Rewindable, snapshot_id: str, edit: Callable[[str, bytes], bytes | None]) -> str:
    """Another snapshot with edited images, and with the seal of this data directory."""
    store = place.data_dir.store
    content, manifests = ContentStore(store), ManifestStore(store)
    manifest = manifests.read(snapshot_id)
    assert manifest.processes is not None
    name = new_snapshot_id()
    images, changed = [], False
    with content.writer(name) as writer:
        for image in manifest.processes.images:
            data = b"".join(content.read(bytes.fromhex(block)) for block in image.blocks)
            edited = edit(image.name, data)
            changed |= edited != data
            if edited is not None:
                images.append(StoredImage(name=image.name, blocks=(writer.put(edited).hex(),)))
    assert changed, "nothing was edited"
    processes = manifest.processes.model_copy(update={"images": tuple(images)})
    snapshot = manifest.snapshot.model_copy(update={"snapshot_id": name})
    forged: Manifest = manifest.model_copy(update={"snapshot": snapshot, "processes": processes})
    manifests.write(sealed(forged, place.data_dir.root))
    content.close()
    return name


def test_a_tree_that_comes_back_with_other_rights_does_not_go_on(make: Make) -> None:
    place = make()
    place.start(COUNTER)
    snapshot = place.taken()
    staged = place.driver.stage(place.container.target(), snapshot.snapshot_id, OPTIONS)
    for facts in staged._facts.values():  # type: ignore[attr-defined]
        facts["CapEff"] = ["0000000000000000"]
    with pytest.raises(RestoreError, match="CapEff"):
        staged.apply()
    staged.discard()
    assert place.container.exec("pgrep python3").exit_code == 1
