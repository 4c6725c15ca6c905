"""Seats of nodes: one for each unit of a role's resource that a Ray host offers. No ray here."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odmoe.machines.cluster_file import Host, read_hosts
from scheduler.errors import ConfigError
from scheduler.yaml_file import read_yaml

NAMESPACE = "odmoe"
MAIN = "main node"
"""The name of the main node's actor. Others are named after their seats."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One seat; `place` numbers its host's seats of that role, from 0."""

    role: str
    address: str
    place: int = 0

    @property
    def name(self) -> str:
        """Name of the actor on this seat, the same in every run."""
        return f"{self.role} at {self.address}" + (f", place {self.place}" if self.place else "")

    @property
    def resources(self) -> dict[str, float]:
        """Resources that pin an actor to this host: Ray gives every host one of its own."""
        return {self.role: 1, f"node:{self.address}": 0.001}


def seats_of_role(nodes: Iterable[Mapping[str, Any]], role: str, order: Iterable[str] = ()) -> list[Seat]:
    """The seats of a role on the live hosts of `nodes` (as from `ray.nodes()`): first those in `order`, then by
    address."""
    first = {address: rank for rank, address in enumerate(order)}
    counts: dict[str, int] = {}
    for node in nodes:
        if node["Alive"]:
            address = str(node["NodeManagerAddress"])
            counts[address] = counts.get(address, 0) + int(node["Resources"].get(role, 0))
    ranked = sorted(counts, key=lambda address: (first.get(address, len(first)), _numeric(address)))
    return [Seat(role, address, place) for address in ranked for place in range(counts[address])]


def _numeric(address: str) -> tuple[int, str]:
    try:
        return int(ipaddress.ip_address(address)), ""
    except ValueError:
        return 1 << 128, address


def group_size(hosts: Iterable[Host]) -> int | None:
    """The size of the cluster file's groups; None if it has none, or if they differ in size."""
    counts: dict[int | None, int] = {}
    for host in hosts:
        if host.role == "worker_node":
            counts[host.group] = counts.get(host.group, 0) + 1
    sizes = set(counts.values())
    return sizes.pop() if None not in counts and len(sizes) == 1 else None


def hosts_of_launcher(file: Path | None = None) -> dict[str, Host]:
    """The hosts of the cluster file with which this cluster was launched, by address; empty if there was none."""
    try:
        return {host.address: host for host in read_hosts(_provider(file)["hosts"], str(file))}
    except (KeyError, TypeError, ValueError, ConfigError):
        return {}


def replicas_of_launcher(file: Path | None = None) -> int | None:
    """How many workers are to hold each expert, by that file; None if it says nothing."""
    try:
        found = _provider(file).get("replicas")
    except (KeyError, TypeError, ValueError, ConfigError):
        return None
    return found if type(found) is int and found > 0 else None


def _provider(file: Path | None) -> dict[str, Any]:
    """The provider block in the configuration that Ray's launcher leaves on the head. Raises KeyError, TypeError,
    ValueError, ConfigError."""
    file = file or Path.home() / "ray_bootstrap_config.yaml"
    return dict(read_yaml(file, str(file))["provider"])
