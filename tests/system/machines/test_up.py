"""`up`, `status` and `down` over a real sshd, with real copies; in place of Ray and the head's program, doubles that
keep to what these say and do."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from checkpoint.store import ExpertStore
from odmoe.machines import preflight, ray_cli
from odmoe.machines.certs import ensure_certs
from odmoe.machines.cluster_file import ClusterFile
from odmoe.machines.down import down
from odmoe.machines.home import cluster_dir, only_one
from odmoe.machines.ship import code_digest
from odmoe.machines.status import status
from odmoe.machines.table import HostTable
from odmoe.machines.up import up
from odmoe.settings.settings import Settings
from odmoe.terminal import Terminal
from scheduler.errors import ConfigError, CorruptStoreError, LaunchError

RAY = """#!{python}
# What `ray up` and `ray down` do, less Ray: unpack the code on every host, begin a process there, end the head's.
import os, shutil, subprocess, sys
print(*sys.argv[1:-1], os.environ["RAY_AUTH_MODE"])
if os.path.exists("{base}/ray-fails"):
    print("2026-11-21 16:00:00,000\\tERROR updater.py:1 -- NodeUpdater: 127.0.99.9: something refused")
    print("Traceback (most recent call last):")
    sys.exit(1)
for home in {homes}:
    keys = home + "/odmoe/keys/ray_token"
    if sys.argv[1] == "up":
        shutil.copy(sys.argv[-1], home + "/ray_bootstrap_config.yaml")
        subprocess.run("cd $H/odmoe && mkdir -p code && tar -xzf {archive} -C code && "
                       "cp {at_head} code/odmoe/cli/at_head.py", shell=True, check=True, env=dict(os.environ, H=home))
        subprocess.Popen(["sleep", "300"], env=dict(os.environ, RAY_AUTH_TOKEN_PATH=keys), start_new_session=True,
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""

AT_HEAD = """
import json, os, sys, time
request = json.loads(sys.stdin.readline())
with open(os.path.expanduser("~/requests"), "a") as file:
    file.write(json.dumps([request, os.environ["ODMOE_TLS"], os.environ["RAY_AUTH_TOKEN_PATH"]]) + chr(10))
with open(os.path.expanduser("~/script.json")) as file:
    script = json.load(file)
print("a line of a library", flush=True)
for wait_s, line in script.get(request["do"], []):
    time.sleep(wait_s)
    print(json.dumps(line), flush=True)
    code = 1 if line.get("error") else 0
else:
    code = 0
sys.exit(code)
"""


@dataclass
class World:
    """Four hosts, and what their head is to say."""

    hosts: Any
    cluster: ClusterFile
    base: Path
    store: str
    terminal: Terminal = field(init=False)

    def __post_init__(self) -> None:
        self.terminal = Terminal()
        self.terminal.console = Console(file=(self.base / "said").open("w"), width=200, highlight=False)

    @property
    def file(self) -> Path:
        return self.cluster.path

    @property
    def settings(self) -> Settings:
        return Settings(model=self.store, shadow="nf4", slots=2, secret="not to travel", cluster=str(self.file))

    def home(self, number: int) -> Path:
        return Path(self.hosts.home(self.hosts.addresses[number]))

    def line(self, *states: str, ready: bool = False, error: Any = None, **more: Any) -> dict[str, Any]:
        rows = [
            {"address": host.address, "role": host.role, "number": host.number, "ray": "alive", "state": state,
             "detail": "", "store": "verified" if state == "ready" else "", "slots": 2, "device": "cpu",
             "loader": "disk", "load_bytes_per_s": 2e9, "round_trip_s": 0.000312, "memory_bytes": 123_400_000,
             "heartbeat_s": 0.2} | more.get(host.name, {})
            for host, state in zip(self.cluster.hosts, states, strict=True)
        ]  # fmt: skip
        return {"hosts": rows, "ready": ready, "error": error}

    def head(self, **script: list[tuple[float, dict[str, Any]]]) -> None:
        (self.home(0) / "script.json").write_text(json.dumps(script))

    def requests(self) -> list[Any]:
        file = self.home(0) / "requests"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def said(self) -> str:
        self.terminal.console.file.flush()
        return (self.base / "said").read_text()


@pytest.fixture(scope="module")
def tiny_store(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from odmoe.stores import prepare_store

    return prepare_store(str(tiny), str(tmp_path_factory.mktemp("stores") / "tiny"), None).path


@pytest.fixture
def world(hosts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_store: Path) -> Iterator[World]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("odmoe.machines.ssh.PORT", hosts.port)
    cluster = hosts.cluster(tmp_path)
    made = World(hosts, cluster, tmp_path, str(tiny_store))
    homes = [str(hosts.home(address)) for address in hosts.addresses]
    for home in homes:
        (Path(home) / "odmoe").mkdir()
        os.symlink(sys.prefix, Path(home) / "odmoe" / "venv")
    at_head, archive = tmp_path / "at_head.py", cluster_dir(cluster.name) / "code.tar.gz"
    at_head.write_text(AT_HEAD)
    ray = tmp_path / "ray"
    text = RAY.format(python=sys.executable, base=tmp_path, homes=homes, archive=archive, at_head=at_head)
    archived = f"odmoe.machines.ship.code_archive(pathlib.Path({str(archive)!r}))"
    ray.write_text(text.replace("import os,", "import os, odmoe.machines.ship, pathlib,", 1).replace(
        "for home in", f"{archived}\nfor home in", 1))  # fmt: skip
    ray.chmod(0o755)
    monkeypatch.setattr(ray_cli, "RAY", ray)
    yield made
    from odmoe.machines.preflight import stop_processes
    from odmoe.machines.ssh import Ssh

    with Ssh.of(cluster, cluster_dir(cluster.name)) as ssh:
        ssh.each(cluster.hosts, lambda host: stop_processes(ssh, host))


def test_from_nothing_to_ready(world: World) -> None:
    waiting, ready = ["starting"] * 4, ["ready"] * 4
    world.head(start=[(0.1, world.line(*waiting)), (0.3, world.line("ready", "starting", "ready", "ready")),
                      (0.1, world.line(*ready, ready=True))])  # fmt: skip
    up(world.file, world.settings, world.terminal)
    said = world.said()
    ((request, tls, token),) = world.requests()
    assert request == {"do": "start", "settings": {"shadow": "nf4", "slots": 2}, "store": "~/odmoe/stores/tiny"}
    for number, host in enumerate(world.cluster.hosts):
        home = world.home(number)
        ExpertStore.open(home / "odmoe" / "stores" / "tiny").verify()
        keys = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (home / "odmoe" / "keys").iterdir()}
        assert keys == dict.fromkeys(("ca.pem", "node.pem", "node.key", "secret", "ray_token"), 0o600)
        assert f"{host.name} ({host.address}) ready" in said
    assert (tls, token) == (f"{world.home(0)}/odmoe/keys", f"{world.home(0)}/odmoe/keys/ray_token")
    folder = cluster_dir("odmoe-test")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "ray_token").stat().st_mode) == 0o600
    last = said.strip().splitlines()[-1]
    assert last.startswith("ready in ")
    parts = [float(part.split()[-1]) for part in last.partition(": ")[2].split(", ")]
    assert sum(parts) == pytest.approx(float(last.split()[2]), abs=0.4)
    assert [word for word in ("preflight", "keys", "store", "ray up", "nodes") if word not in last] == []


def test_what_runs_is_left_alone(world: World) -> None:
    ready = world.line(*["ready"] * 4, ready=True)
    world.head(start=[(0, ready)], status=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    log = cluster_dir("odmoe-test") / "ray-up.log"
    assert log.read_text().startswith("up -y --no-config-cache")
    log.unlink()
    digest = code_digest()
    for number in range(4):  # the doubles have put a file of their own there
        assert (world.home(number) / "odmoe" / "code" / "SHIPPED").read_text().strip() == digest
    up(world.file, world.settings, world.terminal)
    assert not log.exists()
    assert [request["do"] for request, *_ in world.requests()] == ["start", "status", "start"]
    (world.home(2) / "odmoe" / "code" / "SHIPPED").write_text("other\n")
    up(world.file, world.settings, world.terminal)
    assert log.exists()


def launched_again(world: World) -> bool:
    log = cluster_dir("odmoe-test") / "ray-up.log"
    log.unlink(missing_ok=True)
    up(world.file, world.settings, world.terminal)
    return log.exists()


def test_a_file_that_has_changed_is_launched_again(world: World) -> None:
    """The addresses are the same: two hosts change places, one gets a setting, groups are made, Ray another port."""
    ready = world.line(*["ready"] * 4, ready=True)
    world.head(start=[(0, ready)], status=[(0, ready)])
    assert launched_again(world)
    text = world.file.read_text()
    workers = "[127.0.99.3, 127.0.99.4]"
    for changed in (
        text.replace(workers, "[127.0.99.4, 127.0.99.3]"), text.replace(workers, f"[{workers}]"),
        text.replace(workers, "[127.0.99.3, {host: 127.0.99.4, slots: 3}]"),
        text + "worker_start_ray_commands: [ray start --port=1]\n",
    ):  # fmt: skip
        world.file.write_text(changed)
        assert launched_again(world), changed
        assert not launched_again(world), changed


def test_new_certificates_reach_nodes_that_run(world: World) -> None:
    ready = world.line(*["ready"] * 4, ready=True)
    world.head(start=[(0, ready)], status=[(0, ready)])
    assert launched_again(world)
    assert not launched_again(world)
    hosts = [(host.name, host.address) for host in world.cluster.hosts]
    ensure_certs(cluster_dir("odmoe-test"), hosts, renew=True)
    assert launched_again(world)
    assert not launched_again(world)


def test_a_host_that_leaves_the_file_is_ended(world: World) -> None:
    """Unless it has another cluster's token by then."""
    ready = world.line(*["ready"] * 4, ready=True)
    world.head(start=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    token = world.home(3) / "odmoe" / "keys" / "ray_token"
    ours = token.read_text()
    text = world.file.read_text()
    world.file.write_text(text.replace(", 127.0.99.4", ""))
    token.write_text("another's")
    up(world.file, world.settings, world.terminal)
    assert "is no longer in" not in world.said()
    world.file.write_text(text)
    world.head(start=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    assert token.read_text() == ours
    world.file.write_text(text.replace(", 127.0.99.4", ""))
    down(world.file, world.terminal)
    assert f"127.0.99.4 is no longer in {world.file}: ended sleep" in world.said()


def test_one_at_a_time(world: World) -> None:
    with only_one(cluster_dir("odmoe-test")):
        for work in (lambda: up(world.file, world.settings, world.terminal), lambda: down(world.file, world.terminal)):
            with pytest.raises(LaunchError, match="another odmoe up or down of the cluster odmoe-test is at work"):
                work()
    with only_one(cluster_dir("odmoe-test")):
        pass


def test_quiet_still_says_what_is_wrong(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.file.write_text(world.file.read_text().replace("127.0.99.4", "127.0.98.4"))
    for work in (lambda: up(world.file, world.settings, Terminal(quiet=True)),
                 lambda: down(world.file, Terminal(quiet=True))):  # fmt: skip
        with pytest.raises(LaunchError, match="1 of 4 hosts"):
            work()
        said = capsys.readouterr().err
        assert "worker-1 (127.0.98.4): " in said
        assert len(said.splitlines()) == 1


def test_a_store_named_by_where_one_stands(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-m .` is a store without a name; the other stores of a host stay."""
    world.head(start=[(0, world.line(*["ready"] * 4, ready=True))])
    other = world.home(1) / "odmoe" / "stores" / "other"
    other.mkdir(parents=True)
    monkeypatch.chdir(world.store)
    up(world.file, world.settings.but(model="."), world.terminal)
    assert other.is_dir()
    assert world.requests()[0][0]["store"] == "~/odmoe/stores/tiny"


def test_every_host_that_is_not_fit_is_named_and_nothing_is_begun(world: World) -> None:
    text = world.file.read_text().replace("127.0.99.2", "127.0.98.2")
    world.file.write_text(text)
    (world.home(3) / "odmoe" / "venv").unlink()
    site = world.home(3) / "odmoe" / "venv" / "lib" / "python3.11" / "site-packages"
    (site / "torch-2.0.0.dist-info").mkdir(parents=True)
    (world.home(3) / "odmoe" / "venv" / "bin").mkdir()
    os.symlink(sys.executable, world.home(3) / "odmoe" / "venv" / "bin" / "python")
    (world.home(3) / "odmoe" / "venv" / "pyvenv.cfg").write_text("version = 3.11.2\n")
    (world.home(3) / "odmoe" / "venv" / ".locked").touch()
    with pytest.raises(LaunchError, match="2 of 4 hosts not fit: shadow, worker-1; each is explained above"):
        up(world.file, world.settings, world.terminal)
    assert "shadow (127.0.98.2): ssh is refused" in world.said()
    assert "worker-1 (127.0.99.4): other versions in ~/odmoe/venv: torch 2.0.0" in world.said()
    assert not (world.home(0) / "odmoe" / "keys").exists()


def test_a_ray_up_that_fails_tells_why(world: World) -> None:
    (world.base / "ray-fails").touch()
    with pytest.raises(LaunchError, match=r"ray up ended with exit code 1: NodeUpdater: 127.0.99.9: something refused; "
                                          r"see .*/odmoe-test/ray-up.log"):  # fmt: skip
        up(world.file, world.settings, world.terminal)


def test_an_error_of_the_head_comes_out_with_the_hosts_that_are_behind(world: World) -> None:
    error = {"type": "CorruptStoreError", "message": "expert 3 of layer 0 fails its checksum"}
    world.head(start=[(0.1, world.line("ready", "ready", "ready", "starting")),
                      (0.1, world.line("ready", "ready", "ready", "failed", error=error, **{
                          "worker-1": {"detail": "the store's expert 3 is damaged"}}))])  # fmt: skip
    with pytest.raises(CorruptStoreError, match="expert 3 of layer 0"):
        up(world.file, world.settings, world.terminal)
    assert "worker-1 (127.0.99.4) failed: the store's expert 3 is damaged" in world.said()


def test_it_never_waits_without_a_bound_and_says_who_is_behind(world: World) -> None:
    """One that Ray has not seen, one that was not heard of, one that still starts; the head goes on talking."""
    logs = Path("/tmp/ray/session_latest/logs")
    line = world.line("ready", "waiting", "lost", "starting", **{
        "shadow": {"ray": "missing"}, "worker-0": {"heartbeat_s": 71.0}, "worker-1": {"detail": "reads the store"},
    })  # fmt: skip
    world.head(start=[(0.2, line)] * 600)
    began = time.monotonic()
    with pytest.raises(LaunchError, match="not ready within 12 s; not ready: shadow, worker-0, worker-1; odmoe status"):
        up(world.file, world.settings, world.terminal, timeout_s=12)
    assert time.monotonic() - began < 60
    said = world.said()
    assert "shadow (127.0.99.2): Ray is missing there" in said
    assert "worker-0 (127.0.99.3): no heartbeat for 71 s" in said
    assert "worker-1 (127.0.99.4): reads the store" in said
    assert not logs.exists() or "Ray's launcher says" not in said


@pytest.mark.parametrize("script", [[], [(30.0, {})]])
def test_a_head_that_says_nothing(world: World, monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
    monkeypatch.setattr("odmoe.machines.head.IDLE_S", 2.0)
    world.head(start=script)
    what = "nothing was heard for 2 s" if script else "the head stopped before all was ready"
    with pytest.raises(LaunchError, match=what):
        up(world.file, world.settings, world.terminal)


def test_without_a_model(world: World) -> None:
    with pytest.raises(ConfigError, match="--model is not given"):
        up(world.file, Settings(), world.terminal)


def shown(capsys: pytest.CaptureFixture[str], call: Callable[[], bool]) -> tuple[bool, str]:
    capsys.readouterr()
    ready = call()
    return ready, capsys.readouterr().out


def test_status_of_what_is_ready_and_of_what_is_not(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    ready = world.line(*["ready"] * 4, ready=True)
    world.head(start=[(0, ready)], status=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    good, text = shown(capsys, lambda: status(world.file))
    assert good
    head, *rows = text.splitlines()
    assert head.split()[:3] == ["host", "address", "state"]
    assert [row.split()[:4] for row in rows] == [[h.name, h.address, "ready", "alive"] for h in world.cluster.hosts]
    assert "2.00 GB/s" in rows[2]
    assert "123.4 MB" in rows[2]
    assert "0.31 ms" in rows[2]
    good, text = shown(capsys, lambda: status(world.file, as_json=True))
    found = json.loads(text)
    assert good
    assert found["ready"]
    assert [row["name"] for row in found["hosts"]] == [host.name for host in world.cluster.hosts]
    assert found["hosts"][2]["round_trip_s"] == 0.000312
    lost = world.line("ready", "ready", "lost", "ready", **{"worker-0": {"heartbeat_s": 80.0}})
    world.head(status=[(0, lost)])
    good, text = shown(capsys, lambda: status(world.file))
    assert not good
    assert "no heartbeat for 80 s" in text.splitlines()[3]


def test_status_half_broken(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """The head's code is not there, a host refuses ssh: rows all the same."""
    world.file.write_text(world.file.read_text().replace("127.0.99.4", "127.0.98.4"))
    good, text = shown(capsys, lambda: status(world.file, as_json=True))
    found = json.loads(text)
    assert not good
    assert [row["state"] for row in found["hosts"]] == ["down", "down", "down", "unreachable"]
    assert "ssh is refused" in found["hosts"][3]["detail"]
    assert found["error"]["message"].startswith("nothing runs on main (127.0.99.1); odmoe up ")


def test_status_after_down_is_down_although_the_head_is_being_asked(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.head(start=[(0, world.line(*["ready"] * 4, ready=True))])
    up(world.file, world.settings, world.terminal)
    down(world.file, world.terminal)
    error = {"type": "LaunchError", "message": "no Ray cluster at 'auto'"}
    world.head(status=[(6.0, {"hosts": [], "ready": False, "error": error})])
    _, text = shown(capsys, lambda: status(world.file))
    assert [line.split()[2:4] for line in text.splitlines()[1:5]] == [["down", "down"]] * 4
    assert text.splitlines()[5].startswith("head: LaunchError: nothing runs on main (127.0.99.1)")


def test_status_of_a_host_whose_python_is_too_old(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_START", preflight._START.replace("(3, 7)", "(9, 9)"))
    good, text = shown(capsys, lambda: status(world.file))
    assert not good
    assert text.splitlines()[1].split()[:3] == ["main", "127.0.99.1", "unfit"]
    with pytest.raises(LaunchError, match="4 of 4 hosts may still run something"):
        down(world.file, world.terminal)


def test_status_is_interrupted_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While only the head's answer is waited for, which takes its time."""
    line = world.line(*["ready"] * 4, ready=True)
    world.head(start=[(0, line)], status=[(44.0, line)])
    up(world.file, world.settings, world.terminal)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has put us behind
    timer = threading.Timer(8.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            status(world.file)
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 40


def test_down_ends_everything_and_says_what_it_could_not_reach(world: World) -> None:
    ready = world.line(*["ready"] * 4, ready=True)
    world.head(start=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    down(world.file, world.terminal)
    assert [request["do"] for request, *_ in world.requests()] == ["start", "stop"]
    said = world.said()
    for host in world.cluster.hosts:  # the double of `ray down` ends nothing
        assert f"{host.name} ({host.address}): ended what was left: sleep" in said
    assert said.strip().splitlines()[-1] == "nothing runs any more on 4 hosts"
    down(world.file, world.terminal)
    assert world.said().count("ended what was left") == 4
    world.file.write_text(world.file.read_text().replace("127.0.99.4", "127.0.98.4"))
    with pytest.raises(LaunchError, match="1 of 4 hosts may still run something: worker-1"):
        down(world.file, world.terminal)
    assert "worker-1 (127.0.98.4): not stopped: ssh is refused" in world.said()


def test_down_where_the_head_cannot_be_asked(world: World) -> None:
    ready = world.line(*["ready"] * 4, ready=True)
    world.head(start=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    shutil.rmtree(world.home(0) / "odmoe" / "code")
    (world.base / "ray-fails").touch()
    down(world.file, world.terminal)
    said = world.said()
    assert "the nodes were not stopped in order" in said
    assert "ray down ended with exit code 1" in said
    assert "nothing runs any more on 4 hosts" in said


def test_what_ray_prints_is_told_by_its_telling_lines() -> None:
    lines = [
        "Local node IP: 10.0.0.1", "2026-11-21 16:00:00,123\tINFO updater.py:9 -- Waiting", "Traceback (most",
        '  File "x.py", line 3, in f', "ssh: connect to host 10.0.0.2 port 22: No route to host", "", "done",
    ]  # fmt: skip
    assert ray_cli.telling([*lines[:2], lines[-1]]) == "done"
    assert ray_cli.telling([*lines, "Failed to start"]) == "Failed to start"
    assert ray_cli.telling([]) == "nothing was said"


def test_of_ray_s_own_log_the_grave_line_is_told() -> None:
    line = (
        "[2026-11-21 16:32:00,357 C 883 883] (raylet) grpc_server.cc:134:  An unexpected system state has occurred. "
        "You have found a bug, and we'll work with you to fix it. Check failed: server_ The specified port is 6380."
    )
    assert ray_cli.telling([line], 1) == "Check failed: server_ The specified port is 6380."
    assert ray_cli.GRAVE.search(line)
    assert not ray_cli.GRAVE.search(line.replace(" C 883", " I 883"))


def test_ray_s_own_logs_are_read_on_the_host_and_the_launcher_s_on_the_head(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from odmoe.machines.ssh import Ssh

    logs = world.base / "logs"
    logs.mkdir()
    monkeypatch.setattr(ray_cli, "LOGS", str(logs))
    hosts = list(world.cluster.hosts)
    with Ssh.of(world.cluster, cluster_dir("odmoe-test")) as ssh:
        assert ray_cli.ray_says(ssh, hosts[0], hosts[1:]) == {}
        (logs / "monitor.out").write_text(
            "NodeUpdater: 127.0.99.22: Ray start commands failed [LogTimer=9ms]\n"
            "NodeUpdater: 127.0.99.2: \x1b[31mRay start commands failed\x1b[0m [LogTimer=7ms]\nsomething failed\n"
        )
        assert ray_cli.ray_says(ssh, hosts[0], hosts[1:]) == {
            "127.0.99.2": "NodeUpdater: 127.0.99.2: Ray start commands failed [LogTimer=7ms]"
        }
        (logs / "raylet.out").write_text("[2026-11-21 16:32:00,357 E 8 8] (raylet) x.cc:1: no port for it\n")
        found = ray_cli.ray_says(ssh, hosts[0], hosts[1:])  # these hosts have their logs in common
        assert found == {host.address: "no port for it" for host in hosts[1:]}
        os.utime(logs / "raylet.out", (1, 1))
        assert list(ray_cli.ray_says(ssh, hosts[0], hosts[1:])) == ["127.0.99.2"]


def test_the_table_in_a_terminal(world: World) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160)
    table = HostTable(console, world.cluster)
    with table.shown():
        table.see(world.line("ready", "lost", "ready", "starting", **{
            "shadow": {"heartbeat_s": 70.4}, "worker-1": {"detail": "[bold]an [/] odd text"}}))  # fmt: skip
    drawn = [line for line in out.getvalue().splitlines() if "127.0.99." in line]
    assert "shadow (127.0.99.2): no heartbeat for 70 s" in drawn
    assert "worker-1 (127.0.99.4): [bold]an [/] odd text" in drawn
    assert "0.31 ms" in next(line for line in drawn if "worker-0" in line)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_terminal_has_a_line_a_host_and_cuts_no_figure(world: World, width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=width)
    table = HostTable(console, world.cluster)
    full = {"loader": "memory", "load_bytes_per_s": 12.34e9, "round_trip_s": 0.01234, "device": "AMD EPYC, 2 cores"}
    why = "it does not answer ssh; see that it is switched on, that its cable is in and that no firewall is in between"
    odd = {"store": "a-model-bfloat16-2-0123456789abcdef", "ray": "missing", "state": "unreachable", "detail": why}
    table.see(world.line(*["ready"] * 4, **{"worker-0": full, "worker-1": full | odd}))
    console.print(table.drawn())
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[1:5]] == [host.name for host in world.cluster.hosts]
    assert all("memory 12.34 GB/s" in line and "12.34 ms" in line for line in lines[3:5])
    assert "unreachable missing a-model-bfl" in " ".join(lines[4].split())
    assert " ".join(" ".join(lines[5:]).split()) == f"worker-1 (127.0.99.4): {why}"
    assert ("AMD EPYC, 2 cores" in lines[3]) == (width == 160)
