"""The processes of a Ray cluster's nodes: signals to them, on whatever host they are, and what they hold."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import ray

from odmoe.chaos.spoil import LINK, may_cut, spoil
from odmoe.chaos.usage import Usage, usage_of
from odmoe.on_ray.calls import CONTROL_S, get
from odmoe.on_ray.cluster import RayCluster
from odmoe.on_ray.seats import MAIN
from scheduler.errors import ODMoEError

TOUCH = 0.001
"""The share of a host's own resource that pins a task to it."""


class NodeProcesses:
    """`here`: all of them are on this machine."""

    def __init__(self, cluster: RayCluster, here: bool) -> None:
        self._cluster, self._here = cluster, here
        self._last: dict[str, tuple[int, str]] = {}
        """Process and host of each node that got a signal: one that is frozen cannot be asked."""

    def rows(self) -> list[dict[str, Any]]:
        """Of workers and shadow. Raises LinkError while the main node is away."""
        return self._cluster.nodes()

    def workers(self) -> list[str]:
        """Empty while the main node is away."""
        try:
            return [name for name in map(_name_of, self.rows()) if name.startswith("worker")]
        except ODMoEError:
            return []

    def missing(self) -> list[str]:
        """Nodes that do not serve just now. A main node that starts again has no rows yet."""
        try:
            rows = self.rows()
        except ODMoEError:
            return [MAIN]
        return [_name_of(row) for row in rows if row["state"] != "ready"] if rows else [MAIN]

    def send(self, name: str, number: signal.Signals, again: bool = False) -> bool:
        try:
            if not again:
                self._last[name] = self._cluster.pid(name), self._host(name)
            pid, host = self._last[name]
            self._on(host, _signal, pid, number)
        except (ODMoEError, ProcessLookupError, KeyError, StopIteration, ValueError):
            return False
        return True

    def can_spoil(self) -> bool:
        """Whether each worker has a host of its own, and no node is on the main node's; and whether these hosts can be
        asked and let their links be changed."""
        if self._here:
            return False
        try:
            rows = self.rows()
            workers = [str(row["address"]) for row in rows if row["kind"] == "worker"]
            hosts = {str(row["address"]) for row in rows}
            apart = 0 < len(workers) == len(set(workers)) and hosts.isdisjoint({"", ray.util.get_node_ip_address()})
            return apart and all(self._on(host, may_cut) for host in hosts)
        except ODMoEError:
            return False

    def spoil(self, name: str, what: str, seconds: float) -> bool:
        target = ray.util.get_node_ip_address() if what == LINK else str(self._cluster.store())
        try:
            self._on(self._host(name), spoil, what, target, seconds)
        except (ODMoEError, StopIteration):
            return False
        return True

    def usage(self) -> dict[str, Usage]:
        """Of every node that is there. Empty while the main node is away."""
        found: dict[str, Usage] = {}
        try:
            names = [MAIN, *map(_name_of, self.rows())]
        except ODMoEError:
            return found
        for name in names:
            with contextlib.suppress(ODMoEError, ValueError, StopIteration):
                one = self._on(self._host(name), usage_of, self._cluster.pid(name))
                if one is not None:
                    found[name] = one
        return found

    def _host(self, name: str) -> str:
        if self._here or name == MAIN:  # whoever asks is on the main node's host
            return ""
        return str(next(row["address"] for row in self.rows() if _name_of(row) == name))

    def _on(self, host: str, call: Any, *args: Any) -> Any:
        """A call on a host; empty: on this one."""
        if not host:
            return call(*args)
        task = ray.remote(call).options(num_cpus=0, max_retries=0, resources={f"node:{host}": TOUCH})
        return get(task.remote(*args), CONTROL_S, host)


def _signal(pid: int, number: signal.Signals) -> None:
    """Ray takes no builtin such as `os.kill` for a task."""
    os.kill(pid, number)


def _name_of(row: dict[str, Any]) -> str:
    return "shadow" if row["kind"] == "shadow" else f"{row['kind']} {row['number']}"
