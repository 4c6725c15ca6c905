"""Reads a cluster file: which machine has which role. `ray up` takes the same file; ray is not imported here."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError
from scheduler.limits import MAX_SHADOW_HOSTS
from scheduler.unknown_names import nearest
from scheduler.yaml_file import MAX_SHOWN, key_line, key_text, read_yaml

ROLES = ("main_node", "shadow_node", "worker_node")
"""Also the names of Ray's node types and of their custom resources."""

PROVIDER = {"type": "external", "module": "odmoe.on_ray.provider.OnPremises"}
"""The only values of these keys: another provider of Ray would not read `hosts`."""

OBEYED: dict[str, type | tuple[type, ...]] = {
    "cluster_name": str,
    "provider": dict,
    "provider.type": str,
    "provider.module": str,
    "provider.hosts": dict,
    "provider.replicas": int,
    "auth": dict,
    "auth.ssh_user": str,
    "auth.ssh_private_key": str,
    "initialization_commands": list,
    "setup_commands": list,
    "head_setup_commands": list,
    "worker_setup_commands": list,
    "head_start_ray_commands": list,
    "worker_start_ray_commands": list,
    "file_mounts": dict,
    "file_mounts_sync_continuously": bool,
    "cluster_synced_files": list,
    "rsync_exclude": list,
    "rsync_filter": list,
    "metadata": dict,
    "max_workers": int,
    "upscaling_speed": (int, float),
    "idle_timeout_minutes": (int, float),
}
"""Keys that do what they say, here or in Ray's launcher, with the kinds of their values."""

_HOSTS = "what each host is, provider.hosts says"
_SSH = "commands and copies would not take it; Host and ProxyJump in ~/.ssh/config hold for ssh, rsync and Ray alike"
REFUSED = {
    "docker": "nodes run on the hosts themselves, in no container",
    "no_restart": "it is an option of ray up (--no-restart)",
    "available_node_types": _HOSTS,
    "head_node_type": _HOSTS,
    "auth.ssh_public_key": "no host is sent a key; ssh-copy-id sends it",
    "auth.ssh_proxy_command": _SSH,
    "auth.ssh_proxy_use_node_id": _SSH,
    "provider.head_ip": _HOSTS,
    "provider.worker_ips": _HOSTS,
    "provider.use_internal_ips": "a host has the one address that provider.hosts gives it",
    "provider.cache_stopped_nodes": "hosts are neither made nor removed",
    "provider.disable_node_updaters": "without them nothing would be started on the hosts",
}
"""Keys of Ray's own cluster files (ray/autoscaler/ray-schema.json) that would have no effect on these hosts, or stop
them, and why. Those of other providers are refused, too."""

OWN_SETTINGS = ("slots", "loader", "threads", "device")
"""Settings that a cluster file may give for one machine alone."""


@dataclass(frozen=True, slots=True)
class Host:
    """One machine. A worker has a `number`, in the file's order, and a `group`, both from 0. A part of the shadow has a
    number, too; the main node's is 0."""

    role: str
    number: int
    address: str
    group: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`main`, `shadow`, `shadow-1`, ..., `worker-0`, ..."""
        role = self.role.removesuffix("_node")
        return f"{role}-{self.number}" if role == "worker" or self.number else role


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """The machines of a cluster file and how to reach them. `key` is the ssh key, if the file names one. `replicas` of
    the workers have each expert on their disks; None: all."""

    path: Path
    name: str
    hosts: tuple[Host, ...]
    user: str
    key: Path | None
    replicas: int | None = None

    @property
    def main(self) -> Host:
        return self.hosts[0]

    def hosts_of(self, role: str) -> list[Host]:
        return [host for host in self.hosts if host.role == role]

    def find(self, name: str) -> Host:
        """The host of that name or address. Raises ConfigError."""
        for host in self.hosts:
            if name in (host.name, host.address):
                return host
        known = ", ".join(host.name for host in self.hosts)
        raise ConfigError(f"{name!r} is no host of {self.path}; there are: {known}")


def worker_settings(hosts: Iterable[Host]) -> list[dict[str, Any]]:
    """The settings of each host of a worker."""
    return [host.settings for host in hosts if host.role == "worker_node"]


def read_cluster_file(path: Path) -> ClusterFile:
    """Raises ConfigError naming the file, what is wrong in it and what is allowed."""
    if not path.exists():
        raise ConfigError(f"the cluster file {path} is not there; the project's cluster.yaml is an example")
    found = read_yaml(path, f"the cluster file {path}")
    if isinstance(found, dict):
        _check_keys(found, "", path)
    cluster = parse_cluster(found, path)
    least = len(cluster.hosts) - 1
    if (least if (most := found.get("max_workers")) is None else most) < least:
        raise ConfigError(
            f"{_place(path, 'max_workers')}: max_workers is {found['max_workers']}; allowed: {least} or more, since "
            f"there are {least} hosts beside the main node"
        )
    return cluster


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
    replicas, workers = provider.get("replicas"), sum(host.role == "worker_node" for host in hosts)
    if replicas is not None and not (isinstance(replicas, int) and 1 <= replicas <= workers):
        raise ConfigError(
            f"{_place(path, 'provider', 'replicas')}: replicas is {replicas}; allowed: 1 to {workers}, the number of "
            "workers, or nothing for all experts on each"
        )
    return ClusterFile(path, name, hosts, user, Path(key).expanduser() if key else None, replicas)


def _check_keys(part: dict[Any, Any], where: str, path: Path) -> None:
    """Raises ConfigError for a key without effect, and for a value of another kind. `where`: the block's name and a
    full stop, or nothing."""
    known = [name.removeprefix(where) for name in OBEYED if name.startswith(where)]
    known = [name for name in known if "." not in name]
    for key, value in part.items():
        name = f"{where}{key}"
        about = f"{_place(path, *where.split('.')[:-1], str(key))}: {where.replace('.', ': ')}{key_text(key)}"
        if name in REFUSED and value not in (None, {}, [], ""):
            raise ConfigError(f"{about} has no effect here: {REFUSED[name]}; remove it")
        if name in REFUSED or name == "provider.hosts":
            continue
        if key not in known:
            near = (nearest(key, known) if len(str(key)) <= MAX_SHOWN else "") or f"; allowed: {', '.join(known)}"
            raise ConfigError(f"{about} is not a key of a cluster file{near}")
        _check_value(value, name, about)
        if name in ("provider", "auth") and isinstance(value, dict):
            _check_keys(value, f"{name}.", path)


def _check_value(value: Any, name: str, about: str) -> None:
    """Raises ConfigError. What must be there is checked later."""
    key = name.rpartition(".")[2]
    if value is not None and key in PROVIDER and name.startswith("provider.") and value != PROVIDER[key]:
        raise ConfigError(f"{about} is {key_text(repr(value))}; allowed: {PROVIDER[key]}")
    if value is None or name in ("cluster_name", "provider", "auth", "auth.ssh_user", "auth.ssh_private_key"):
        return
    kinds = OBEYED[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        allowed = "a number" if int in (kinds if isinstance(kinds, tuple) else (kinds,)) else _WORDS[kinds]
        raise ConfigError(f"{about} is {key_text(repr(value))}; allowed: {allowed}")
    if isinstance(value, list) and not all(isinstance(one, str) for one in value):
        raise ConfigError(
            f"{about} has {key_text(repr(next(one for one in value if not isinstance(one, str))))}; "
            "allowed: a list of texts; quotes make one of it"
        )


_WORDS: dict[Any, str] = {str: "text", dict: "a block of settings", list: "a list of texts", bool: "true or false"}


def _place(path: Path, *keys: str) -> str:
    line = key_line(path, *keys)
    return f"{path}, line {line}" if line else str(path)


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

    A host is an address, or a mapping with `host` and settings of its own. The shadow may be a list of hosts that share
    its layers. Workers are a list of hosts or of groups.
    """
    unknown_roles = [role for role in roles if role not in ROLES]
    if unknown_roles:
        raise ConfigError(f"{where}: hosts has the role {unknown_roles[0]!r}; allowed: {', '.join(ROLES)}")
    seats: list[tuple[str, int, int | None, Any]] = [("main_node", 0, None, roles.get("main_node"))]
    shadow = roles.get("shadow_node")
    if isinstance(shadow, list) and not 1 <= len(shadow) <= MAX_SHADOW_HOSTS:
        raise ConfigError(f"{where}: shadow_node has {len(shadow)} hosts; allowed: 1 to {MAX_SHADOW_HOSTS}, or no list")
    if shadow is not None:
        parts = shadow if isinstance(shadow, list) else [shadow]
        seats += [("shadow_node", number, None, part) for number, part in enumerate(parts)]
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
    unknown_settings = [key for key in settings if key not in OWN_SETTINGS]
    if unknown_settings:
        raise ConfigError(
            f"{where}: {address} has the setting {unknown_settings[0]!r}; allowed for one host: "
            f"{', '.join(OWN_SETTINGS)}"
        )
    own = f"{role.removesuffix('_node')}_device"
    if "device" in settings:  # it comes before that of all hosts of its role
        settings[own] = settings.pop("device")
    Settings(named=lambda name: f"{where}: {'device' if name == own else name} of {address}", **settings)
    return Host(role, number, address, group, settings)
