"""Ten hosts made of namespaces with a fault each: `odmoe doctor` names every one of them, with its cure.

Real: a port that is taken, a full disk, an expired certificate, a slow cable, a store that is missing, a cable that is
pulled, an environment with another version. Of three faults the host's own answer is replaced where the host reads it:
`python3` there has another clock, and /proc/meminfo and /proc/cpuinfo are files of the test.

About 45 s on two cores. Skipped, with the reason, where this machine cannot make namespaces.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from odmoe.machines.cluster_file import read_cluster_file
from odmoe.machines.preflight import pinned_versions
from scripts.testbed import namespaces
from scripts.testbed.layout import BASE, layout_of
from support.machines.certificates import Authority
from support.machines.cli import CommandLine
from support.paths import DEMO, ROOT

pytestmark = pytest.mark.system

SCRIPT = (sys.executable, "-m", "scripts.testbed")
FILE = """\
cluster_name: testbed-doctor
provider:
  type: external
  module: odmoe.on_ray.provider.OnPremises
  hosts: {{main_node: 10.213.81.11, shadow_node: 10.213.81.12, worker_node: [{workers}]}}
auth: {{ssh_user: root, ssh_private_key: {key}}}
head_start_ray_commands: [ray start --head --port=6379]
"""
STORE = "mixtral-test"
DOWN, SLOW, TAKEN = "worker-6", "worker-4", "main"


@dataclass
class Bed:
    """The hosts, and the names of those that the test has changed."""

    file: Path

    def call(self, *words: str) -> None:
        argv = [*SCRIPT, *words, "--cluster", str(self.file)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr

    def inside(self, host: str, script: str) -> list[str]:
        """The command line that runs a shell script on a host, in its own mounts."""
        first = namespaces.find(layout_of(read_cluster_file(self.file)))[host].first
        assert first is not None
        return namespaces.enter(first, "root", ["sh", "-euc", script])

    def do(self, host: str, script: str) -> None:
        done = subprocess.run(self.inside(host, script), capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr

    def write(self, host: str, path: str, content: bytes) -> None:
        script = f"mkdir -p $(dirname {path}); cat > {path}"
        subprocess.run(self.inside(host, script), input=content, check=True, timeout=30)


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    check = subprocess.run([*SCRIPT, "check"], cwd=ROOT, capture_output=True, text=True, check=False)
    if check.returncode:
        pytest.skip(check.stderr.strip())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    workers = ", ".join(f"10.213.81.{n}" for n in range(13, 21))
    (tmp_path / "cluster.yaml").write_text(FILE.format(workers=workers, key=tmp_path / "ssh" / "id"))
    made = Bed(tmp_path / "cluster.yaml")
    if (BASE / "testbed-doctor").exists():  # of a run that was killed
        made.call("down")
    made.call("up")
    try:
        yield made
    finally:
        made.call("down")


def store_everywhere(bed: Bed) -> None:
    manifest = {
        "format": 2,
        "fingerprint": "f",
        "dtype": "float32",
        "dense": {},
        "layers": {"0": {"file": "layer-0", "blobs": [{"offset": 0, "length": 4096}]}},
    }
    for host in read_cluster_file(bed.file).hosts:
        if host.name == "worker-1":
            bed.do(host.name, "mkdir -p ~/odmoe/stores; mount -t tmpfs -o size=1m tmpfs ~/odmoe/stores")
        if host.name != "worker-5":
            folder = f"~/odmoe/stores/{STORE}"
            bed.write(host.name, f"{folder}/manifest.json", json.dumps(manifest).encode())
            bed.write(host.name, f"{folder}/layer-0", bytes(4096))


def set_clock(bed: Bed, host: str) -> None:
    """Its python3 counts the time from 90 s later on."""
    later = "import sys, time; now = time.time; time.time = lambda: now() + 90; exec(sys.stdin.read())"
    shim = f'#!/bin/sh\nshift\nexec {sys.executable} -c {shlex.quote(later)} "$@"\n'
    bed.do(host, "mount -t tmpfs tmpfs /usr/local/sbin")
    bed.write(host, "/usr/local/sbin/python3", shim.encode())
    bed.do(host, "chmod 755 /usr/local/sbin/python3")


def replace(bed: Bed, host: str, path: str, content: str) -> None:
    bed.write(host, "/tmp/replaced", content.encode())
    bed.do(host, f"mount --bind /tmp/replaced {path}")


def other_versions(bed: Bed, host: str) -> None:
    names = [f"{name}-{number}" for name, number in pinned_versions().items() if name != "ray"] + ["ray-2.40.0"]
    site = "~/odmoe/venv/lib/python3.11/site-packages"
    bed.do(
        host,
        f"mount -t tmpfs tmpfs ~/odmoe/venv; mkdir -p ~/odmoe/venv/bin {site}; "
        f"ln -s {sys.executable} ~/odmoe/venv/bin/python; cd {site}; mkdir "
        + " ".join(f"{name}.dist-info" for name in names),
    )


@contextlib.contextmanager
def listener(bed: Bed, host: str) -> Iterator[None]:
    listen = "import socket, time; s = socket.create_server(('', 6379)); print(flush=True); time.sleep(600)"
    script = f"exec python3 -c {shlex.quote(listen)}"
    with subprocess.Popen(bed.inside(host, script), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield
        finally:
            process.kill()


def plant(bed: Bed, tmp_path: Path) -> None:
    """One fault a host, but for main's and that of the listener."""
    store_everywhere(bed)
    memory = re.sub(r"MemAvailable: .*", "MemAvailable: 300000 kB", Path("/proc/meminfo").read_text())
    replace(bed, "shadow", "/proc/meminfo", memory)
    set_clock(bed, "worker-0")
    bed.do("worker-1", "head -c 2000000 /dev/zero > ~/odmoe/stores/rest 2>/dev/null || true")
    other_versions(bed, "worker-2")
    (tmp_path / "keys").mkdir()
    keys = Authority(tmp_path / "keys", days=(-900, 9)).folder("10.213.81.16", days=(-800, -3))
    for name in ("node.pem", "ca.pem"):
        bed.write("worker-3", f"~/odmoe/keys/{name}", (keys / name).read_bytes())
    bed.call("rate", SLOW, "10mbit")
    bed.call("unplug", DOWN)
    cpu = re.sub(r"^flags.*$", "flags\t\t: fpu sse2", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    replace(bed, "worker-7", "/proc/cpuinfo", re.sub(r"(model name\s*: ).*", r"\1Older", cpu))


PLANTED = [
    # host, check, state, what it says, the cure
    ("main", "ports", "failure", r"6379 by python", "end that program there, or change the port"),
    ("shadow", "memory", "failure", r"307.2 MB of .* free, .* needed for the shadow", "--shadow nf4"),
    ("worker-0", "clock", "failure", r"clock is (89|9\d) s ahead", "timedatectl set-ntp true"),
    ("worker-1", "disk room", "failure", r"0.0 MB free", "odmoe host-stores"),
    ("worker-2", "packages", "failure", r"ray 2.40.0 \(wanted", "remove ~/odmoe/venv there"),
    ("worker-3", "certificates", "failure", r"the certificate of a node expired on 20\d\d", "odmoe up copies them"),
    (SLOW, "link", "warning", r"\d Mbit/s from the main host, .*slow; other hosts reach", "cable of 1 Gbit/s"),
    ("worker-5", "store", "failure", rf"missing: {STORE}", "-m MODEL copies it again"),
    (DOWN, "ssh", "failure", r"does not answer ssh; nothing else", "its cable is in"),
    ("worker-7", "processor", "warning", r"Older; .*the main host has .*last bits", "one kind of processor"),
]


def test_ten_faults_are_named_each_with_its_cure(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odmoe.doctor.examination.READ_S", 0.2)
    monkeypatch.setattr("odmoe.doctor.examination.FILE_BYTES", 32 << 20)
    plant(bed, tmp_path)
    with listener(bed, TAKEN):
        began = time.monotonic()
        done = CommandLine()("doctor", str(bed.file), "-m", str(DEMO), "--json")
        took = time.monotonic() - began
    assert done.code == 1, done.err
    assert "Traceback" not in done.err
    found = {(one["host"], one["name"]): one for one in json.loads(done.out)["checks"]}
    for host, name, state, value, cure in PLANTED:
        one = found[host, name]
        assert one["state"] == state, one
        assert re.search(value, one["value"]), one
        assert cure in one["cure"], one
    planted = {(host, name) for host, name, *_ in PLANTED}
    failed = {place for place, one in found.items() if one["state"] == "failure"}
    assert failed <= planted, [found[place] for place in failed - planted]
    assert took < 240
