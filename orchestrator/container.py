"""A run's container: made, made again, driven, and removed with everything that belongs to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from orchestrator import workload
from orchestrator.container_config import ContainerConfig, config_of
from orchestrator.data_dir import DataDir
from orchestrator.engine import Engine
from orchestrator.engine_connection import Unreachable
from orchestrator.launcher import Cut, ExecResult, Launcher, never, refusal, why_not_startable
from orchestrator.mounts import etc_files, layers_hint, mounts
from orchestrator.processes import Processes
from orchestrator.task import BuildSpec, TaskSpec
from snapshot_drivers.base import Target
from snapshot_drivers.crash_points import reached
from snapshot_drivers.errors import ContainerNotRunning, EngineError
from snapshot_drivers.mountinfo import own_mounts
from snapshot_drivers.namespaces import ContainerProcess

DEFAULT_TIMEOUT_S: Final = 300.0
DEFAULT_OUTPUT_BYTES: Final = 16_000

_UNMOUNT_S: Final = 15.0
_END_S: Final = 5


class Container:
    """The workload and its network holder. Implements ``snapshot_drivers.base.Lifecycle``."""

    def __init__(self, engine: Engine, config: ContainerConfig, container_id: str, *, etc_is_new: bool) -> None:
        self.engine = engine
        self.config = config
        self.container_id = container_id
        self.exec_lock = threading.RLock()
        """Held while a command is being started; hold it while the container is frozen."""
        self._etc_is_new = etc_is_new
        self._kills = 0
        self._launcher = Launcher(engine, container_id, self.processes)

    @property
    def name(self) -> str:
        """Its name on the engine."""
        return self.config.name

    @classmethod
    def create(
        cls, engine: Engine, data_dir: DataDir, run_id: str, spec: TaskSpec, *, source_dir: Path = Path()
    ) -> Container:
        """A new run's container runs: nothing but PID 1 is in it yet. Relative paths start at ``source_dir``.

        Raises: HostError: image, helpers or a name cannot be had. EngineError.
        """
        if isinstance(spec.image, BuildSpec):
            context = source_dir / spec.image.context
            image = engine.build(context, spec.image.dockerfile, spec.image.args, f"orchestrator-task:{spec.name}")
        else:
            image = engine.image(spec.image, pull=True)
        config = config_of(
            spec,
            image,
            run_id=run_id,
            data_dir=data_dir.root,
            helpers=data_dir.bin,
            cgroup_driver=engine.facts().cgroup_driver,
        )
        workload.remove_volumes(engine, config)  # of an earlier launch that was cut short
        try:
            return cls.recreate(engine, config)
        except BaseException:
            with suppress(EngineError):
                workload.remove_volumes(engine, config)
                engine.release_image(run_id)
            raise

    @classmethod
    def recreate(cls, engine: Engine, config: ContainerConfig) -> Container:
        """A container of that configuration runs on pristine layers; what was left of an older one is gone.

        Volumes that the run owns keep their content where they still exist.

        Raises: HostError: image, helpers, a volume or a name cannot be had. EngineError.
        """
        return cls(engine, config, workload.make(engine, config), etc_is_new=True)

    @classmethod
    def attach(cls, engine: Engine, config: ContainerConfig) -> Container:
        """The existing container of that configuration, running or not.

        Raises: ContainerNotRunning: it is gone; ``recreate`` makes it again. EngineError.
        """
        found = workload.find(engine, config)
        if found is None:
            raise ContainerNotRunning(f"container {config.name} is gone: orchestrator restore makes it again")
        return cls(engine, config, found["Id"], etc_is_new=False)

    def is_whole(self) -> bool:
        """It and its network holder are there and have run, so it can run again. Raises: EngineError.

        One that was never started has no files under /etc of the engine's, and no network to come back to.
        """
        both = [self.engine.find(self.container_id), self.engine.find(self.config.holder_name)]
        return all(found is not None and found["State"]["Status"] != "created" for found in both)

    def kill(self) -> None:
        """See ``Lifecycle``: nothing of it runs, and the host has its root filesystem unmounted."""
        found = self.engine.inspect(self.container_id)
        self._kills += 1
        if not (self._ended_by_signal(found["State"]) and self._has_ended()):
            self.engine.kill(self.container_id)
        merged = (found.get("GraphDriver", {}).get("Data") or {}).get("MergedDir")
        deadline = time.monotonic() + _UNMOUNT_S
        while self._is_mounted(merged):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self.name} was killed, but its root filesystem is still mounted after {_UNMOUNT_S:.0f} s: "
                    "look for what holds it (grep overlay /proc/*/mountinfo) and end that"
                )
            time.sleep(0.002)

    def start(self) -> int:
        """See ``Lifecycle``: it runs beside a running network holder."""
        holder = self.engine.find(self.config.holder_name)
        if holder is None:
            raise ContainerNotRunning(f"{self.config.holder_name} is gone: orchestrator restore makes both again")
        if not holder["State"]["Running"]:
            self.engine.kill(self.container_id)  # it would stay in the network namespace that has ended
            self.engine.start(holder["Id"])
            self._etc_is_new = True
        self.engine.start(self.container_id)
        return self._init_pid()

    def replace(self, image_id: str) -> Target:
        """See ``Lifecycle``."""
        self._kills += 1
        self.container_id = workload.replace(self.engine, self.config, self.container_id, image_id)
        self._launcher = Launcher(self.engine, self.container_id, self.processes)
        self.start()
        return self.target()

    def paused(self) -> bool:
        """Its user paused it. Raises: EngineError."""
        return bool(self.engine.inspect(self.container_id)["State"]["Paused"])

    def running(self) -> bool:
        """It runs, perhaps paused. Raises: EngineError."""
        found = self.engine.find(self.container_id)
        return found is not None and bool(found["State"]["Running"])

    def target(self) -> Target:
        """The container as a snapshot driver sees it, from the engine's side only.

        Raises: EngineError.
        """
        found = self.engine.inspect(self.container_id)
        facts = self.engine.facts()
        upper, lower = layers_hint(self.engine, found)
        return Target(
            run_id=self.config.run_id,
            container_id=self.container_id,
            init_pid=found["State"]["Pid"] or None,
            engine_root=Path(facts.data_root),
            storage_driver=found.get("Driver") or facts.storage_driver,
            upper_hint=upper,
            lower_hint=lower,
            freeze_group=self.config.cgroup_parent,
            image_id=self.config.image.image_id,
            layer_ids=self.config.image.layer_ids,
            architecture=self.config.image.architecture,
            mounts=mounts(self.engine, self.config, found),
            etc_files=etc_files(found),
            etc_is_new=self._etc_is_new,
            lifecycle=self,
            workdir=self.config.workdir,
        )

    def exec(
        self,
        command: str | Sequence[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        output_limit_bytes: int = DEFAULT_OUTPUT_BYTES,
        cut: Cut = never,
    ) -> ExecResult:
        """The result of a command (a text: for ``/bin/sh -c``) once its first process has ended.

        stdin is /dev/null. What it leaves running goes on, and its further output is discarded. After ``timeout_s``, or
        when ``cut`` gives a reason, all of its session is killed. ``user`` and ``cwd``: the task's unless given;
        ``env``: on top of the container's.

        Raises: ContainerNotRunning: stopped, paused or gone. EngineError: never a command's own failure.
        """
        argv = _argv(command)
        env, cwd = env or {}, cwd or self.config.workdir
        if reason := why_not_startable(argv, env, cwd):
            return refusal(reason)
        with self.exec_lock:
            call = self._launcher.start(
                argv, user=_user(user or self.config.user), env=env, cwd=cwd, limit_bytes=output_limit_bytes
            )
            kills = self._kills
        reached("in-tool-call")
        return call.finish(timeout_s, lambda session: self._kill_session(session, kills), cut)

    def background(
        self,
        command: str | Sequence[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> int | None:
        """A command is left running below the launcher, its output discarded; its session id inside the container.

        ``None``: it was not started or is not known, which its readiness check will show.

        Raises: ContainerNotRunning. EngineError.
        """
        argv = _argv(command)
        env, cwd = env or {}, cwd or self.config.workdir
        if why_not_startable(argv, env, cwd):
            return None
        with self.exec_lock:
            call = self._launcher.start(
                argv, user=_user(user or self.config.user), env=env, cwd=cwd, limit_bytes=0, detach=True
            )
        call.close()
        return call.session

    def serve(self) -> None:
        """The launcher listens, so that the next command starts without delay. Repeatable.

        Raises: ContainerNotRunning. EngineError.
        """
        with self.exec_lock:
            self._launcher.serve()

    def processes(self) -> Processes:
        """Its processes now.

        Raises: ContainerNotRunning. EngineError.
        """
        launcher = Path(self.config.helpers) / "launch"
        try:
            return Processes(self.config.cgroup_parent, self.container_id, self._init_pid(), launcher)
        except ContainerNotRunning as error:
            raise ContainerNotRunning(f"container {self.name} is not running any more ({error})") from error

    def other_processes(self, session: int | None = None) -> int:
        """How many processes run besides PID 1, the launcher, and the command of that session.

        Raises: ContainerNotRunning. EngineError.
        """
        return self.processes().others(session)

    def commands(self) -> list[str]:
        """Command lines of the processes that run besides PID 1 and the launcher (foreign text).

        Raises: ContainerNotRunning. EngineError.
        """
        return self.processes().commands()

    def remove(self) -> None:
        """Containers, volumes that the run owns, and its cgroups are gone; its image and checkpoints stay. Repeatable.

        Raises: EngineError.
        """
        workload.remove_containers(self.engine, self.config)
        workload.remove_volumes(self.engine, self.config)

    def _kill_session(self, session: int, kills: int) -> None:
        """Raises: ContainerNotRunning: it was killed meanwhile; in its next life that number is somebody else's."""
        with self.exec_lock:
            if kills != self._kills:
                raise ContainerNotRunning(f"{self.name} was taken back to a breakpoint, and the command ended with it")
            self.processes().kill_session(session)

    def _ended_by_signal(self, state: dict[str, Any]) -> bool:
        """PID 1 was sent SIGKILL from here, where it is a process of this host: an engine starts a program to do so."""
        if not state["Pid"] or state["Paused"]:
            return False
        try:
            with ExitStack() as stack:
                ContainerProcess(state["Pid"], self.container_id, stack).kill()
        except (ContainerNotRunning, OSError):
            return False
        return True

    def _has_ended(self) -> bool:
        """The engine says so before long. A process that somebody froze gets no signal before the engine thaws it."""
        try:
            self.engine.wait_for_end(self.container_id, timeout_s=_END_S)
        except Unreachable:
            return False
        return True

    def _init_pid(self) -> int:
        pid = int(self.engine.inspect(self.container_id)["State"]["Pid"])
        if pid == 0:
            raise ContainerNotRunning(f"container {self.name} is not running: orchestrator restore starts it")
        return pid

    def _is_mounted(self, merged: str | None) -> bool:
        return any(
            line.fs_type == "overlay" and (line.mount_point == merged or self.container_id in line.mount_point)
            for line in own_mounts()
        )


def _argv(command: str | Sequence[str]) -> list[str]:
    return ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)


def _user(user: str) -> str:
    """By number, root can be had even when the container has lost its /etc/passwd."""
    return "0" if user == "root" else user
