"""How a cluster was launched: from this machine's record and from the configuration that Ray left on the head."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from odmoe.machines.cluster_file import ClusterFile, Host, parse_cluster, read_cluster_file
from odmoe.machines.home import cluster_id
from odmoe.machines.preflight import stop_processes
from odmoe.machines.ssh import Ssh
from odmoe.machines.table import cause
from scheduler.errors import ConfigError, HostError, LaunchError
from scheduler.yaml_file import parse_yaml, read_yaml

ON_HEAD = "~/ray_bootstrap_config.yaml"
RECORD = "launched.json"
COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")
READ_S = 20.0


def as_launched(ssh: Ssh, cluster: ClusterFile) -> bool:
    """Whether the head was launched with the same hosts, roles, groups, settings and commands."""
    with contextlib.suppress(HostError, ConfigError):
        found = parse_yaml(ssh.run(cluster.main, f"cat {ON_HEAD}", READ_S), ON_HEAD)
        wanted = read_yaml(cluster.path, str(cluster.path))
        return parse_cluster(found, cluster.path).hosts == cluster.hosts and all(
            found.get(name) == wanted.get(name) for name in COMMANDS
        )
    return False


def check_same_file(folder: Path, cluster: ClusterFile) -> None:
    """Raises LaunchError if the cluster of this name runs from another file, which is still there and has other hosts:
    those would be taken for hosts that left this file, and ended."""
    file, _ = _record(folder)
    if file is None or file == cluster.path.resolve() or not file.exists():
        return
    with contextlib.suppress(ConfigError):
        if {host.address for host in read_cluster_file(file).hosts} == {host.address for host in cluster.hosts}:
            return
    raise LaunchError(
        f"the cluster {cluster.name} runs from {file}, which has other hosts than {cluster.path}; give this file a "
        f"cluster_name of its own, or run odmoe down {file} first"
    )


def remember(folder: Path, cluster: ClusterFile, former: dict[str, str]) -> None:
    """Record that these hosts run something, and hosts that left the file if they may do so still: `former`, roles by
    address. `folder` is this machine's directory of the cluster."""
    hosts = former | {host.address: host.role for host in cluster.hosts}
    with contextlib.suppress(OSError):  # without the record only hosts that leave the file are missed
        (folder / RECORD).write_text(json.dumps({"file": str(cluster.path.resolve()), "hosts": hosts}))


def forget(folder: Path) -> None:
    """Remove the record: nothing runs any more."""
    with contextlib.suppress(OSError):
        (folder / RECORD).unlink(missing_ok=True)


def end_former(ssh: Ssh, cluster: ClusterFile, folder: Path, say: Callable[[str], None]) -> dict[str, str]:
    """End what runs on hosts that left the cluster file: a former head would keep starting Ray on the others. A host
    that is another cluster's by now is left alone. Returns the roles by address of those that may still run something.
    """
    present = {host.address for host in cluster.hosts}
    _, hosts = _record(folder)
    former = [Host(role, 0, address) for address, role in hosts.items() if address not in present]
    own, left = cluster_id(folder), {}
    for address, found in ssh.each(former, lambda host: stop_processes(ssh, host, own, release=True)).items():
        if isinstance(found, HostError):
            left[address] = hosts[address]
            say(f"{address} is no longer in {cluster.path}, and may still run something: {cause(found)}")
        elif found.get("left"):
            left[address] = hosts[address]
            say(f"{address} is no longer in {cluster.path}, and still runs {', '.join(found['left'])}")
        elif found.get("stopped"):
            say(f"{address} is no longer in {cluster.path}: ended {', '.join(found['stopped'])}")
    return left


def _record(folder: Path) -> tuple[Path | None, dict[str, str]]:
    """The cluster file that was launched, and roles by address."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / RECORD).read_text())
        return Path(found["file"]), dict(found["hosts"])
    return None, {}
