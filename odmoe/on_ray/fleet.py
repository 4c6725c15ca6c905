"""The workers and the shadow of a main node: their seats, and how each joins the engine, at first, when a host joins,
and after a loss."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from main_node.engine.engine import Engine
from main_node.engine.peers import Connect
from main_node.engine.reconnector import Reconnector
from odmoe.clusters.credentials import credentials
from odmoe.clusters.devices import with_workers_of
from odmoe.clusters.nodes import timed_connect
from odmoe.machines.cluster_file import worker_settings
from odmoe.on_ray.calls import get
from odmoe.on_ray.node_actor import NodeActor
from odmoe.on_ray.seats import NAMESPACE, Seat, hosts_of_launcher, seats_of_role
from odmoe.on_ray.shutdown import end
from odmoe.settings.settings import Settings
from scheduler.emulation.clock import Emulation
from scheduler.errors import LinkError, ODMoEError
from wire.base import Role
from wire.rpc.client import connect

TRIES = 3  # starts of a node whose process dies while the cluster starts
AGAIN_S = 1.0  # one attempt at a lost node's last address, before and during a call to Ray for the new one
LOOK_S = 2.0  # between two looks for new hosts


class Fleet:
    """Adds nodes to `engine` as they join. `settings` have the precision in effect. `store` is its path on every
    host."""

    def __init__(self, engine: Engine, settings: Settings, store: str, emulation: Emulation | None) -> None:
        self.reconnector = Reconnector(self.join, hurried=engine.waiting, wasted_s=engine.peers.wasted_s)
        engine.peers.on_lost = self._on_lost
        self._engine = engine
        self._settings = settings
        self._store = store
        self._timed_connect = timed_connect(emulation, engine)
        self._declared_hosts = hosts_of_launcher() if settings.uses_existing_ray else {}
        self._seats: dict[Role, dict[int, Seat]] = {"worker": {}, "shadow": {}}
        self._actors: dict[Seat, Any] = {}
        self._addresses: dict[Seat, str] = {}
        self._trouble: dict[Seat, str] = {}
        self._lost_at: dict[Seat, float] = {}
        self._lock = threading.Lock()

    # --- where nodes stand --------------------------------------------------------------------------------------

    def find_seats(self) -> list[tuple[Role, int]]:
        """Give every new seat a number, that of the cluster file if it is there. Returns the nodes for these seats.

        Of a shadow in several processes, only the first is a node of the engine's, and comes once all have seats."""
        nodes = ray.nodes()
        settings, known = self._settings, self._seats
        most: dict[Role, float] = {
            "shadow": settings.shadow_processes,
            "worker": settings.workers if settings.workers_given else math.inf,
        }
        roles: tuple[tuple[Role, str], ...] = (("shadow", "shadow_node"), ("worker", "worker_node"))
        fresh: list[tuple[Role, int]] = []
        for kind, role in roles:
            for seat in seats_of_role(nodes, role, self._declared_hosts):
                if seat not in known[kind].values() and len(known[kind]) < most[kind]:
                    number = self._number(kind, seat)
                    if kind == "shadow" and number >= most[kind]:  # a host of the cluster file beyond --shadow-hosts
                        continue
                    known[kind][number] = seat
                    if kind == "worker":
                        fresh.append((kind, number))
                    elif len(known[kind]) == most[kind]:
                        fresh.append((kind, 0))
        return fresh

    def _number(self, kind: Role, seat: Seat) -> int:
        host = self._declared_hosts.get(seat.address)
        if host is not None and host.role == seat.role and seat.place == 0:
            return host.number
        reserved = sum(host.role == seat.role for host in self._declared_hosts.values())
        return max([reserved - 1, *self._seats[kind]], default=-1) + 1

    def watch(self) -> None:
        """Look for new hosts in a thread, until closed."""
        threading.Thread(target=self._watch, name="fleet-watch", daemon=True).start()

    def _watch(self) -> None:
        while not self.reconnector.closing.wait(LOOK_S):
            with contextlib.suppress(RayError):
                for node in self.find_seats():
                    self.reconnector.on_lost(*node)

    def actor(self, kind: Role, number: int) -> Any:
        """The process on a node's seat, created if there is none. A detached one is found by its name.

        Raises LinkError without Ray, or when closed, since nothing would end a process created after that.
        """
        seat = self._seats[kind][number]
        with self._lock:
            if self.reconnector.closing.is_set():
                raise LinkError(f"the main node was closed before {seat.name} was started")
            if seat not in self._actors:
                try:
                    self._actors[seat] = self._make_actor(seat)
                except (RayError, ValueError) as error:
                    raise LinkError(f"Ray does not start {seat.name}: {str(error).splitlines()[0]}") from error
            return self._actors[seat]

    def _make_actor(self, seat: Seat) -> Any:
        lasting = {"lifetime": "detached"} if self._settings.uses_existing_ray else {}
        made = ray.remote(NodeActor).options(
            name=seat.name,
            namespace=NAMESPACE,
            get_if_exists=True,
            num_cpus=0,
            resources=seat.resources,
            max_concurrency=4,
            max_restarts=-1,
            max_task_retries=0,
            **lasting,
        )
        return made.remote(self._settings_of(seat), self._store)

    def _forget(self, seat: Seat) -> None:
        """Forget a process that is gone for good, because its constructor failed or it was killed. The next use creates
        another."""
        with self._lock:
            self._actors.pop(seat, None)

    def _settings_of(self, seat: Seat) -> Settings:
        """The settings, with those of the cluster file for this host alone."""
        settings, hosts = self._settings, self._declared_hosts
        if seat.role == "shadow_node":
            settings = with_workers_of(settings, worker_settings(hosts.values()))
        return settings.replace(**hosts[seat.address].settings) if seat.address in hosts else settings

    def facts(self) -> list[dict[str, Any]]:
        """For every seat: its host, its node's state, the node's own facts, its last error. Hosts of the cluster file
        that have not joined are `missing`."""
        known = {(node.role, node.number): asdict(node) for node in self._engine.peers.nodes()}
        for number in self._seats["shadow"]:  # a divided one is there with all of its parts
            if number and ("shadow", 0) in known:
                known["shadow", number] = {"state": known["shadow", 0]["state"]}
        rows = [
            self._fact(kind, number, seat, known.get((kind, number), {}))
            for kind, seats in self._seats.items()
            for number, seat in sorted(seats.items())
        ]
        taken = {row["address"] for row in rows}
        wanted = ("worker_node", "shadow_node") if self._settings.has_shadow else ("worker_node",)
        absent = [host for host in self._declared_hosts.values() if host.role in wanted and host.address not in taken]
        if self._settings.workers_given:
            absent = [host for host in absent if host.role != "worker_node"]
        parts = self._settings.shadow_hosts
        absent = [host for host in absent if host.role != "shadow_node" or host.number < parts]
        return rows + [
            {"kind": host.role.removesuffix("_node"), "number": None, "address": host.address, "state": "missing"}
            | {"name": Seat(host.role, host.address).name, "detail": "Ray does not run there yet"}
            for host in absent
        ]

    def _fact(self, kind: Role, number: int, seat: Seat, known: dict[str, Any]) -> dict[str, Any]:
        state = known.get("state", "starting")
        lost_s = None if seat not in self._lost_at or state == "ready" else time.monotonic() - self._lost_at[seat]
        return known | {
            "kind": kind,
            "number": number,
            "address": seat.address,
            "name": seat.name,
            "state": state,
            "detail": "" if state == "ready" else self._trouble.get(seat, ""),
            "heartbeat_s": lost_s,
        }

    def _on_lost(self, kind: Role, number: int) -> None:
        self._lost_at[self._seats[kind][number]] = time.monotonic()
        self.reconnector.on_lost(kind, number)

    # --- how they come ------------------------------------------------------------------------------------------

    def begin(self, kind: Role, number: int) -> Any:
        if kind == "shadow" and self._settings.shadow_hosts > 1:
            return self._begin_parts()
        return self.actor(kind, number).start.remote(kind, number)

    def _begin_parts(self) -> Any:
        """All processes of a divided shadow, which load at the same time. Ray passes rooms and addresses on."""
        parts = [self.actor("shadow", number) for number in range(self._settings.shadow_hosts)]
        rooms = [part.room.remote() for part in parts]
        addresses = [part.start_part.remote(number, len(parts), *rooms) for number, part in enumerate(parts)]
        return parts[0].join_parts.remote(*addresses)

    def join(self, kind: Role, number: int, begun: Any = None) -> None:
        """One attempt to join, of at most `launch_s` for the process and for the stream each. Raises ODMoEError."""
        seat = self._seats[kind][number]
        try:
            if begun is not None or not self._join_again(kind, number, seat):
                self._join(kind, number, seat, begun or self.begin(kind, number))
            self._trouble.pop(seat, None)
        except ODMoEError as error:
            self._trouble[seat] = f"{type(error).__name__}: {error}"
            raise

    def _join_again(self, kind: Role, number: int, seat: Seat) -> bool:
        """Try the node's last address: one that was only unreachable is still there, and Ray takes longer to say so."""
        address = self._addresses.get(seat)
        if address is None:
            return False
        try:
            self._add(kind, number, address, AGAIN_S)
        except ODMoEError:
            return False
        return True

    def _join(self, kind: Role, number: int, seat: Seat, begun: Any) -> None:
        name = "the shadow" if kind == "shadow" else f"worker {number}"
        end = time.monotonic() + self._settings.launch_s
        while not ray.wait([begun], timeout=0.1 if seat in self._addresses else 0.5)[0] and time.monotonic() < end:
            if self.reconnector.closing.is_set():
                raise LinkError(f"the main node was closed before {name} was ready")
            if self._join_again(kind, number, seat):  # the whole host was away, and Ray has not noticed yet
                return
        try:
            address = get(begun, max(0.0, end - time.monotonic()), f"{name} ({seat.name})")
        except LinkError as error:
            if isinstance(error.__cause__, ActorDiedError):
                for one in self._seats["shadow"].values() if kind == "shadow" else [seat]:
                    self._forget(one)
            raise
        self._add(kind, number, address)
        self._addresses[seat] = address

    def _add(self, kind: Role, number: int, address: str, reach_s: float = 10.0) -> None:
        secret, identity = credentials(self._settings)
        stream: Connect = partial(connect, address, kind, secret=secret, identity=identity, deadline_s=reach_s)
        to = self._timed_connect(stream)
        if kind == "shadow":
            self._engine.peers.add_shadow(to, self._settings.launch_s)
        else:
            self._engine.peers.add_worker(number, to, self._settings.launch_s)

    def join_first(self, kind: Role, number: int, begun: Any = None) -> None:
        """As `join`, but a process that dies meanwhile is started again."""
        for left in reversed(range(TRIES)):
            try:
                return self.join(kind, number, begun)
            except LinkError:
                if not left or self.reconnector.closing.wait(1.0):
                    raise
                begun = None

    def close(self) -> None:
        """Start no more nodes and end every process. One that does not answer in time is killed."""
        self.reconnector.close()
        with self._lock:
            actors = list(self._actors.values())
        end(actors)
