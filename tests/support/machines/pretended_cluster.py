"""Hosts over a real sshd with real copies; in place of Ray and the head's program, doubles that keep to what these say
and do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from odmoe.machines import ray_cli
from odmoe.machines.cluster_file import ClusterFile
from odmoe.machines.home import cluster_dir
from odmoe.settings.settings import Settings
from odmoe.terminal import Terminal
from support.machines.ssh_hosts import SshHosts

RAY = """#!{python}
# What `ray up` and `ray down` do, less Ray: unpack the code on every host, begin a process there, end the head's.
import os, odmoe.machines.ship, pathlib, shutil, subprocess, sys
print(*sys.argv[1:-1], os.environ["RAY_AUTH_MODE"])
if os.path.exists("{base}/ray-fails"):
    print("2026-11-21 16:00:00,000\\tERROR updater.py:1 -- NodeUpdater: 127.0.99.9: something refused")
    print("Traceback (most recent call last):")
    sys.exit(1)
odmoe.machines.ship.code_archive(pathlib.Path("{archive}"))
for home in {homes}:
    keys = home + "/odmoe/keys/ray_token"
    if sys.argv[1] == "up":
        shutil.copy(sys.argv[-1], home + "/ray_bootstrap_config.yaml")
        subprocess.run("cd $H/odmoe && mkdir -p code && tar -xzf {archive} -C code && "
                       "cp {at_head} code/odmoe/at_head.py", shell=True, check=True, env=dict(os.environ, H=home))
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


def snapshot(
    cluster: ClusterFile, states: Sequence[str], ready: bool = False, error: Any = None, **hosts: dict[str, Any]
) -> dict[str, Any]:
    """What a head says of its hosts, in the states given; `hosts`: what is otherwise of some, by name."""
    rows = [
        {
            "address": host.address,
            "role": host.role,
            "number": host.number,
            "ray": "alive",
            "state": state,
            "detail": "",
            "store": "verified" if state == "ready" else "",
            "slots": 2,
            "device": "cpu",
            "loader": "disk",
            "load_bytes_per_s": 2e9,
            "round_trip_s": 0.000312,
            "memory_bytes": 123_400_000,
            "heartbeat_s": 0.2,
        }
        | hosts.get(host.name, {})
        for host, state in zip(cluster.hosts, states, strict=True)
    ]
    return {"hosts": rows, "ready": ready, "error": error}


@dataclass
class PretendedCluster:
    """Four hosts, and what their head is to say. `base`: the test's own folder; `store`: the model's."""

    hosts: SshHosts
    cluster: ClusterFile
    base: Path
    store: str
    terminal: Terminal = field(init=False)

    def __post_init__(self) -> None:
        self.terminal = Terminal()
        self.terminal.console = Console(file=(self.base / "stderr").open("w"), width=200, highlight=False)

    @property
    def file(self) -> Path:
        return self.cluster.path

    @property
    def settings(self) -> Settings:
        return Settings(model=self.store, shadow="nf4", slots=2, secret="not to travel", cluster=str(self.file))

    def home(self, number: int) -> Path:
        return self.hosts.home(self.hosts.addresses[number])

    def line(self, *states: str, ready: bool = False, error: Any = None, **hosts: dict[str, Any]) -> dict[str, Any]:
        return snapshot(self.cluster, states, ready, error, **hosts)

    def ready(self) -> dict[str, Any]:
        """Every node is."""
        return self.line(*["ready"] * len(self.cluster.hosts), ready=True)

    def head(self, **script: list[tuple[float, dict[str, Any]]]) -> None:
        """By request: what the head says, each after so many seconds."""
        (self.home(0) / "script.json").write_text(json.dumps(script))

    def requests(self) -> list[Any]:
        """What the head was asked: the request, its ODMOE_TLS and its RAY_AUTH_TOKEN_PATH."""
        file = self.home(0) / "requests"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def stderr(self) -> str:
        """All that the commands have told the person so far."""
        self.terminal.console.file.flush()
        return (self.base / "stderr").read_text()


def pretend(hosts: SshHosts, base: Path, store: Path, patch: pytest.MonkeyPatch) -> PretendedCluster:
    """`base`: an empty folder, where this machine keeps what it knows of the cluster."""
    patch.setenv("XDG_CONFIG_HOME", str(base / "config"))
    patch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    patch.setattr("odmoe.machines.ssh.PORT", hosts.port)
    cluster = hosts.cluster(base)
    homes = [str(hosts.home(address)) for address in hosts.addresses]
    for home in homes:
        (Path(home) / "odmoe").mkdir()
        os.symlink(sys.prefix, Path(home) / "odmoe" / "venv")
    at_head, archive, ray = base / "at_head.py", cluster_dir(cluster.name) / "code.tar.gz", base / "ray"
    at_head.write_text(AT_HEAD)
    ray.write_text(RAY.format(python=sys.executable, base=base, homes=homes, archive=archive, at_head=at_head))
    ray.chmod(0o755)
    patch.setattr(ray_cli, "RAY", (str(ray),))
    return PretendedCluster(hosts, cluster, base, str(store))
