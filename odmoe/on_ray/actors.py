"""The processes of a cluster, as Ray actors: each holds a plain node. Ray starts, places and watches them and carries
no embeddings; workers and shadow are served over gRPC."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from main_node.engine import Kind
from main_node.node import Answer, MainNode, Step
from odmoe.on_ray.seats import group_size, hosts_of_launcher
from odmoe.process import prepare_libraries, prepare_process
from odmoe.settings import Settings
from odmoe.stores import open_verified
from odmoe.tls import credentials
from scheduler.errors import LaunchError
from scheduler.trace import Span
from wire.base import Node

if TYPE_CHECKING:
    from odmoe.on_ray.fleet import Fleet

WORKER_S = 60.0  # how long a request waits for a worker where every one is lost
HELD_S = 30.0
"""An answer whose asker has not been heard of for so long is given up: its process is gone."""


class Serving(NamedTuple):
    """What runs: with which settings, from which store (its path on every host), of which model."""

    settings: Settings
    store: str
    fingerprint: str


class _Actor:
    """What every process of ours does first."""

    def __init__(self, settings: Settings, store: str) -> None:
        prepare_process()
        prepare_libraries(settings.threads_a_node)
        self._settings = settings
        self._store = store

    def pid(self) -> int:
        return os.getpid()


class Served(_Actor):
    """A node of one role, served over gRPC once `start` has been called. Ray makes a new one where it has died."""

    def __init__(self, settings: Settings, store: str) -> None:
        super().__init__(settings, store)
        self._server: Any = None
        self._node: Node | None = None
        self._starting = threading.Lock()
        self._stopped = False

    def start(self, role: Kind, number: int) -> str:
        """Build the node and serve it; the address. A node that runs already says its address again."""
        with self._starting:
            if self._stopped:
                raise LaunchError(f"the {role} was stopped; start the cluster again")
            if self._server is None:
                self._build(role, number)
            return str(self._server.address)

    def _build(self, role: Kind, number: int) -> None:
        from checkpoint.single import ExpertArithmetic
        from odmoe.cluster import emulation_of, make_shadow, make_worker
        from wire.grpc_server import GrpcServer

        secret, identity = credentials(self._settings)
        store, emulation = open_verified(self._store), emulation_of(self._settings)
        if role == "shadow":
            self._node = make_shadow(self._settings, store, emulation)
        else:
            manifest = store.manifest
            arithmetic = ExpertArithmetic(manifest.config, manifest.dtype)
            self._node = make_worker(number, self._settings, store, arithmetic, emulation)
        host, port = own_host(self._settings), self._settings.node_port
        self._server = GrpcServer(self._node, role, host, port, secret=secret, identity=identity)

    def stop(self) -> None:
        self._stopped = True
        if self._server is not None:
            self._server.close()
        if self._node is not None:
            self._node.close()


class Main(_Actor):
    """The main node. Its generator's steps stream back to whoever asked."""

    def __init__(self, settings: Settings, store: str) -> None:
        super().__init__(settings, store)
        self._main: MainNode | None = None
        self._fleet: Fleet | None = None
        self._answers: dict[str, Answer] = {}
        self._held: dict[str, float] = {}
        self._cancelled: set[str] = set()
        self._changing = threading.Lock()
        self._starting = threading.Lock()

    def start(self) -> None:
        """Connect to every worker; the shadow joins when it is ready. Does nothing where that was done before."""
        with self._starting:
            if self._main is None:
                self._start()

    def _start(self) -> None:
        from main_node.node import ShadowStart
        from odmoe.cluster import emulation_of, make_engine, make_main
        from odmoe.on_ray.fleet import Fleet

        store, emulation = open_verified(self._store), emulation_of(self._settings)
        size = group_size(hosts_of_launcher().values()) if self._settings.joined else None
        if size and "group_size" not in self._settings.model_fields_set:
            self._settings = self._settings.but(group_size=size)
        engine = make_engine(self._settings, store, emulation)
        fleet = self._fleet = Fleet(engine, self._settings, self._store, emulation)
        seats = fleet.look()
        start = None
        if ("shadow", 0) in seats:  # its process begins now; it is listened to when this one has no models to load
            begun = fleet.begin("shadow", 0)
            if not self._settings.joined:
                start = ShadowStart(partial(fleet.join_first, "shadow", 0, begun))
        workers = [(number, fleet.begin(kind, number)) for kind, number in seats if kind == "worker"]
        main = make_main(self._settings, store, engine, start)
        if start is not None:
            start.begin()
        if self._settings.joined:  # whoever does not come is no failure here: it is asked for until it does
            for kind, number in seats:
                fleet.keeper.lost(kind, number)
            fleet.watch()
        else:
            for number, pending in workers:
                fleet.join_first("worker", number, pending)
        self._main = main
        threading.Thread(target=self._drop_unheld, name="main-held", daemon=True).start()

    def generate(self, key: str, request: dict[str, Any]) -> Iterator[Step]:
        """`request`: the arguments of `MainNode.generate`."""
        if self._main is None:
            raise LaunchError("the main node was asked before it was started")
        self._main.engine.wait_for_worker(WORKER_S)
        answer = self._main.generate(**request)
        with self._changing:
            self._answers[key] = answer
            self._held[key] = time.monotonic()
            if key in self._cancelled:
                answer.cancel()
        try:
            for step in answer:  # noqa: UP028 - Ray asks by `send`, which an answer does not have
                yield step
        finally:
            with self._changing:
                del self._answers[key]
                self._held.pop(key, None)
                self._cancelled.discard(key)
            answer.close()

    def hold(self, keys: list[str]) -> None:
        """The answers to `keys` are still wanted."""
        with self._changing:
            self._held |= {key: time.monotonic() for key in keys if key in self._answers}

    def _drop_unheld(self) -> None:
        while self._fleet is not None and not self._fleet.keeper.closing.wait(HELD_S / 6):
            with self._changing:
                late = [key for key, when in self._held.items() if time.monotonic() - when > HELD_S]
                answers = [self._answers[key] for key in late if key in self._answers]
            for answer in answers:
                answer.cancel()

    def cancel(self, key: str) -> None:
        """The answer to `key` is no longer wanted, be it under way or yet to begin."""
        with self._changing:
            answer = self._answers.get(key)
            if answer is None:
                self._cancelled.add(key)
        if answer is not None:
            answer.cancel()

    def trace(self) -> list[Span]:
        return self._main.engine.trace() if self._main is not None else []

    def serving(self) -> Serving:
        return Serving(self._settings, self._store, open_verified(self._store).manifest.fingerprint)

    def nodes(self) -> list[dict[str, Any]]:
        """Every worker and the shadow; empty before `start` is done."""
        return self._fleet.facts() if self._fleet is not None and self._main is not None else []

    def stop(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
        if self._main is not None:
            self._main.close()


def own_host(settings: Settings) -> str:
    """Where this node's server listens: loopback for `local`, this host's cluster address otherwise."""
    return str(ray.util.get_node_ip_address()) if settings.joined else settings.host
