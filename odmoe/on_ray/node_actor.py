"""A Ray actor with one node, served over gRPC."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import ray

from odmoe.clusters.credentials import credentials
from odmoe.clusters.process import prefer_as_victim, prepare_libraries, prepare_process
from odmoe.on_ray.seats import seats_of_role
from odmoe.settings.settings import Settings
from odmoe.stores import open_verified
from scheduler.errors import LaunchError
from wire.base import Node, Role, Served

REACH_S = 1.0
"""How long a part of a shadow may take to answer: Ray has just said where it is."""


class NodeProcess:
    """Common setup of all our processes."""

    def __init__(self, settings: Settings, store: str) -> None:
        prepare_process(timed=True)
        prepare_libraries(settings.threads_a_node)
        self._settings = settings
        self._store = store

    def pid(self) -> int:
        return os.getpid()


class NodeActor(NodeProcess):
    """A node of one role, served over gRPC after `start`. Ray restarts it when its process dies."""

    def __init__(self, settings: Settings, store: str) -> None:
        super().__init__(settings, store)
        self._server: Any = None
        self._node: Node | None = None
        self._rooms: tuple[int, ...] = ()
        """Of all parts, where this is one of a divided shadow."""
        self._starting = threading.Lock()
        self._stopped = False

    def start(self, role: Role, number: int) -> str:
        """Build the node and serve it. Returns its address, also if it runs already."""
        with self._starting:
            if self._stopped:
                raise LaunchError(f"the {role} was stopped; start the cluster again")
            if self._server is None:
                self._build(role, number)
            return str(self._server.address)

    def room(self) -> int:
        """Bytes of memory for a part of a divided shadow."""
        from odmoe.clusters.devices import shadow_room

        return shadow_room(self._settings)

    def start_part(self, number: int, parts: int, *rooms: int) -> str:
        """Build a part of a divided shadow and serve it, anew where the rooms are others. Returns its address."""
        with self._starting:
            if self._stopped:
                raise LaunchError(f"part {number} of the shadow was stopped; start the cluster again")
            if self._server is not None and self._rooms != rooms[:parts]:
                self._close()
            if self._server is None:
                self._build_part(number, rooms[:parts])
            return str(self._server.address)

    def join_parts(self, *addresses: str) -> str:
        """Of the first part: the others are at these addresses, which follow its own. Returns its own."""
        from wire.rpc.client import connect

        secret, identity = credentials(self._settings)
        node: Any = self._node
        if node is None:
            raise LaunchError("the first part of the shadow was started anew meanwhile; it is tried again")
        node.model.connects = [
            partial(connect, address, "stage", secret=secret, identity=identity, deadline_s=REACH_S)
            for address in addresses[1:]
        ]
        return addresses[0]

    def _build_part(self, number: int, rooms: tuple[int, ...]) -> None:
        from odmoe.clusters.device_choice import choose_devices
        from odmoe.clusters.nodes import make_shadow_part
        from wire.rpc.server import GrpcServer

        prefer_as_victim("shadow")
        secret, identity = credentials(self._settings)
        store = open_verified(self._store)
        chosen = choose_devices(self._settings, store, ["shadow"], beside_workers=False)
        self._node, self._rooms = make_shadow_part(chosen, store, number, rooms), rooms
        host, port = own_host(self._settings), self._settings.node_port
        kind: Served = "stage" if number else "shadow"
        self._server = GrpcServer(self._node, kind, host, port, secret=secret, identity=identity)

    def _build(self, role: Role, number: int) -> None:
        from checkpoint.expert import ExpertArithmetic
        from checkpoint.kernels import linear_of
        from odmoe.clusters.configuration import resources
        from odmoe.clusters.device_choice import choose_devices
        from odmoe.clusters.nodes import emulation_of, make_shadow, make_worker
        from wire.rpc.server import GrpcServer

        prefer_as_victim(role)
        secret, identity = credentials(self._settings)
        store, emulation = open_verified(self._store), emulation_of(self._settings)
        if role == "shadow":
            chosen = choose_devices(self._settings, store, ["shadow"], beside_workers=False)
            self._node = make_shadow(chosen, store, emulation)
        else:
            manifest = store.manifest
            arithmetic = ExpertArithmetic(manifest.config, manifest.dtype, linear_of(self._settings.kernel))
            found = resources(self._settings, store, workers_here(self._settings))
            self._node = make_worker(number, self._settings, store, arithmetic, emulation, found)
        host, port = own_host(self._settings), self._settings.node_port
        self._server = GrpcServer(self._node, role, host, port, secret=secret, identity=identity)

    def stop(self) -> None:
        self._stopped = True
        self._close()

    def _close(self) -> None:
        server, node, self._server, self._node = self._server, self._node, None, None
        if server is not None:
            server.close()
        if node is not None:
            node.close()


def workers_here(settings: Settings) -> int:
    """The workers that share this machine's memory: all of a local cluster, else as many as this host has seats for."""
    if not settings.uses_existing_ray:
        return settings.workers
    return max(1, sum(seat.address == own_host(settings) for seat in seats_of_role(ray.nodes(), "worker_node")))


def own_host(settings: Settings) -> str:
    """The address of this node's server: loopback for `local`, else this host's address in the cluster."""
    return str(ray.util.get_node_ip_address()) if settings.uses_existing_ray else settings.host
