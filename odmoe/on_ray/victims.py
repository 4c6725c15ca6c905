"""The processes of a Ray cluster's nodes: signals to them, on whatever host they are, and what they hold."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import ray

from odmoe.chaos.spoil import LINK, START_S, STORE, may_cut, spoil
from odmoe.chaos.usage import Usage, usage_of
from odmoe.on_ray.calls import CONTROL_S, get
from odmoe.on_ray.cluster import RayCluster
from odmoe.on_ray.seats import MAIN
from scheduler.errors import LaunchError, ODMoEError

NOT_NOW = (ODMoEError, OSError, subprocess.SubprocessError, StopIteration, ValueError)
"""What a call to a node that is away raises, or to its host."""
HANDS_S = 180.0
"""The longest wait for a process of ours on each host, which start at the same time."""
TOUCH = 0.001
"""The share of a host's own resource that pins a task to it."""


class NodeProcesses:
    """`here`: all of them are on this machine."""

    def __init__(self, cluster: RayCluster, here: bool) -> None:
        self._cluster, self._here = cluster, here
        self._hands: dict[str, tuple[Any, float]] = {}
        """By host, and how many seconds its own clock is ahead of this one's."""

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

    def kill(self, names: Sequence[str]) -> list[str]:
        return self._each(names, _kill, self._cluster.pid)

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
            self._start_hands(hosts - {""}, HANDS_S)  # before any fault: a start is too slow meanwhile
            asked = [self._begin(host, may_cut) for host in hosts] if apart else []
            return apart and all(answer() for answer in asked)
        except ODMoEError:
            return False

    def spoil(self, names: Sequence[str], what: str, seconds: float) -> list[str]:
        return self._each(names, partial(spoil, what, seconds), lambda name: self._target(name, what))

    def _target(self, name: str, what: str) -> str:
        if what == LINK:
            return str(ray.util.get_node_ip_address())
        return str(self._cluster.store() if what == STORE else self._cluster.pid(name))

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

    def _each(self, names: Sequence[str], call: Any, target: Callable[[str], Any]) -> list[str]:
        """A call with all targets of a host, on all hosts at the same time. It returns which of them it hit, and this
        whose they are."""
        targets: dict[str, dict[str, Any]] = {}
        begun, hit = {}, []
        for name in names:
            with contextlib.suppress(*NOT_NOW):
                targets.setdefault(self._host(name), {})[name] = target(name)
        for host, own in targets.items():
            with contextlib.suppress(*NOT_NOW):
                begun[host] = self._begin(host, call, list(own.values()))
        for host, end in begun.items():
            with contextlib.suppress(*NOT_NOW):
                found = end()
                hit += [name for name, one in targets[host].items() if one in found]
        return hit

    def _on(self, host: str, call: Any, *args: Any) -> Any:
        return self._begin(host, call, *args)()

    def _begin(self, host: str, call: Any, *args: Any) -> Callable[[], Any]:
        """A call on a host; empty: on this one. What this returns waits for its end. It never ends after that wait: it
        takes at most `START_S`, and is not begun later than so long before."""
        if not host:
            found = call(*args)
            return lambda: found
        self._start_hands([host], CONTROL_S)
        hand, ahead_s = self._hands[host]
        pending = hand.do.remote(time.monotonic() + ahead_s + CONTROL_S - START_S, call, *args)
        return lambda: get(pending, CONTROL_S, host)

    def _start_hands(self, hosts: Iterable[str], within_s: float) -> None:
        """On those hosts that have none. Raises LaunchError."""
        started = {}
        for host in hosts:
            if host not in self._hands:
                pinned = {"num_cpus": 0, "max_restarts": -1, "resources": {f"node:{host}": TOUCH}}
                hand = ray.remote(_Hand).options(**pinned).remote()
                started[host] = hand, hand.clock.remote()
        for host, (hand, pending) in started.items():
            get(pending, within_s, host)  # it has started, and may have answered long before this wait ended
            self._hands[host] = hand, get(hand.clock.remote(), CONTROL_S, host) - time.monotonic()


class _Hand:
    """A process on a host: a task would have to wait for the start of one each time, half a minute on a busy host."""

    def clock(self) -> float:
        """Of this host's own clock, which is not that of other hosts."""
        return time.monotonic()

    def do(self, begin_by: float, call: Callable[..., Any], *args: Any) -> Any:
        """Nothing if it is too late, as after a link that was cut: nobody counts it any more."""
        if time.monotonic() > begin_by:
            raise LaunchError("a call came too late to this host")
        return call(*args)


def _kill(pids: Sequence[int]) -> list[int]:
    """Returns who was there."""
    killed = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


def _name_of(row: dict[str, Any]) -> str:
    first_shadow = row["kind"] == "shadow" and not row["number"]
    return "shadow" if first_shadow else f"{row['kind']} {row['number']}"
