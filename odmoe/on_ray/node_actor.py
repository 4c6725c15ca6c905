"""A Ray actor with one node, served over gRPC."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import ray

from odmoe.clusters.credentials import credentials
from odmoe.clusters.process import prefer_as_victim, prepare_libraries, prepare_process
from odmoe.on_ray.seats import seats_of_role
from odmoe.settings.settings import Settings
from odmoe.stores import open_verified
from scheduler.errors import LaunchError
from wire.base import Node, Role

if TYPE_CHECKING:
    pass


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
        if self._server is not None:
            self._server.close()
        if self._node is not None:
            self._node.close()


def workers_here(settings: Settings) -> int:
    """The workers that share this machine's memory: all of a local cluster, else as many as this host has seats for."""
    if not settings.uses_existing_ray:
        return settings.workers
    return max(1, sum(seat.address == own_host(settings) for seat in seats_of_role(ray.nodes(), "worker_node")))


def own_host(settings: Settings) -> str:
    """The address of this node's server: loopback for `local`, else this host's address in the cluster."""
    return str(ray.util.get_node_ip_address()) if settings.uses_existing_ray else settings.host
