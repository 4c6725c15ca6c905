"""Hosts made of namespaces: three of them, in a network and under a name of their own, beside a testbed that may be up.

What is there is asked of ssh, ip and /proc, not of the script. Skipped, with the reason, where this machine cannot make
namespaces. About 40 seconds on two idle cores.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.system

SCRIPT = (sys.executable, "-m", "scripts.testbed")
PRIVATE = Path("/var/tmp/odmoe-testbed")
NUMBERS = {"main": 2, "shadow": 11, "worker-0": 200}
FILE = """\
cluster_name: {name}
provider:
  type: external
  module: odmoe.on_ray.provider.OnPremises
  hosts: {{main_node: {main}, shadow_node: {shadow}, worker_node: [{worker}]}}
auth: {{ssh_user: root, ssh_private_key: {key}}}
"""


@dataclass
class Bed:
    """A cluster file, and the directory that stands for the user's settings. `network`: the addresses' beginning."""

    folder: Path
    name: str
    network: str

    @property
    def hosts(self) -> dict[str, str]:
        return {host: f"{self.network}.{number}" for host, number in NUMBERS.items()}

    @property
    def file(self) -> Path:
        return self.folder / "cluster.yaml"

    @property
    def key(self) -> Path:
        return self.folder / "ssh" / "id"

    @property
    def known(self) -> Path:
        return self.folder / "settings" / "odmoe" / "clusters" / self.name / "known_hosts"

    def write(self, **others: str) -> None:
        """`others`: addresses that are not as usual."""
        main, shadow, worker = (self.hosts | others).values()
        self.file.write_text(FILE.format(name=self.name, main=main, shadow=shadow, worker=worker, key=self.key))

    def start(self, command: str, *words: str) -> subprocess.Popen[str]:
        argv = [*SCRIPT, command, "--cluster", str(self.file), *words]
        return subprocess.Popen(
            argv,
            cwd=ROOT,
            env=os.environ | {"XDG_CONFIG_HOME": str(self.folder / "settings")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def do(self, command: str, *words: str, code: int = 0, given: str = "") -> str:
        """What it says on both outputs."""
        process = self.start(command, *words)
        out, errors = process.communicate(given, timeout=60)
        assert process.returncode == code, errors
        assert "Traceback" not in errors
        return out + errors

    def ssh(self, host: str, command: str, key: Path | None = None, code: int = 0) -> str:
        argv = [
            "ssh",
            "-F",
            "none",
            "-i",
            str(key or self.key),
            "-o",
            "IdentitiesOnly=yes",
            "-o",
            "BatchMode=yes",
            "-o",
            f"UserKnownHostsFile={self.known}",
            "-o",
            "StrictHostKeyChecking=yes",
            "-o",
            "ConnectTimeout=20",
            f"root@{self.hosts[host]}",
            command,
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout

    def first(self, host: str) -> int:
        """The number that the host's process 1 has on this machine: it listens at the host's address."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                inside = re.search(r"^NSpid:\s+\d+\s+1$", (path / "status").read_text(), re.M)
                table = (path / "net/fib_trie").read_text() if inside else ""
            except OSError:
                continue
            if f"{self.hosts[host]}\n" in table:
                return int(path.name)
        pytest.fail(f"{host} has no first process")

    def reachable(self, host: str, seconds: float = 20) -> bool:
        try:
            with socket.create_connection((self.hosts[host], 22), timeout=seconds):
                return True
        except OSError:
            return False

    def nothing_left(self, namespaces: set[str]) -> None:
        """`namespaces`: those that the hosts had."""
        interfaces = json.loads(subprocess.check_output(["ip", "-json", "link"]))
        assert not [one for one in interfaces if f":{self.name}:" in f"{one.get('ifalias')}:"]
        assert not (PRIVATE / self.name).exists()
        assert not (PRIVATE / f"{self.name}.lock").exists()
        assert f"/{self.name}/" not in Path("/proc/self/mountinfo").read_text()
        assert namespaces.isdisjoint(held())
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                assert f"{PRIVATE}/{self.name}/".encode() not in path.read_bytes(), path
        assert {path.name for path in self.folder.iterdir()} == {"cluster.yaml"}


def held() -> set[str]:
    """All namespaces that any process is in."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/*"):
        try:
            found.add(os.readlink(path))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def allowed() -> None:
    check = subprocess.run([*SCRIPT, "check"], cwd=ROOT, capture_output=True, text=True, check=False)
    if check.returncode:
        pytest.skip(check.stderr.strip())


@pytest.fixture(scope="module")
def running(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    bed = Bed(tmp_path_factory.mktemp("testbed"), "testbed-test", "10.213.77")
    bed.write()
    if (PRIVATE / bed.name).exists():  # of a run that was killed
        bed.do("down")
    bed.do("up")
    yield bed
    bed.do("down")


@pytest.fixture
def bed(allowed: None, tmp_path: Path) -> Iterator[Bed]:
    """Nothing is up, before or after."""
    bed = Bed(tmp_path, "testbed-test-2", "10.213.78")
    bed.write()
    if (PRIVATE / bed.name).exists():
        bed.do("down")
    yield bed
    if (PRIVATE / bed.name).exists():
        bed.do("down")


def test_each_host_is_a_machine_of_its_own(running: Bed) -> None:
    for host, address in running.hosts.items():
        told = running.ssh(host, "hostname; cat /etc/hostname; ip -4 -o address show eth0; getent hosts worker-0")
        assert told.splitlines()[:2] == [host, host]
        assert f" {address}/24 " in told
        assert told.splitlines()[3].split()[0] == running.hosts["worker-0"]
    tools = ("rsync", "ip", "python3", "ls")
    assert len(running.ssh("main", "; ".join(f"command -v {tool}" for tool in tools)).split()) == len(tools)


def test_what_one_host_has_no_other_sees(running: Bed) -> None:
    folders = ["/tmp", "/var/tmp", "/dev/shm", "/run", str(Path.home())]
    files = [f"{folder}/of-main" for folder in folders]
    running.ssh("main", f"touch {' '.join(files)}; nohup sleep 4217 >/dev/null 2>&1 &")
    look = f"ls {' '.join(files)} 2>/dev/null; cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
    own, others = running.ssh("main", look), running.ssh("shadow", look)
    assert all(f"{file}\n" in own for file in files)
    assert "sleep 4217" in own
    assert "sshd" in others
    assert "sleep 4217" not in others
    assert not any(f"{file}\n" in others for file in files)
    assert not any(Path(file).exists() for file in files)
    running.ssh("main", f"rm {' '.join(files)}")


def test_a_host_sees_nothing_of_the_launcher(running: Bed) -> None:
    assert running.key.exists()
    running.ssh("main", f"test -e {running.key}", code=1)
    assert running.ssh("main", "ls -A /var/tmp").split() == []
    seen = set(running.ssh("main", "ls -A ~").split()) - {".ssh"}
    needed = Path(sys.base_prefix), Path(sys.prefix), ROOT
    parts = {path.relative_to(Path.home()).parts[0] for path in needed if path.is_relative_to(Path.home())}
    assert seen == {"odmoe"} | parts


def test_the_environment_works_there_and_cannot_be_written(running: Bed) -> None:
    told = running.ssh("worker-0", "cd / && ~/odmoe/venv/bin/python -c 'import sys, typer; print(sys.prefix)'")
    assert told.strip() == str(Path.home() / "odmoe/venv")
    running.ssh("worker-0", "touch ~/odmoe/venv/written", code=1)
    running.ssh("worker-0", f"{sys.executable} -c 'import typer'")


def test_only_the_clusters_key_opens_and_hosts_reach_each_other(running: Bed, tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    running.ssh("main", "true", key=other, code=255)
    running.do("run", "sh", "-c", "umask 77; mkdir -p ~/.ssh; cat > ~/.ssh/id", given=running.key.read_text())
    onward = "ssh -i ~/.ssh/id -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    assert running.ssh("main", f"{onward} {running.hosts['worker-0']} hostname").strip() == "worker-0"


def test_run_is_a_login_there(running: Bed) -> None:
    told = running.do("run", "--on", "shadow", "sh", "-c", "hostname; pwd; echo $HOME; cat", given="given")
    assert told.split() == ["shadow", str(Path.home()), str(Path.home()), "given"]
    running.do("run", "--on", running.hosts["worker-0"], "sh", "-c", "exit 7", code=7)
    assert "worker-9" in running.do("run", "--on", "worker-9", "true", code=1)


def test_a_slow_link_is_slow_each_way_and_counted(running: Bed) -> None:
    running.do("rate", "worker-0", "100mbit")
    before = {row["host"]: row for row in json.loads(running.do("status", "--json"))["hosts"]}["worker-0"]
    found = json.loads(running.do("measure", "main", "worker-0", "--json"))
    after = {row["host"]: row for row in json.loads(running.do("status", "--json"))["hosts"]}["worker-0"]
    for way, counter in (("to", "received_bytes"), ("from", "sent_bytes")):
        assert 50e6 < found[way] < 105e6, found
        assert after[counter] - before[counter] > 4e6, "in most of a second"
    assert "100mbit" in running.do("status")
    assert "allowed" in running.do("rate", "worker-0", "fast", code=1)


def test_unplugged_is_unreachable_and_runs_on(running: Bed) -> None:
    later = PRIVATE / running.name / "shadow" / "tmp" / "later"  # its /tmp, as this machine sees it
    running.ssh(
        "shadow", "nohup sh -c 'while ! test -e /tmp/go; do sleep 0.1; done; date > /tmp/later' >/dev/null 2>&1 &"
    )
    running.do("unplug", "shadow")
    assert not running.reachable("shadow", seconds=1)
    assert running.reachable("main")
    told = running.do("status", "--json", code=1)
    assert {row["host"]: row["plugged"] for row in json.loads(told)["hosts"]} == {
        "main": True,
        "shadow": False,
        "worker-0": True,
    }
    later.with_name("go").touch()
    deadline = time.monotonic() + 30
    while not (later.exists() and later.read_text()):
        assert time.monotonic() < deadline, "nothing runs on the unplugged host"
        time.sleep(0.05)
    running.do("plug", "shadow")
    assert running.reachable("shadow")
    assert running.ssh("shadow", "cat /tmp/later")


def test_a_second_up_repairs_what_is_missing(running: Bed) -> None:
    kept = {host: running.first(host) for host in ("main", "worker-0")}
    running.ssh("shadow", "touch ~/kept /tmp/gone")
    os.kill(running.first("shadow"), 9)
    running.do("unplug", "worker-0")
    told = running.do("up")
    assert re.search(r"shadow .* repaired \(its first process was gone\)", told)
    assert re.search(r"worker-0 .* repaired \(.*unplugged", told)
    assert re.search(r"main .* already up", told)
    assert {host: running.first(host) for host in kept} == kept
    assert running.ssh("shadow", "ls ~/kept").split() == [str(Path.home() / "kept")]
    assert "gone" not in running.ssh("shadow", "ls /tmp").split()  # a checkout beneath /tmp shows there
    assert running.reachable("worker-0")


def test_down_leaves_nothing(bed: Bed) -> None:
    bed.do("up")
    namespaces = {os.readlink(path) for host in bed.hosts for path in Path(f"/proc/{bed.first(host)}/ns").iterdir()}
    namespaces -= {os.readlink(path) for path in Path("/proc/self/ns").iterdir()}
    assert len(namespaces) >= 15
    bed.ssh("main", "nohup setsid sleep 4217 >/dev/null 2>&1 &")
    os.kill(bed.first("shadow"), 9)
    bed.do("down")
    bed.nothing_left(namespaces)
    bed.do("down")


def test_down_keeps_what_it_did_not_make(bed: Bed) -> None:
    bed.key.parent.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(bed.key)], check=True)
    bed.known.parent.mkdir(parents=True)
    bed.known.write_text("192.0.2.77 ssh-ed25519 AAAA\n")
    before = bed.key.read_text()
    bed.do("up")
    assert bed.ssh("main", "hostname").strip() == "main"
    bed.do("down")
    assert bed.key.read_text() == before
    assert bed.known.read_text() == "192.0.2.77 ssh-ed25519 AAAA\n"


@pytest.mark.parametrize("after", ["made the ssh key", "bridge", "up,"])
def test_down_after_an_interrupted_up(bed: Bed, after: str) -> None:
    """Killed -9 once it has said so, and so with hosts at different points."""
    process = bed.start("up")
    assert process.stderr is not None
    assert any(after in line for line in process.stderr)
    process.kill()
    process.communicate(timeout=10)
    bed.do("down")
    bed.nothing_left(set())


def test_one_at_a_time(bed: Bed) -> None:
    lock = PRIVATE / f"{bed.name}.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "is at work" in bed.do("up", code=1)
        assert "is at work" in bed.do("down", code=1)
    assert not (PRIVATE / bed.name).exists()


def test_a_network_that_is_taken(bed: Bed) -> None:
    """127.0.0.0/8 is the loopback interface's on every machine."""
    bed.write(**{name: f"127.0.0.{number}" for name, number in NUMBERS.items()})
    assert "lo of this machine is already in 127.0.0.0/8" in bed.do("up", code=1)
    bed.write(shadow="10.213.79.11")
    assert "one /24" in bed.do("up", code=1)
    bed.write(main="10.213.78.1")
    assert "launching machine" in bed.do("up", code=1)
    assert {path.name for path in bed.folder.iterdir()} == {"cluster.yaml"}
