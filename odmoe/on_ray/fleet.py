"""The workers and the shadow of a main node: where they stand, and how each comes to the engine, at first, when a host
joins, and whenever one was lost."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from main_node.engine import Connect, Engine, Kind
from main_node.rejoin import Keeper
from odmoe.cluster import travelled
from odmoe.on_ray.actors import Served
from odmoe.on_ray.calls import get
from odmoe.on_ray.seats import NAMESPACE, Seat, hosts_of_launcher, offered
from odmoe.settings import Settings
from odmoe.tls import credentials
from scheduler.emulation import Emulation
from scheduler.errors import LaunchError, LinkError, ODMoEError
from wire.grpc_client import connect

STOP_S = 5.0
TRIES = 3  # how often a node whose process dies while the cluster starts is asked again
AGAIN_S = 2.0  # how long the address that a lost node had is tried, before Ray is asked where it is now
LOOK_S = 2.0  # how often is looked for hosts that have joined


class Fleet:
    """`store`: its path on every host. `engine` is told of every node that comes."""

    def __init__(self, engine: Engine, settings: Settings, store: str, emulation: Emulation | None) -> None:
        self.keeper = Keeper(self.join)
        engine.on_lost = self.keeper.lost
        self._engine = engine
        self._settings = settings
        self._store = store
        self._emulation = emulation
        self._said = hosts_of_launcher() if settings.joined else {}
        self._seats: dict[Kind, list[Seat]] = {"worker": [], "shadow": []}
        self._actors: dict[Seat, Any] = {}
        self._addresses: dict[Seat, str] = {}
        self._trouble: dict[Seat, str] = {}
        self._lock = threading.Lock()

    # --- where nodes stand --------------------------------------------------------------------------------------

    def look(self) -> list[tuple[Kind, int]]:
        """Give every seat that is new a number; the nodes that are to stand there."""
        nodes = ray.nodes()
        settings, known = self._settings, self._seats
        most: dict[Kind, int | None] = {
            "shadow": int(settings.shadow != "none"),
            "worker": settings.workers if settings.workers_wanted else None,
        }
        roles: tuple[tuple[Kind, str], ...] = (("shadow", "shadow_node"), ("worker", "worker_node"))
        fresh: list[tuple[Kind, int]] = []
        for kind, role in roles:
            for seat in offered(nodes, role, self._said):
                if seat not in known[kind] and (most[kind] is None or len(known[kind]) < most[kind]):  # type: ignore[operator]
                    known[kind].append(seat)
                    fresh.append((kind, len(known[kind]) - 1))
        return fresh

    def watch(self) -> None:
        """Look for hosts that join, until closed: a thread."""
        threading.Thread(target=self._watch, name="fleet-watch", daemon=True).start()

    def _watch(self) -> None:
        while not self.keeper.closing.wait(LOOK_S):
            with contextlib.suppress(RayError):
                for node in self.look():
                    self.keeper.lost(*node)

    def actor(self, kind: Kind, number: int) -> Any:
        """The process on a node's seat; made where there is none. A detached one is found again by its name."""
        seat = self._seats[kind][number]
        with self._lock:
            if seat not in self._actors:
                lasting = {"lifetime": "detached"} if self._settings.joined else {}
                made = ray.remote(Served).options(
                    name=seat.name, namespace=NAMESPACE, get_if_exists=True, num_cpus=0, resources=seat.resources,
                    max_concurrency=4, max_restarts=-1, max_task_retries=0, **lasting,
                )  # fmt: skip
                self._actors[seat] = made.remote(self._settings_of(seat), self._store)
            return self._actors[seat]

    def _settings_of(self, seat: Seat) -> Settings:
        """With what the cluster file says of that host alone."""
        host = self._said.get(seat.address)
        return self._settings.but(**host.settings) if host else self._settings

    def facts(self) -> list[dict[str, Any]]:
        """Every seat: its host, whether its node is ready, what went wrong last."""
        ready: dict[Kind, Any] = {"worker": self._engine.workers, "shadow": [0] if self._engine.shadow else []}
        return [
            {
                "kind": kind, "number": number, "address": seat.address, "name": seat.name,
                "state": "ready" if number in ready[kind] else "lost" if seat in self._addresses else "starting",
                "detail": "" if number in ready[kind] else self._trouble.get(seat, ""),
            }
            for kind, seats in self._seats.items()
            for number, seat in enumerate(seats)
        ]  # fmt: skip

    # --- how they come ------------------------------------------------------------------------------------------

    def begin(self, kind: Kind, number: int) -> Any:
        return self.actor(kind, number).start.remote(kind, number)

    def join(self, kind: Kind, number: int, begun: Any = None) -> None:
        """One attempt, of at most `launch_s` for the process and as long for the stream. Raises ODMoEError."""
        seat = self._seats[kind][number]
        try:
            if begun is None and self._join_again(kind, number, seat):
                return
            self._join(kind, number, seat, begun or self.begin(kind, number))
            self._trouble.pop(seat, None)
        except ODMoEError as error:
            self._trouble[seat] = f"{type(error).__name__}: {error}"
            raise

    def _join_again(self, kind: Kind, number: int, seat: Seat) -> bool:
        """A node that was only out of reach, and not gone, answers where it was: Ray would take longer to say so."""
        address = self._addresses.get(seat)
        if address is None:
            return False
        try:
            self._add(kind, number, address, AGAIN_S)
        except ODMoEError:
            return False
        return True

    def _join(self, kind: Kind, number: int, seat: Seat, begun: Any) -> None:
        name = "the shadow" if kind == "shadow" else f"worker {number}"
        end = time.monotonic() + self._settings.launch_s
        while not ray.wait([begun], timeout=0.5)[0] and time.monotonic() < end:
            if self.keeper.closing.is_set():
                raise LinkError(f"the main node was closed before {name} was ready")
        address = get(begun, max(0.0, end - time.monotonic()), f"{name} ({seat.name})")
        self._add(kind, number, address)
        self._addresses[seat] = address

    def _add(self, kind: Kind, number: int, address: str, reach_s: float = 10.0) -> None:
        secret, identity = credentials(self._settings)
        stream: Connect = partial(connect, address, kind, secret=secret, identity=identity, deadline_s=reach_s)
        to = travelled(stream, self._emulation)
        if kind == "shadow":
            self._engine.add_shadow(to, self._settings.launch_s)
        else:
            self._engine.add_worker(number, to, self._settings.launch_s)

    def join_first(self, kind: Kind, number: int, begun: Any = None) -> None:
        """As `join`, but a process that dies on the way is asked again."""
        for left in reversed(range(TRIES)):
            try:
                return self.join(kind, number, begun)
            except LinkError:
                if not left or self.keeper.closing.wait(1.0):
                    raise
                begun = None

    def close(self) -> None:
        """Ask for no node any more, and end every process. Bounded: one that does not answer is killed."""
        self.keeper.close()
        with contextlib.suppress(RayError, LaunchError):
            stops = [actor.stop.remote() for actor in self._actors.values()]
            if stops:
                ray.wait(stops, num_returns=len(stops), timeout=STOP_S)
            for actor in self._actors.values():
                ray.kill(actor, no_restart=True)
