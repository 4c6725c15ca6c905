"""Ray's cluster launcher on machines of one's own: `ray up cluster.yaml` with a role for each host.

Ray's own `local` provider has one node type, so no roles, and its autoscaler starts one worker too few and then forgets
the head. This one extends it by a node type for each role and group, made from `provider.hosts`, and by a `ray down`
that stops every host. Ray calls it an external provider. It is made for the pinned Ray.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from ray.autoscaler._private.command_runner import SSHCommandRunner
from ray.autoscaler._private.local.node_provider import LocalNodeProvider
from ray.autoscaler.command_runner import CommandRunnerInterface
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from odmoe.machines.cluster_file import Host, parse_cluster, read_hosts
from odmoe.machines.home import cluster_dir, cluster_id, write_token
from odmoe.machines.owners.claims import check_owner_command
from odmoe.machines.ship import code_archive
from scheduler.errors import ConfigError, ODMoEError

HEAD_KEY = "~/ray_bootstrap_key.pem"  # where Ray puts the ssh key on the head
CODE = "~/odmoe/code.tar.gz"
TOKEN = "~/odmoe/keys/ray_token"
ENVIRONMENT = "~/odmoe/code/env.sh"
REACHED = "uptime"
"""By this command Ray finds out whether it can reach a host. It repeats one that fails for minutes."""
STOP_S = 30
LOOKS = 2
MISSED_S = 60.0
HEAD = "main_node"
DEFAULTS: dict[str, Any] = {
    "upscaling_speed": 100,
    "idle_timeout_minutes": 5,
    "docker": {},
    "initialization_commands": [],
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
}


class OnPremises(LocalNodeProvider):
    """`provider_config` is the `provider` block of a cluster file. A node's id is its address."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        types = _types(provider_config)
        addresses = [address for node_type in types.values() for address in node_type["node_config"]["hosts"]]
        provider_config = {**provider_config, "head_ip": addresses[0], "worker_ips": addresses[1:]}
        super().__init__(provider_config, cluster_name)
        self._looked = threading.Condition()
        self._looks = 0
        self._ended: dict[str, int] = {}
        if provider_config.get("on_head"):
            logging.getLogger("ray.autoscaler._private.util").setLevel(logging.ERROR)  # the same lines every 5 s
            self._record_head(addresses[0])
        else:
            code_archive(cluster_dir(cluster_name) / "code.tar.gz")

    def _record_head(self, address: str) -> None:
        """Record the head, which only the launcher has seen; the autoscaler would take it for lost."""
        tags = {
            TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
            TAG_RAY_USER_NODE_TYPE: HEAD,
            TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
            TAG_RAY_NODE_NAME: f"ray-{self.cluster_name}-head",
        }
        self.state.put(address, {"tags": tags, "state": "running"})

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        """Start up to `count` hosts of the type in `tags`."""
        for address in node_config["hosts"]:
            if count > 0 and self.state.get().get(address, {}).get("state", "terminated") == "terminated":
                self._wait_until_missed(address)
                self.state.put(address, {"state": "running", "tags": dict(tags)})
                count -= 1

    def _wait_until_missed(self, address: str) -> None:
        """Wait until the autoscaler has seen that a node has ended. If the node returned earlier, it would count as
        terminating for ever, since its id is the same."""
        with self._looked:
            self._looked.wait_for(lambda: self._looks >= self._ended.get(address, -LOOKS) + LOOKS, MISSED_S)

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        found = list(super().non_terminated_nodes(tag_filters))
        with self._looked:
            self._looks += not tag_filters
            self._looked.notify_all()
        return found

    def terminate_node(self, node_id: str) -> None:
        self.terminate_nodes([node_id])

    def terminate_nodes(self, node_ids: list[str]) -> None:
        """Stop Ray on these hosts, all at once. One that does not answer in time is skipped."""
        with ThreadPoolExecutor(len(node_ids) or 1) as pool:
            list(pool.map(self._stop, node_ids))
        for node_id in node_ids:
            super().terminate_node(node_id)
            with self._looked:
                self._ended[node_id] = self._looks

    def _stop(self, address: str) -> None:
        ssh = self.provider_config["ssh"]
        command = [
            "ssh",
            "-i",
            os.path.expanduser(ssh["key"]) if ssh["key"] else "none",
            "-o",
            "BatchMode=yes",
            "-o",
            "ConnectTimeout=5",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
            "-o",
            "LogLevel=ERROR",
            "-o",
            "ServerAliveInterval=5",
            "-o",
            "ServerAliveCountMax=2",
            f"{ssh['user']}@{address}",
            f". {ENVIRONMENT} && {self.check_owner()} && stop_cluster",
        ]
        try:
            subprocess.run(command, timeout=STOP_S, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        except subprocess.TimeoutExpired:
            return

    def check_owner(self) -> str:
        """A shell command that fails on a host of another cluster."""
        keys = (
            Path(TOKEN).expanduser().parent if self.provider_config.get("on_head") else cluster_dir(self.cluster_name)
        )
        return check_owner_command(cluster_id(keys) or "")

    def get_command_runner(
        self,
        log_prefix: str,
        node_id: str,
        auth_config: dict[str, Any],
        cluster_name: str,
        process_runner: ModuleType,
        use_internal_ip: bool,
        docker_config: dict[str, Any] | None = None,
    ) -> CommandRunnerInterface:
        return _Runner(log_prefix, node_id, self, auth_config, cluster_name, process_runner, use_internal_ip)

    def prepare_for_head_node(self, cluster_config: dict[str, Any]) -> dict[str, Any]:
        """The configuration for the head's autoscaler."""
        provider = cluster_config["provider"]
        ssh = {**provider["ssh"], "key": HEAD_KEY if provider["ssh"]["key"] else None}
        # The setup commands of each node type already begin with these.
        return {**cluster_config, "provider": {**provider, "ssh": ssh, "on_head": True}, "setup_commands": []}

    @staticmethod
    def fillout_available_node_types_resources(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Complete a cluster file's configuration. Ray calls this before it checks the result."""
        try:
            return complete(cluster_config)
        except ODMoEError as error:  # an exception would become a warning, and another error later
            raise SystemExit(f"{type(error).__name__}: {error}") from error

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return cluster_config


class _Runner(SSHCommandRunner):
    """Runs every command in our environment, those of `ray exec` and `ray attach` included, and none but `REACHED` on a
    host of another cluster."""

    def run(self, cmd: str | None = None, *args: Any, **kwargs: Any) -> str:
        if cmd:
            first = "" if cmd == REACHED else f"{self.provider.check_owner()}; "
            cmd = f"{first}if [ -f {ENVIRONMENT} ]; then . {ENVIRONMENT}; fi; {cmd}"
        return str(super().run(cmd, *args, **kwargs))

    def run_rsync_up(self, source: str, target: str, options: dict[str, Any] | None = None) -> None:
        self.run("true")
        super().run_rsync_up(source, target, options)


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """Add the fields that Ray's launcher requires and a cluster file need not have. Raises ConfigError,
    StoreWriteError."""
    cluster = parse_cluster(config, Path(f"the cluster {config.get('cluster_name')}"))
    types = _types(config["provider"])
    folder = cluster_dir(cluster.name)
    token = write_token(folder)
    ssh = {"user": cluster.user, "key": str(cluster.key) if cluster.key else None}
    filled = {
        **DEFAULTS,
        **{key: value for key, value in config.items() if key not in ("head_node", "worker_nodes")},
        "provider": {**config["provider"], "ssh": ssh},
        "head_node_type": HEAD,
        "available_node_types": types,
        "max_workers": len(cluster.hosts) - 1,
    }
    mounts = {CODE: str(folder / "code.tar.gz"), TOKEN: str(token)}
    return {**filled, "file_mounts": {**mounts, **(config.get("file_mounts") or {})}}


def _types(provider: dict[str, Any]) -> dict[str, Any]:
    """A node type for each role, and for each group of workers."""
    found = parse_hosts(provider)
    members: dict[str, list[Host]] = {}
    for host in found:
        members.setdefault(host.role if host.group is None else f"{host.role}_{host.group}", []).append(host)
    return {name: _type(name, hosts) for name, hosts in members.items()}


def _type(name: str, hosts: list[Host]) -> dict[str, Any]:
    labels = {"role": hosts[0].role} | ({} if hosts[0].group is None else {"group": str(hosts[0].group)})
    count = 0 if name == HEAD else len(hosts)
    return {
        "node_config": {"hosts": [host.address for host in hosts]},
        "resources": {hosts[0].role: 1, "CPU": 0},
        "labels": labels,
        "min_workers": count,
        "max_workers": count,
    }


def parse_hosts(provider: dict[str, Any]) -> list[Host]:
    """Raises ConfigError."""
    hosts = provider.get("hosts")
    if not isinstance(hosts, dict):
        raise ConfigError(f"provider.hosts is {hosts!r}; allowed: addresses by role, as in the project's cluster.yaml")
    return list(read_hosts(hosts, "provider.hosts"))
