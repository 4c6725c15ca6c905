"""How a cluster was launched: from this machine's record and from the configuration that Ray left on the head."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from odmoe.machines.cluster_file import ClusterFile, Host, parse_cluster
from odmoe.machines.home import token_file
from odmoe.machines.preflight import stop_processes
from odmoe.machines.ssh import Ssh
from odmoe.machines.table import cause
from scheduler.errors import ConfigError, HostError
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


def remember(folder: Path, cluster: ClusterFile) -> None:
    """Record that these hosts run something. `folder` is this machine's directory of the cluster."""
    with contextlib.suppress(OSError):  # without the record only hosts that leave the file are missed
        (folder / RECORD).write_text(json.dumps({host.address: host.role for host in cluster.hosts}))


def forget(folder: Path) -> None:
    """Remove the record: nothing runs any more."""
    with contextlib.suppress(OSError):
        (folder / RECORD).unlink(missing_ok=True)


def end_former(ssh: Ssh, cluster: ClusterFile, folder: Path, say: Callable[[str], None]) -> None:
    """End what runs on hosts that left the cluster file: a former head would keep starting Ray on the others. A host
    that has another cluster's token by now is left alone."""
    present = {host.address for host in cluster.hosts}
    former = [Host(str(role), 0, address) for address, role in _record(folder).items() if address not in present]
    if not former:
        return
    token = token_file(folder).read_text().strip() if token_file(folder).exists() else ""

    def end(host: Host) -> dict[str, Any]:
        theirs = ssh.run(host, "cat ~/odmoe/keys/ray_token 2> /dev/null || true", READ_S).strip()
        return stop_processes(ssh, host) if theirs == token else {"stopped": []}

    for address, found in ssh.each(former, end).items():
        if isinstance(found, HostError):
            say(f"{address} is no longer in {cluster.path}, and may still run something: {cause(found)}")
        elif found["stopped"]:
            say(f"{address} is no longer in {cluster.path}: ended {', '.join(found['stopped'])}")


def _record(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / RECORD).read_text())
        return found if isinstance(found, dict) else {}
    return {}
