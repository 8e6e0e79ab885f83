"""task.yaml: every mistake is named with file, line and field; what reaches the host is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import OrchestratorError, Refused, TaskError
from orchestrator.spec_values import parse_size
from orchestrator.task import BuildSpec, LoadedTask, TaskSpec, load_recorded, load_task, recorded_text, redact

HEAD = "name: t\nimage: base\ninstruction: go\nmodel: {name: scripted/a.yaml}\n"


class Loader:
    """Writes a task file and loads it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "task.yaml"

    def __call__(self, text: str | bytes, *, trust: bool = False, environ: dict[str, str] | None = None) -> LoadedTask:
        self.path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_task(self.path, environ=environ or {}, trust=trust, protected=[self.path.parent / "data"])

    def error(self, text: str | bytes, *, kind: type[OrchestratorError] = TaskError, trust: bool = False) -> str:
        with pytest.raises(kind) as caught:
            self(text, trust=trust)
        assert str(self.path) in str(caught.value)
        return str(caught.value).replace(str(self.path), "task.yaml")


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    return Loader(tmp_path)


def test_a_small_task_has_the_stated_defaults(load: Loader) -> None:
    loaded = load(HEAD)
    spec = loaded.spec
    assert (spec.workdir, spec.user, spec.network, spec.strategy, spec.keep) == ("/", "root", "none", "rewind", False)
    assert (spec.limits.steps, spec.limits.stuck_submissions, spec.limits.tool_output_bytes) == (200, 5, 16_000)
    assert (spec.resources.memory, spec.resources.pids) == (2 * 2**30, 1024)
    assert (spec.snapshots.driver, spec.snapshots.on_failure) == ("overlay", "stop")
    assert spec.model is not None
    assert (spec.model.timeout_s, spec.model.retries, spec.model.temperature) == (600, 4, 0)
    assert loaded.source_dir == load.path.parent


def test_every_part_can_be_written(load: Loader) -> None:
    (load.path.parent / "src").mkdir()
    spec = load(
        HEAD
        + """
workdir: /work
user: 1000
env:
  PLAIN: text
  NUMBER: "8080"
  TOKEN: {from_env: HOST_TOKEN, secret: true}
  WORD: {value: hunter22, secret: true}
  LANG: {from_env: HOST_LANG}
setup: [apt-get update, "true"]
agent: {kind: function-calling, system: be brief}
snapshots:
  driver: memory
  options: {a: 1}
  include_binds: [/src]
  excluded: [/var/cache]
  volatile: [/tmp/x]
  on_failure: degrade
checklist:
- {name: server_up, probe: "true", feedback: start it, timeout_s: 5}
- {name: tests, scratch: make test, feedback: fix them, network: bridge}
limits: {steps: 3, wall_time_s: 60, cost_usd: 1.5, stuck_submissions: 2, tool_timeout_s: 9.5, tool_output_bytes: 1000}
network: bridge
resources: {memory: 512m, cpus: 1.5, pids: 64}
volumes: [{path: /data}, {path: /db, name: db, restore: true}]
binds: [{source: src, path: /src, read_only: false}]
tmpfs: [{path: /run/x, size: 1m, mode: "0700"}, {path: /dev/shm, size: 128m}]
daemons: [{name: web, start: python3 -m http.server, ready: "true"}]
strategy: continue
keep: true
capabilities: {add: [cap_net_raw], drop: [ALL]}
security_options: ["no-new-privileges:false"]
""",
        environ={"HOST_TOKEN": "s3cr3t-token", "HOST_LANG": "C"},
    )
    task = spec.spec
    assert spec.secrets == {"TOKEN": "s3cr3t-token", "WORD": "hunter22"}
    assert task.env_for_exec(spec.secrets) == {
        "PLAIN": "text", "NUMBER": "8080", "TOKEN": "s3cr3t-token", "WORD": "hunter22", "LANG": "C",
    }  # fmt: skip
    assert task.user == "1000"
    assert task.binds[0].source == str(load.path.parent / "src")
    assert task.tmpfs[0].size == 2**20
    assert task.capabilities.add == ("NET_RAW",)


def test_secrets_are_in_no_recorded_text_and_come_back_from_the_environment(load: Loader) -> None:
    text = HEAD + "env:\n  A: {value: hunter22, secret: true}\n  B: {from_env: X, secret: true}\n  C: open\n"
    loaded = load(text, environ={"X": "s3cr3t-token"})
    recorded = recorded_text(loaded.spec)
    for value in ("hunter22", "s3cr3t-token"):
        assert value not in recorded
        assert value not in repr(loaded)
        assert value not in str(loaded.spec.redacted())
    assert "<secret>" in recorded
    path = load.path.parent / "recorded.yaml"
    path.write_text(recorded)
    again = load_recorded(path, source_dir=loaded.source_dir, environ={"X": "s3cr3t-token"})
    assert again.secrets == {"B": "s3cr3t-token"}
    assert again.missing_secrets == ("A",)
    assert again.spec.redacted() == loaded.spec.redacted()


def test_a_build_can_be_given_and_is_recorded(load: Loader) -> None:
    spec = load(HEAD.replace("image: base", "image: {build: {context: img, args: {A: b}}}")).spec
    assert spec.image == BuildSpec(context="img", args={"A": "b"})
    assert TaskSpec.model_validate(spec.redacted()) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapshots:\n  drivr: x\n", "task.yaml:6: snapshots.drivr: unknown key (did you mean driver?)"),
        ("checklist:\n- name: a\n  prob: x\n  probe: x\n  feedback: f\n",
         "task.yaml:7: checklist.0.prob: unknown key (did you mean probe?)"),
        ("env:\n  A: {vlue: x}\n", "task.yaml:6: env.A.vlue: unknown key (did you mean value?)"),
        ("zzz: 1\n", "task.yaml:5: zzz: unknown key"),
        ("env:\n  PORT: 8080\n", "task.yaml:6: env.PORT: must be text, not the number: put it in quotes"),
        ("env:\n  TLS: yes\n", "task.yaml:6: env.TLS: must be text, not the truth value: put it in quotes"),
        ("env: {1A: x}\n", "task.yaml:5: env.1A: '1A' must match"),
        ("limits:\n  steps: '3'\n", "task.yaml:6: limits.steps: must be a whole number"),
        ("limits: {steps: true}\n", "task.yaml:5: limits.steps: must be a whole number"),
        ("limits: {wall_time_s: 0}\n", "task.yaml:5: limits.wall_time_s: must be greater than 0"),
        ("limits: {cost_usd: .inf}\n", "task.yaml:5: limits.cost_usd: "),
        ("resources: {memory: 1x}\n", "task.yaml:5: resources.memory: '1x' is not a size"),
        ("resources: {memory: 1k}\n", "task.yaml:5: resources.memory: must be greater than"),
        ("network: host\n", "task.yaml:5: network: 'host' is not one of 'none' or 'bridge'"),
        ("setup: true\n", "task.yaml:5: setup: must be a list"),
        ("setup: ['']\n", "task.yaml:5: setup.0: "),
        ("agent: auto\n", "task.yaml:5: agent: must be a mapping"),
        ("user: 'a b'\n", "task.yaml:5: user: 'a b' must match"),
        ("workdir: x\n", "task.yaml:5: workdir: 'x' is not absolute"),
        ("workdir: /proc/self/fd/7\n", "task.yaml:5: workdir: /proc/self/fd/7 is the kernel's"),
        ("workdir: /a/../b\n", "task.yaml:5: workdir: '/a/../b' has '..' in it"),
        ("workdir: //a\n", "task.yaml:5: workdir: '//a' is not normalised: write '/a'"),
        ("checklist:\n- {name: a, feedback: f}\n", "task.yaml:6: checklist.0: give probe or scratch"),
        ("checklist:\n- {name: a, feedback: f, probe: x, scratch: y}\n", "task.yaml:6: checklist.0: give probe or"),
        ("checklist:\n- {name: a, probe: x}\n", "task.yaml:6: checklist.0.feedback: missing"),
        ("checklist:\n- {name: a, probe: x, feedback: f}\n- {name: a, probe: x, feedback: f}\n",
         "task.yaml:7: checklist.1.name: a stands twice"),
        ("volumes: [{path: /}]\n", "task.yaml:5: volumes.0.path: '/' would leave nothing"),
        ("volumes: [{path: /proc/x}]\n", "task.yaml:5: volumes.0.path: nothing can be mounted at or below /proc"),
        ("volumes: [{path: /dev/shm}]\n", "task.yaml:5: volumes.0.path: nothing can be mounted at or below /dev"),
        ("volumes: [{path: /.orchestrator/x}]\n", "below /.orchestrator"),
        ("volumes: [{path: /etc}]\n", "task.yaml:5: volumes.0.path: the engine mounts /etc/hosts itself"),
        ("tmpfs: [{path: /etc/hosts}]\n", "task.yaml:5: tmpfs.0.path: the engine mounts /etc/hosts itself"),
        ("volumes: [{path: /a}]\ntmpfs: [{path: /a/b}]\n", "task.yaml:6: tmpfs.0.path: /a/b overlaps the mount at /a"),
        ("volumes: [{path: /a, name: orchestrator-x-1}]\n", "task.yaml:5: volumes.0.name: such names belong to"),
        ("tmpfs: [{path: /a, mode: '9'}]\n", "task.yaml:5: tmpfs.0.mode: '9' must match"),
        ("binds: [{source: nope, path: /a}]\n", "does not exist on this host"),
        ("snapshots: {include_binds: [/a]}\n", "snapshots.include_binds.0: /a is no destination of a writable bind"),
        ("binds: [{source: task.yaml, path: /a, read_only: false}]\nsnapshots: {include_binds: [/a]}\n",
         "snapshots.include_binds.0: /a is a file: bind its directory"),
        ("snapshots: {excluded: [/a/b, /c], volatile: [/d, /a, /c/d]}\n",
         "snapshots.volatile.1: /a would be deleted on a restore, but /a/b is excluded"),
        ("capabilities: {add: [FLY]}\n", "task.yaml:5: capabilities.add.0: 'FLY' is not a capability"),
        ("capabilities: {add: [WAKE_ALARM]}\n", "is not a capability that a task may name"),
        ("security_options: [label=disable]\n", "task.yaml:5: security_options.0: 'label=disable' is not an option"),
        ("privileged: true\n", "task.yaml:5: privileged: unknown key"),
        ("model: {name: m}\n", "task.yaml:5: model: duplicate key (the first stands in line 4)"),
        ("env: {A: {from_env: NOT_SET}}\n", "task.yaml:5: env.A.from_env: NOT_SET is not set"),
        ("env: {A: {from_env: B, value: c}}\n", "task.yaml:5: env.A: give value or from_env, not both"),
        ("daemons: [{name: 'a b', start: x}]\n", "task.yaml:5: daemons.0.name: 'a b' must match"),
        ("keep: 'no'\n", "task.yaml:5: keep: must be true or false"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_line_and_field(load: Loader, text: str, message: str) -> None:
    assert message in load.error(HEAD + text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "task.yaml:1: empty"),
        ("- a\n", "task.yaml:1: a task is a mapping (key: value), not a list"),
        ("name: t\nimage: [\n", "task.yaml:3: not valid YAML"),
        ("name: t\n\timage: x\n", "task.yaml:2: not valid YAML"),
        (b"name: t\nimage: \xff\n", "task.yaml:2: not UTF-8 (byte 0xff)"),
        ("name: t\nimage: a\x01b\n", "task.yaml:2: not valid YAML: character U+0001"),
        ('name: t\nimage: "a\\0b"\n', "task.yaml:2: character U+0000 cannot be passed"),
        ('name: t\nimage: "a\\ud800b"\n', "task.yaml:2: character U+D800 cannot be passed"),
        ("name: t\n? [a]\n: b\n", "task.yaml:2: a key must be text"),
        ("name: t\n1: b\n", "task.yaml:2: a key must be text"),
        ("name: &a [*a]\n", "task.yaml:1: an alias (*) that contains itself"),
        ("name: !!python/object/apply:os.system [x]\nimage: !!python/name:os.system x\n", "task.yaml:"),
        ("name: t\nimage: !x y\n", "task.yaml:2: not valid YAML: could not determine a constructor"),
        ("x: " + "[" * 60 + "]" * 60 + "\n", "task.yaml:1: nested deeper than 50 levels"),
        ("x: " + "[" * 5000 + "]" * 5000 + "\n", "task.yaml:1: nested too deeply"),
        ("name: t\nimage: 2026-99-99\n", "task.yaml:2: '2026-99-99' cannot be read as a value"),
        ("x: " + "a" * 2**20, "task.yaml: larger than 1 MiB"),
        ("name: t\n", "task.yaml:1: image: missing"),
        ("name: t\nimage: x\n", "task.yaml:1: instruction: missing"),
        ("name: T\nimage: x\n", "task.yaml:1: name: 'T' must match"),
        ("name: t\nimage: {context: .}\n", "task.yaml:2: image: give an image reference, or {build: {context: …}}"),
        ("name: t\nimage: {build: {contxt: x}}\n", "task.yaml:2: image.build.contxt: unknown key (did you mean con"),
        ("name: t\nimage: {build: {context: ../x}}\n", "task.yaml:2: image.build.context: '../x' leaves the task's"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_task_is_refused_with_its_line(load: Loader, text: str | bytes, message: str) -> None:
    assert message in load.error(text)


def test_an_alias_bomb_ends_at_once(load: Loader) -> None:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert "more than 50000 values" in load.error("a0: &a0 x\n" + "\n".join(levels) + "\n")


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file(load: Loader) -> None:
    message = load.error("foo: 1\nname: T\nimage: 3\nlimits: {steps: x}\n")
    assert [line.split(": ")[0] for line in message.splitlines()] == [f"task.yaml:{n}" for n in (1, 2, 3, 4)]


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no such file"):
        load_task(tmp_path / "none.yaml", environ={})
    with pytest.raises(TaskError, match="is a directory"):
        load_task(tmp_path, environ={})


def test_a_manual_agent_needs_neither_instruction_nor_model(load: Loader) -> None:
    assert load("name: t\nimage: x\nagent: {kind: manual}\n").spec.instruction is None


def test_the_models_name_can_be_given_from_outside(load: Loader) -> None:
    load.path.write_text("name: t\nimage: x\ninstruction: go\n")
    spec = load_task(load.path, environ={}, model="scripted/b.yaml").spec
    assert spec.model is not None
    assert spec.model.name == "scripted/b.yaml"


@pytest.mark.parametrize(
    "capability",
    ["SYS_PTRACE", "SYS_ADMIN", "SYS_MODULE", "DAC_READ_SEARCH", "SYS_RAWIO", "BPF", "MKNOD", "cap_sys_admin"],
)
def test_capabilities_that_reach_the_host_need_trust(load: Loader, capability: str) -> None:
    text = HEAD + f"capabilities:\n  add: [{capability}]\n"
    message = load.error(text, kind=Refused)
    assert "task.yaml:6: capabilities.add.0: " in message
    assert "--trust-task" in message
    assert load(text, trust=True).spec.capabilities.add


@pytest.mark.parametrize("option", ["seccomp=unconfined", "apparmor=unconfined"])
def test_filters_are_switched_off_only_for_a_trusted_task(load: Loader, option: str) -> None:
    text = HEAD + f"security_options: [{option}]\n"
    assert option in load.error(text, kind=Refused)
    load(text, trust=True)


@pytest.mark.parametrize("source", ["/", "/proc", "/sys/fs/cgroup", "/dev", "/run", "/var", "/etc/ssl", "/var/lib"])
def test_binds_that_show_the_host_are_refused(load: Loader, source: str) -> None:
    text = HEAD + f"binds: [{{source: {source}, path: /x}}]\n"
    assert "task.yaml:5: binds.0.source: binding " in load.error(text, kind=Refused)


def test_the_engines_socket_is_refused_by_any_way_to_it(load: Loader) -> None:
    directory = load.path.parent
    (directory / "docker.sock").touch()
    (directory / "innocent").symlink_to(directory / "docker.sock")
    message = load.error(HEAD + "binds: [{source: innocent, path: /x}]\n", kind=Refused)
    assert "gives the agent the engine" in message


def test_the_data_directory_cannot_be_bound(load: Loader) -> None:
    (load.path.parent / "data" / "runs").mkdir(parents=True)
    for source in (".", "data", "data/runs"):
        assert "binds.0.source" in load.error(HEAD + f"binds: [{{source: {source}, path: /x}}]\n", kind=Refused)


@pytest.mark.parametrize("key", ["api_key", "extra_headers", "Authorization"])
def test_keys_are_not_written_into_a_task(load: Loader, key: str) -> None:
    text = HEAD.replace("{name: scripted/a.yaml}", f"{{name: m, extra: {{{key}: x, max_tokens: 5}}}}")
    assert f"model.extra.{key}: parameters are logged" in load.error(text)


@pytest.mark.parametrize("key", ["api_base", "stream", "fallbacks", "max_retries", "messages"])
def test_model_parameters_that_are_the_product_s_own_are_refused(load: Loader, key: str) -> None:
    text = HEAD.replace("{name: scripted/a.yaml}", f"{{name: m, extra: {{{key}: x}}}}")
    assert f"model.extra.{key}: " in load.error(text)


def test_a_driver_option_that_names_programs_of_this_host_needs_trust(load: Loader) -> None:
    text = HEAD + "snapshots: {driver: criu, options: {prefix: /tmp/mine}}\n"
    with pytest.raises(Refused, match="programs that run as root"):
        load(text)
    assert load(text, trust=True).spec.snapshots.options == {"prefix": "/tmp/mine"}


def model_at(address: str) -> str:
    return HEAD.replace("{name: scripted/a.yaml}", f'{{name: openai/m, api_base: "{address}"}}')


@pytest.mark.parametrize("address", ["http://127.0.0.1:8000/v1", "http://localhost/v1/", "http://[::1]:1/v1"])
def test_a_model_on_this_host_needs_no_trust(load: Loader, address: str) -> None:
    spec = load(model_at(address)).spec
    assert spec.model is not None and spec.model.api_base == address.rstrip("/")


@pytest.mark.parametrize("address", ["https://example.org/v1", "http://127.0.0.1.example.org/v1", "http://10.0.0.1/v1"])
def test_a_task_may_send_the_operator_s_key_elsewhere_only_when_trusted(load: Loader, address: str) -> None:
    with pytest.raises(Refused, match="the key in your environment"):
        load(model_at(address))
    assert load(model_at(address), trust=True).spec.model is not None


@pytest.mark.parametrize("address", ["example.org", "ftp://x/v1", "http://user:pw@x/v1", "http://x/v1?key=1"])
def test_an_address_that_is_none_or_holds_a_key_is_refused(load: Loader, address: str) -> None:
    assert "model.api_base: " in load.error(model_at(address))


def test_sizes() -> None:
    assert [parse_size(text) for text in ("512m", "2G", "10kb", "7", 9)] == [512 * 2**20, 2 * 2**30, 10240, 7, 9]
    for bad in ("", "m", "-1", "1.5g", "0", 0, True, None, "1 m", "٣"):
        with pytest.raises(ValueError, match="not a size"):
            parse_size(bad)


def test_redaction_takes_the_longest_first_and_leaves_short_values() -> None:
    secrets = {"A": "pass", "B": "password", "C": "abc"}
    assert redact("password pass abc", secrets) == "<secret> <secret> abc"


@given(st.text(), st.lists(st.text(alphabet="abcé\n", min_size=4, max_size=8), max_size=3))
def test_no_secret_survives_redaction(text: str, values: list[str]) -> None:
    secrets = {f"S{index}": value for index, value in enumerate(values)}
    shown = redact(text + "".join(values) + text, secrets)
    assert not any(value in shown.replace("<secret>", "\x00") for value in values)


@given(st.text(max_size=200))
def test_no_text_makes_the_loader_raise_anything_but_its_own_errors(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes((HEAD + text).encode("utf-8", "surrogatepass"))
    try:
        load_task(path, environ={})
    except OrchestratorError as error:
        assert str(path) in str(error)
