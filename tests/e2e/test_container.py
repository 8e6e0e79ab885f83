"""The life of a run's container: made, killed, started, made again, removed; what the agent's root cannot reach."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.container import Container
from orchestrator.container_config import LABEL_DATA_DIR, LABEL_ROLE, LABEL_RUN
from orchestrator.data_dir import DataDir
from orchestrator.engine import HELD_IMAGES, Engine
from orchestrator.errors import HostError
from orchestrator.task import TaskSpec
from snapshot_drivers.base import Mount, Sharer, StateKind
from snapshot_drivers.cgroups import container_directory, hierarchies
from snapshot_drivers.errors import ContainerNotRunning, EngineError
from snapshot_drivers.freezer import freezer_hierarchy
from snapshot_drivers.mountinfo import own_mounts
from snapshot_drivers.overlay.layers import find_layers

pytestmark = pytest.mark.engine

MakeContainer = Callable[..., Container]


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True).stdout


def leftovers(run_id: str) -> list[str]:
    """Everything on this host that names the run, but its image tag."""
    found = docker("ps", "-a", "--filter", f"name={run_id}", "--format", "{{.Names}}").split()
    found += docker("volume", "ls", "--filter", f"name={run_id}", "--format", "{{.Name}}").split()
    found += docker("network", "ls", "--filter", f"name={run_id}", "--format", "{{.Name}}").split()
    found += [str(tree.directory(f"/orchestrator/{run_id}")) for tree in hierarchies()]
    return [name for name in found if not name.startswith("/") or Path(name).exists()]


@pytest.fixture(params=["none", "bridge"])
def network(request: pytest.FixtureRequest) -> str:
    """Each kind of network that this engine has."""
    if request.param == "bridge":
        options = json.loads(docker("network", "inspect", "bridge"))[0]["Options"]
        name = options.get("com.docker.network.bridge.name", "docker0")
        if not Path("/sys/class/net", name).exists():
            pytest.skip(f"the engine's bridge {name} is not there")
    return str(request.param)


def holder(box: Container) -> dict[str, Any]:
    return box.engine.inspect(box.config.holder_name)


class TestCreation:
    @pytest.mark.usefixtures("limits")
    def test_both_containers_carry_labels_and_safe_settings(self, container: MakeContainer, data_dir: DataDir) -> None:
        box = container(resources={"memory": "128m", "pids": 100, "cpus": 0.5})
        for found, role in ((box.engine.inspect(box.container_id), "workload"), (holder(box), "network")):
            assert found["Config"]["Labels"] == {
                LABEL_RUN: box.config.run_id,
                LABEL_ROLE: role,
                LABEL_DATA_DIR: str(data_dir.root),
            }
            host = found["HostConfig"]
            assert not host["Privileged"] and host["RestartPolicy"]["Name"] == "no"
            assert "no-new-privileges" in host["SecurityOpt"]
            assert host["CapDrop"] == ["ALL"]
            assert host["CgroupParent"] == f"/orchestrator/{box.config.run_id}"
            assert (host["CgroupnsMode"], host["IpcMode"]) == ("private", "private")
            assert found["Config"]["Healthcheck"] == {"Test": ["NONE"]}
        assert holder(box)["HostConfig"]["CapAdd"] is None
        host = box.engine.inspect(box.container_id)["HostConfig"]
        assert "MKNOD" not in " ".join(host["CapAdd"])
        assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (2**27, 2**27, 100)
        assert host["NanoCpus"] == 500_000_000
        assert {one.role for one in box.engine.list_ours(run_id=box.config.run_id)} == {"workload", "network"}

    def test_nothing_but_the_init_runs_in_a_new_container(self, container: MakeContainer) -> None:
        assert container().processes().pids() == []

    def test_a_secret_given_to_a_command_is_in_no_answer_of_the_engine(self, container: MakeContainer) -> None:
        box = container(env={"TOKEN": {"value": "canary-9f2c", "secret": True}})
        result = box.exec("echo $TOKEN", env={"TOKEN": "canary-9f2c"})
        assert result.output == b"canary-9f2c\n"
        shown = docker("inspect", box.name, box.config.holder_name)
        shown += docker("history", "--no-trunc", box.config.image.image_id)
        assert "canary" not in shown
        assert "canary" not in box.config.model_dump_json()

    def test_the_images_volumes_become_volumes_of_the_run(
        self, container: MakeContainer, engine: Engine, base_image: str, tmp_path: Path
    ) -> None:
        tag = f"e2e-volumes:{os.getpid()}"
        (tmp_path / "Dockerfile").write_text(f"FROM {base_image}\nCOPY Dockerfile /data/file\nVOLUME /data /more\n")
        engine.build(tmp_path, "Dockerfile", {}, tag)
        try:
            box = container(image=tag, tmpfs=[{"path": "/more"}])
            ours = ("volume", "ls", "-q", "--filter", f"name={box.name}")
            assert docker(*ours).split() == [f"{box.name}-1"]
            assert box.exec("grep -c VOLUME /data/file; stat -f -c %T /more").output == b"1\ntmpfs\n"
            box.remove()
            assert docker(*ours) == ""
        finally:
            engine.release_image(box.config.run_id)
            docker("rmi", tag)

    def test_a_failing_build_shows_its_output(self, engine: Engine, base_image: str, tmp_path: Path) -> None:
        (tmp_path / "Dockerfile").write_text(f"FROM {base_image}\nCOPY no-such-file /\n")
        with pytest.raises(HostError, match=r"no-such-file[\s\S]*Step 1/2"):
            engine.build(tmp_path, "Dockerfile", {}, "e2e-never:1")

    def test_a_run_id_of_another_data_directory_is_not_taken_over(
        self, container: MakeContainer, engine: Engine, new_task: Callable[..., TaskSpec], helpers: Path, tmp_path: Path
    ) -> None:
        box = container()
        other = DataDir(tmp_path / "other").open()
        for file in helpers.iterdir():
            (other.bin / file.name).write_bytes(file.read_bytes())
            (other.bin / file.name).chmod(0o755)
        other.bin.chmod(0o755)
        with pytest.raises(HostError, match="another run or data directory"):
            Container.create(engine, other, box.config.run_id, new_task())
        assert box.running()

    def test_a_creation_that_fails_leaves_nothing(self, container: MakeContainer) -> None:
        with pytest.raises(HostError, match="docker volume create no-such-volume"):
            container(run_id="e2e-fails", volumes=[{"path": "/a"}, {"path": "/b", "name": "no-such-volume"}])
        assert leftovers("e2e-fails") == []
        assert not docker("images", "-q", f"{HELD_IMAGES}:e2e-fails")

    def test_missing_helpers_and_images_are_named(
        self, container: MakeContainer, data_dir: DataDir, engine: Engine
    ) -> None:
        with pytest.raises(HostError, match="e2e-no-such-image"):
            engine.image("e2e-no-such-image")
        (data_dir.bin / "launch").unlink()
        with pytest.raises(HostError, match="deploy/helpers"):
            container()

    def test_no_engine_is_an_error_with_a_remedy(self, tmp_path: Path) -> None:
        with pytest.raises(HostError, match="systemctl start docker"):
            Engine.connect(f"unix://{tmp_path}/nothing.sock")

    def test_a_container_without_capabilities_works(self, container: MakeContainer) -> None:
        box = container(capabilities={"drop": ["ALL"]})
        assert b"CapEff:\t0000000000000000" in box.exec("grep Cap /proc/self/status; id -u").output
        assert box.exec("grep ^Uid /proc/1/status").output.split()[1] == b"65533"


class TestBorders:
    def test_the_containers_root_can_neither_trace_nor_read_pid_1(self, container: MakeContainer) -> None:
        box = container()
        status = box.exec("cat /proc/1/status").output.decode()
        assert "Uid:\t65533\t65533\t65533\t65533" in status and "CapPrm:\t0000000000000000" in status
        for attempt in (
            "cat /proc/1/environ",
            "head -c1 /proc/1/mem",
            "readlink /proc/1/fd/0",
            "readlink /proc/1/root",
        ):
            result = box.exec(attempt)
            assert result.exit_code != 0, (attempt, result)
        trace = "import ctypes; print(ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0), ctypes.get_errno())"
        traced = box.exec(["python3", "-c", trace])
        assert traced.output in (b"-1 1\n",) or b"No module named" in traced.output
        box.exec("kill -9 1; kill -STOP 1; kill -HUP 1")
        assert box.exec("echo alive").output == b"alive\n"

    def test_the_containers_root_cannot_end_pid_1(self, container: MakeContainer) -> None:
        box = container()
        box.exec("for signal in $(seq 64); do kill -$signal 1; done")
        assert box.exec("echo alive").output == b"alive\n"
        assert box.running()

    def test_a_container_that_ends_under_a_command_is_never_its_result(
        self, container: MakeContainer, engine: Engine
    ) -> None:
        box = container()
        box.exec("echo kept > /file")
        killer = threading.Timer(0.5, box.kill)
        killer.start()
        with pytest.raises(EngineError):
            box.exec("sleep 30")
        killer.join()
        box.start()
        assert box.exec("cat /file").output == b"kept\n"

    def test_the_helpers_cannot_be_changed(self, container: MakeContainer) -> None:
        box = container()
        for attempt in (
            "echo > /.orchestrator/launch",
            "touch /.orchestrator/new",
            "rm -rf /.orchestrator/launch",
            "mv /.orchestrator /x",
            "mount -o remount,rw /.orchestrator",
            "umount /.orchestrator",
            "echo > /proc/$(pgrep -o launch)/exe",
        ):
            assert box.exec(attempt).exit_code != 0, attempt
        assert box.exec("true").exit_code == 0

    def test_the_host_sees_no_device_and_no_other_namespace(self, container: MakeContainer) -> None:
        box = container()
        assert box.exec("mknod /n b 7 0").exit_code != 0
        assert box.exec("unshare -Ur true").exit_code != 0
        assert b"cgroup" not in box.exec("awk '$3 ~ /orchestrator/' /proc/self/cgroup").output
        assert box.exec("cat /sys/class/net/*/operstate | wc -l").output == b"1\n"


class TestLifecycle:
    def test_kill_and_start_keep_files_volumes_and_network(self, container: MakeContainer, network: str) -> None:
        box = container(network=network, volumes=[{"path": "/vol"}], tmpfs=[{"path": "/tm"}])
        box.exec("echo 1 > /file; echo 2 > /vol/file; echo 3 > /tm/file; echo '# note' >> /etc/hosts")
        etc = box.exec("cat /etc/hostname /etc/hosts /etc/resolv.conf").output
        netns = os.readlink(f"/proc/{box.target().init_pid}/ns/net")
        before = box.target()
        upper = find_layers(before).upper
        box.kill()
        assert not box.running() and box.target().init_pid is None
        assert not any(str(upper) in line.super_options for line in own_mounts())
        pid = box.start()
        assert os.readlink(f"/proc/{pid}/ns/net") == netns
        assert box.start() == pid == box.target().init_pid
        assert box.processes().pids() == []
        assert box.exec("cat /file /vol/file; cat /tm/file").output.startswith(b"1\n2\ncat: /tm/file")
        assert b"# note" in etc and box.exec("cat /etc/hostname /etc/hosts /etc/resolv.conf").output == etc
        box.kill()
        box.kill()

    def test_a_container_whose_processes_somebody_froze_is_killed(self, container: MakeContainer) -> None:
        box = container()
        hierarchy = freezer_hierarchy()
        group = container_directory(hierarchy, box.config.cgroup_parent, box.container_id)
        assert group is not None
        name, word = ("freezer.state", "FROZEN") if hierarchy.version == 1 else ("cgroup.freeze", "1")
        (group / name).write_text(word)
        began = time.monotonic()
        box.kill()
        assert time.monotonic() - began < 20
        assert not box.running()
        box.start()

    def test_a_dead_network_holder_is_started_first(self, container: MakeContainer) -> None:
        box = Container.attach((made := container()).engine, made.config)
        assert not box.target().etc_is_new
        docker("kill", box.config.holder_name)
        box.kill()
        pid = box.start()
        assert holder(box)["State"]["Running"] and box.target().etc_is_new
        assert os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{holder(box)['State']['Pid']}/ns/net")

    def test_it_is_made_again_from_its_recorded_configuration(self, container: MakeContainer) -> None:
        box = container(volumes=[{"path": "/vol"}], env={"A": "b"}, workdir="/w")
        box.exec("echo old > /file; echo kept > /vol/file")
        config = type(box.config).model_validate_json(box.config.model_dump_json())
        docker("rm", "-f", box.name)
        with pytest.raises(ContainerNotRunning, match="restore"):
            Container.attach(box.engine, config)
        again = Container.recreate(box.engine, config)
        assert again.container_id != box.container_id
        assert again.exec("pwd; echo $A; hostname; cat /vol/file; test -e /file").output.split() == [
            b"/w", b"b", box.config.hostname.encode(), b"kept",
        ]  # fmt: skip
        with pytest.raises(EngineError):
            box.exec("true")

    def test_a_scratch_copy_shares_nothing_that_it_could_change(self, container: MakeContainer, tmp_path: Path) -> None:
        source = tmp_path / "bound"
        source.mkdir()
        box = container(volumes=[{"path": "/vol"}], binds=[{"source": str(source), "path": "/b", "read_only": False}])
        box.exec("echo live > /vol/file")
        config = box.config.scratch("check")
        copy = Container.recreate(box.engine, config)
        try:
            assert copy.exec("echo copy > /vol/file").exit_code == 0
            assert copy.exec("touch /b/file").exit_code != 0
            assert box.exec("cat /vol/file").output == b"live\n"
            assert box.exec("touch /b/file").exit_code == 0
            roles = {one.role for one in box.engine.list_ours(run_id=box.config.run_id)}
            assert roles == {"workload", "network", "scratch"}
        finally:
            copy.remove()
        assert box.exec("cat /vol/file").output == b"live\n"

    def test_removal_leaves_nothing_but_the_image_and_can_be_repeated(
        self, container: MakeContainer, network: str
    ) -> None:
        box = container(run_id="e2e-removal", volumes=[{"path": "/vol"}], network=network)
        box.exec("sleep 1000 &")
        assert len(leftovers("e2e-removal")) > 3
        box.remove()
        assert leftovers("e2e-removal") == []
        assert docker("images", "-q", f"{HELD_IMAGES}:e2e-removal")
        box.remove()
        box.engine.release_image("e2e-removal")
        box.engine.release_image("e2e-removal")

    def test_what_is_not_the_runs_is_not_removed(self, container: MakeContainer) -> None:
        docker("volume", "create", "e2e-named")
        try:
            box = container(volumes=[{"path": "/n", "name": "e2e-named"}])
            box.remove()
            assert box.engine.volume("e2e-named") is not None
            docker("create", "--name", box.name, box.config.image.image_id, "true")
            box.remove()
            assert docker("ps", "-aq", "--filter", f"name={box.name}")
            docker("rm", box.name)
        finally:
            docker("volume", "rm", "e2e-named")


class TestTarget:
    def test_it_names_every_writable_mount_and_says_what_is_not_captured(
        self, container: MakeContainer, base_image: str, tmp_path: Path
    ) -> None:
        for name in ("in", "out", "read"):
            (tmp_path / name).mkdir()
        docker("volume", "create", "e2e-shared")
        docker("volume", "create", "e2e-restored")
        docker("create", "--name", "e2e-stranger", "-v", "e2e-shared:/x", base_image, "true")
        try:
            box = container(
                volumes=[
                    {"path": "/own"},
                    {"path": "/plain", "name": "e2e-restored"},
                    {"path": "/shared", "name": "e2e-shared", "restore": True},
                ],
                binds=[
                    {"source": str(tmp_path / "in"), "path": "/in", "read_only": False},
                    {"source": str(tmp_path / "out"), "path": "/out", "read_only": False},
                    {"source": str(tmp_path / "read"), "path": "/read"},
                ],
                tmpfs=[{"path": "/tm"}],
                snapshots={"include_binds": ["/in"]},
            )
            target = box.target()
        finally:
            docker("rm", "e2e-stranger")
        found: dict[str, Mount] = {mount.path: mount for mount in target.mounts}
        everything = ["/dev", "/dev/mqueue", "/dev/shm", "/in", "/out", "/own", "/plain", "/shared", "/tm"]
        assert list(found) == everything
        captured = ["/dev", "/dev/shm", "/in", "/own", "/shared", "/tm"]
        assert [path for path in everything if found[path].capture] == captured
        assert all(mount.reason for mount in target.mounts if not mount.capture)
        assert found["/shared"].shared_with == (Sharer("e2e-stranger", False),)
        assert found["/own"].shared_with == ()
        assert found["/in"].source == tmp_path / "in" and found["/in"].kind == StateKind.BIND
        assert found["/own"].source is not None and found["/own"].source.is_dir()
        assert found["/dev/shm"].kind == found["/tm"].kind == StateKind.TMPFS
        assert [path for path, _ in target.etc_files] == ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"]
        box.exec("echo note >> /etc/hosts")
        assert dict(target.etc_files)["/etc/hosts"].read_text().endswith("note\n")
        upper = find_layers(target).upper
        assert upper.is_relative_to(target.engine_root)
        box.exec("echo here > /file")
        assert (upper / "file").read_text() == "here\n"
        box.remove()
        docker("volume", "rm", "e2e-shared", "e2e-restored")


def test_a_command_costs_little_more_than_a_plain_exec(container: MakeContainer) -> None:
    box = container()
    box.serve()

    def median_ms(call: Callable[[], object]) -> float:
        times = []
        for _ in range(15):
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1000)
        return sorted(times)[len(times) // 2]

    ours = median_ms(lambda: box.exec("true"))
    plain = median_ms(lambda: docker("exec", box.name, "true"))
    print(json.dumps({"exec_ms": round(ours, 1), "docker_exec_ms": round(plain, 1)}))
    assert ours < 2 * plain + 50
