"""Reads a cluster file: which machine has which role. `ray up` takes the same file; ray is not imported here."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError
from scheduler.unknown_names import nearest
from scheduler.yaml_file import read_yaml

ROLES = ("main_node", "shadow_node", "worker_node")
"""Also the names of Ray's node types and of their custom resources."""

RAY_KEYS = (
    "cluster_name",
    "provider",
    "auth",
    "max_workers",
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "file_mounts",
    "cluster_synced_files",
    "file_mounts_sync_continuously",
    "rsync_exclude",
    "rsync_filter",
    "docker",
    "metadata",
    "no_restart",
    "upscaling_speed",
    "idle_timeout_minutes",
    "available_node_types",
    "head_node_type",
)
"""The keys of Ray's own cluster files (ray/autoscaler/ray-schema.json)."""

PROVIDER_KEYS = ("type", "module", "hosts", "cache_stopped_nodes", "disable_node_updaters", "use_internal_ips")
AUTH_KEYS = ("ssh_user", "ssh_private_key", "ssh_public_key", "ssh_proxy_command", "ssh_proxy_use_node_id")

OWN_SETTINGS = ("slots", "loader", "threads", "device")
"""Settings that a cluster file may give for one machine alone."""


@dataclass(frozen=True, slots=True)
class Host:
    """One machine. A worker has a `number`, in the file's order, and a `group`, both from 0. Other roles have number
    0."""

    role: str
    number: int
    address: str
    group: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`main`, `shadow`, `worker-0`, ..."""
        return f"worker-{self.number}" if self.role == "worker_node" else self.role.removesuffix("_node")


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """The machines of a cluster file and how to reach them. `key` is the ssh key, if the file names one."""

    path: Path
    name: str
    hosts: tuple[Host, ...]
    user: str
    key: Path | None

    @property
    def main(self) -> Host:
        return self.hosts[0]

    def of(self, role: str) -> list[Host]:
        return [host for host in self.hosts if host.role == role]

    def find(self, name: str) -> Host:
        """The host of that name or address. Raises ConfigError."""
        for host in self.hosts:
            if name in (host.name, host.address):
                return host
        known = ", ".join(host.name for host in self.hosts)
        raise ConfigError(f"{name!r} is no host of {self.path}; there are: {known}")


def read_cluster_file(path: Path) -> ClusterFile:
    """Raises ConfigError naming the file, what is wrong in it and what is allowed."""
    if not path.exists():
        raise ConfigError(f"the cluster file {path} is not there; the project's cluster.yaml is an example")
    found = read_yaml(path, f"the cluster file {path}")
    if isinstance(found, dict):
        _check_keys(found, RAY_KEYS, "", path)
        for block, keys in (("provider", PROVIDER_KEYS), ("auth", AUTH_KEYS)):
            if isinstance(found.get(block), dict):
                _check_keys(found[block], keys, f"{block}: ", path)
    return parse_cluster(found, path)


def parse_cluster(found: Any, path: Path) -> ClusterFile:
    """A cluster file from its parsed YAML, or the configuration that Ray makes of it, which has further keys. Raises
    ConfigError."""
    if found is None:
        raise ConfigError(f"the cluster file {path} is empty; the project's cluster.yaml is an example")
    if not isinstance(found, dict):
        raise ConfigError(
            f"the cluster file {path} is a {type(found).__name__}; allowed: blocks such as provider:, as in the "
            "project's cluster.yaml"
        )
    name, provider, auth = (_part(found, key, kind, path) for key, kind in _PARTS)
    hosts = tuple(read_hosts(_part(provider, "hosts", dict, path), str(path)))
    user, key = _part(auth, "ssh_user", str, path), auth.get("ssh_private_key")
    for key_name, text in (("cluster_name", name), ("ssh_user", user)):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text):
            raise ConfigError(
                f"{path}: {key_name} is {text!r}; allowed: letters, digits, _ . - and no . or - at the front"
            )
    if key is not None and not isinstance(key, str):
        raise ConfigError(f"{path}: ssh_private_key is {key!r}; allowed: a path, or nothing for ssh's own keys")
    return ClusterFile(path, name, hosts, user, Path(key).expanduser() if key else None)


def _check_keys(part: dict[Any, Any], keys: tuple[str, ...], where: str, path: Path) -> None:
    """Raises ConfigError for a key that neither Ray nor this project reads."""
    for key in part:
        if key not in keys:
            near = nearest(key, keys) or f"; allowed: {', '.join(keys)}"
            raise ConfigError(f"{path}: {where}{key} is not a key of a cluster file{near}")


_PARTS: tuple[tuple[str, type], ...] = (("cluster_name", str), ("provider", dict), ("auth", dict))


def _part(found: Any, key: str, kind: type, path: Path) -> Any:
    value = found.get(key)
    if value is None:
        raise ConfigError(f"{path}: {key} is missing; the project's cluster.yaml is an example")
    if not isinstance(value, kind) or not value:
        wanted = "text" if kind is str else "a block of settings"
        raise ConfigError(f"{path}: {key} is {value!r}; allowed: {wanted}, as in the project's cluster.yaml")
    return value


def read_hosts(roles: dict[str, Any], where: str) -> Iterator[Host]:
    """The main node, the shadow if there is one, then workers. Raises ConfigError.

    A host is an address, or a mapping with `host` and settings of its own. Workers are a list of hosts or of groups.
    """
    strangers = [role for role in roles if role not in ROLES]
    if strangers:
        raise ConfigError(f"{where}: hosts has the role {strangers[0]!r}; allowed: {', '.join(ROLES)}")
    seats: list[tuple[str, int, int | None, Any]] = [("main_node", 0, None, roles.get("main_node"))]
    if roles.get("shadow_node") is not None:
        seats.append(("shadow_node", 0, None, roles["shadow_node"]))
    seats += _workers(roles.get("worker_node"), where)
    taken: dict[str, str] = {}
    for role, number, group, declared in seats:
        host = _host(role, number, group, declared, where)
        if host.address in taken:
            raise ConfigError(
                f"{where}: {host.address} is both {taken[host.address]} and {host.name}; every node needs a host of "
                "its own, since a worker's memory is for its experts"
            )
        taken[host.address] = host.name
        yield host


def _workers(declared: Any, where: str) -> list[tuple[str, int, int | None, Any]]:
    if not isinstance(declared, list) or not declared or [] in declared:
        raise ConfigError(f"{where}: worker_node is {declared!r}; allowed: a list of at least one host, or of groups")
    groups = [group if isinstance(group, list) else [group] for group in declared]
    grouped = any(isinstance(group, list) for group in declared)
    seats = [(number, entry) for number, group in enumerate(groups) for entry in group]
    return [("worker_node", n, group if grouped else None, entry) for n, (group, entry) in enumerate(seats)]


def _host(role: str, number: int, group: int | None, declared: Any, where: str) -> Host:
    settings = dict(declared) if isinstance(declared, dict) else {"host": declared}
    address = settings.pop("host", None)
    try:
        address = str(ipaddress.IPv4Address(address if isinstance(address, str) else ""))
    except ValueError:
        raise ConfigError(f"{where}: {role} is {address!r}; allowed: an IPv4 address, such as 192.168.1.11") from None
    strangers = [key for key in settings if key not in OWN_SETTINGS]
    if strangers:
        raise ConfigError(
            f"{where}: {address} has the setting {strangers[0]!r}; allowed for one host: {', '.join(OWN_SETTINGS)}"
        )
    own = f"{role.removesuffix('_node')}_device"
    if "device" in settings:  # it comes before that of all hosts of its role
        settings[own] = settings.pop("device")
    Settings(named=lambda name: f"{where}: {'device' if name == own else name} of {address}", **settings)
    return Host(role, number, address, group, settings)
