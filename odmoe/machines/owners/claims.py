"""The claims of a cluster on its hosts: a host belongs to one cluster at a time, and says to which."""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import shlex
import socket
from pathlib import Path
from typing import Any

from odmoe.machines.cluster_file import ClusterFile, Host
from odmoe.machines.owners.ownership import describe_owner, occupied_fault, other_owner
from odmoe.machines.preflight import ask
from odmoe.machines.ssh import Ssh
from scheduler.errors import ConfigError, HostError
from scheduler.yaml_file import read_yaml

CLAIM_S = 20.0
OWNER, TOKEN = "~/odmoe/owner.json", "~/odmoe/keys/ray_token"
RAY_PORT = 6379


class Claims:
    """Of one cluster file; `cluster_id` as from `home.cluster_id`."""

    def __init__(self, cluster: ClusterFile, cluster_id: str) -> None:
        self._cluster, self._id = cluster, cluster_id

    def make(self, ssh: Ssh, store: str, take_over: bool) -> tuple[dict[str, Any], dict[str, HostError]]:
        """Claim all hosts, or none. `store`: the name of the one that their nodes will use.

        Returns the former claims of other clusters, and the failures, by address. With `take_over` a host is claimed
        although another cluster holds it.
        """
        found = ssh.each(self._cluster.hosts, lambda host: self._claim(ssh, host, store, take_over))
        failed = {address: error for address, error in found.items() if isinstance(error, HostError)}
        former = {address: owner for address, owner in found.items() if not isinstance(owner, HostError)}
        if failed:
            fresh = [h for h in self._cluster.hosts if h.address in former and former[h.address].get("id") != self._id]
            ssh.each(fresh, lambda host: ask(ssh, host, "release", CLAIM_S, self._given_back(former[host.address])))
        taken = {address: owner for address, owner in former.items() if other_owner({"owner": owner}, self._id)}
        return taken, failed

    def _given_back(self, former: dict[str, Any]) -> dict[str, Any]:
        """For `probe.release`: the claim goes back to its former owner, if that had left one."""
        return {"id": self._id, "former": former if "cluster" in former else {}}

    def settle(self, ssh: Ssh, store: str | None) -> None:
        """Record that this `odmoe up` has ended; with a `store`, that the nodes use it alone. Hosts that do not answer
        are skipped: their claims settle by themselves in a day."""
        stores = {} if store is None else {"stores": [store]}
        ssh.each(self._cluster.hosts, lambda host: ask(ssh, host, "settle", CLAIM_S, {"id": self._id, **stores}))

    def _claim(self, ssh: Ssh, host: Host, store: str, take_over: bool) -> dict[str, Any]:
        """The host's owner before. Raises HostError."""
        wanted = {
            "id": self._id,
            "cluster": self._cluster.name,
            "launcher": launcher(),
            "file": str(self._cluster.path.resolve()),
            "head": f"{self._cluster.main.address}:{_ray_port(self._cluster.path)}",
            "address": host.address,
            "stores": [store],
            "take_over": take_over,
        }
        answer = ask(ssh, host, "claim", CLAIM_S, wanted)
        if answer["claimed"]:
            return dict(answer["owner"])
        raise HostError(f"{host.name} ({host.address}): {'; '.join(occupied_fault(answer['owner']))}")


def launcher() -> str:
    """This user and machine, as `alice@laptop`."""
    user = "?"
    with contextlib.suppress(KeyError, OSError, ImportError):
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


def check_owner_command(cluster_id: str) -> str:
    """A shell command that fails on a host of another cluster, with its claim on standard error."""
    own = shlex.quote(json.dumps({"id": cluster_id})[1:-1])
    token = f'"$(tr -d "[:space:]" < {TOKEN} | sha256sum | cut -c1-16)"'
    return (
        f"if [ -f {OWNER} ] && ! grep -qF {own} {OWNER}; then "
        f'echo "error: this host belongs to another cluster: $(cat {OWNER})" >&2; exit 3; '
        f"elif [ ! -f {OWNER} ] && [ -f {TOKEN} ] && [ {token} != {shlex.quote(cluster_id)} ] "
        f"&& pgrep -x raylet > /dev/null; then "
        'echo "error: another cluster runs on this host, which ray up has started; end it first" >&2; exit 3; fi'
    )


def left_alone(owner: dict[str, Any]) -> str:
    return f"left alone: it belongs to {describe_owner(owner)}"


def _ray_port(file: Path) -> int:
    """The port of Ray's head, from the command that starts it."""
    with contextlib.suppress(ConfigError, AttributeError, TypeError):
        commands = read_yaml(file, str(file)).get("head_start_ray_commands") or []
        found = re.search(r"\bray[ _]start\b.*?--head\b.*?--port[= ](\d+)", " ".join(commands), re.DOTALL)
        return int(found[1]) if found else RAY_PORT
    return RAY_PORT
