"""Where a testbed keeps what: directories, interface names, addresses; and how the tools that make it are called."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from odmoe.machines.cluster_file import ClusterFile, Host
from scheduler.errors import ODMoEError

BASE = Path("/var/tmp/odmoe-testbed")
"""On disk and not in memory: expert stores are read with O_DIRECT."""

TOOL_S = 20.0
"""Longest that one call of ip, tc or ssh-keygen may take."""

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "rsync": "rsync",
}
"""What is needed, and which Debian package has it."""

TRIAL = (
    "ip link add name a type veth peer name b && ip link add name c type bridge && "
    "tc qdisc add dev a root handle 1: htb default 1"
)


class TestbedError(ODMoEError):
    """The testbed cannot be made, used or removed; the message says what is in the way and what to do."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class Layout:
    """A cluster file's testbed. Several may stand side by side: all names have the cluster's in them."""

    cluster: ClusterFile
    network: ipaddress.IPv4Network

    @property
    def root(self) -> Path:
        return BASE / self.cluster.name

    @property
    def state(self) -> Path:
        """Host key and the list of what was made outside of `root`."""
        return self.root / ".testbed"

    @property
    def gateway(self) -> str:
        """The launching machine, as the hosts reach it: the network's first address."""
        return str(self.network[1])

    @property
    def bridge(self) -> str:
        return prefix(self.cluster.name)

    def private(self, host: str) -> Path:
        return self.root / host

    def script(self, host: str) -> Path:
        """What a host's first process runs; also how the process is known among all others."""
        return self.state / f"{host}.init"

    def log(self, host: str) -> Path:
        return self.state / f"{host}.log"

    def link(self, host: Host) -> str:
        """The bridge's side of the host's link. At most 15 characters, as the kernel wants."""
        return f"{self.bridge}h{host.address.rpartition('.')[2]}"


def layout_of(cluster: ClusterFile) -> Layout:
    """Raises TestbedError if hosts are in several /24 networks or one is the network's first address."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", cluster.name):
        raise TestbedError(
            f"{cluster.path}: cluster_name {cluster.name!r} cannot name a directory; use letters, digits, - and _"
        )
    networks = {ipaddress.ip_network(f"{host.address}/24", strict=False) for host in cluster.hosts}
    network = ipaddress.IPv4Network(str(min(networks)))
    if len(networks) > 1:
        raise TestbedError(
            f"{cluster.path}: the hosts are in {len(networks)} networks ({', '.join(map(str, sorted(networks)))}); "
            "give all an address in one /24"
        )
    ends = {str(network[0]): "the network", str(network[1]): "the launching machine", str(network[255]): "broadcast"}
    for host in cluster.hosts:
        if host.address in ends:
            raise TestbedError(f"{cluster.path}: {host.name} has {host.address}, which is {ends[host.address]}'s")
    return Layout(cluster, network)


def prefix(name: str) -> str:
    """Interface names of one cluster start with this: ten characters."""
    return "odm" + hashlib.sha256(name.encode()).hexdigest()[:7]


def call(argv: list[str], given: str | None = None, limit_s: float = TOOL_S) -> str:
    """Standard output. Raises TestbedError with what the command said."""
    try:
        done = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=limit_s, check=False)
    except FileNotFoundError:
        raise TestbedError(f"{argv[0]} is not installed: {advice([argv[0]])}") from None
    except subprocess.TimeoutExpired:
        raise TestbedError(f"`{' '.join(argv)}` took more than {limit_s:.0f} s and was stopped") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or " ".join(done.stdout.split())
        raise TestbedError(f"`{' '.join(argv)}` failed with {done.returncode}: {said}")
    return done.stdout


def tool(name: str) -> str:
    """The path of a command, /usr/sbin included. Raises TestbedError."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"
    found = shutil.which(name, path=path)
    if found is None:
        raise TestbedError(f"{name} is not installed: {advice([name])}")
    return found


def advice(names: list[str]) -> str:
    return f"apt-get install {' '.join(sorted({PACKAGES.get(name, name) for name in names}))}"


def check_machine() -> None:
    """Raises TestbedError saying why hosts cannot be made on this machine: rights, tools or the kernel."""
    if os.geteuid():
        raise TestbedError(f"hosts are made of namespaces, which user {os.geteuid()} may not make; run as root")
    missing = []
    for name in PACKAGES:
        try:
            tool(name)
        except TestbedError:
            missing.append(name)
    if missing:
        raise TestbedError(f"not installed: {', '.join(missing)}; {advice(missing)}")
    try:
        call([tool("unshare"), *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", TRIAL])
    except TestbedError as error:
        raise TestbedError(f"namespaces, veth, bridge or htb are not allowed here: {error}") from None


NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc")


def wait_until(true: Callable[[], bool], limit_s: float, pause_s: float = 0.02) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One `up` or `down` of a cluster at a time; the file goes with its last holder. Raises TestbedError."""
    BASE.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = BASE / f"{name}.lock"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = path.exists() and os.stat(path).st_ino == os.fstat(descriptor).st_ino
        except BlockingIOError:
            mine = False
        if not mine:
            raise TestbedError(f"another `up` or `down` of {name} is at work ({path}); wait for it to end")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
