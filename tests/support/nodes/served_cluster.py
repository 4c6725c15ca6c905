"""Real nodes that are served over gRPC in this process, each behind a link that can be taken away."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from typing import Any

import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.store import ExpertStore
from main_node.drafting import DraftSource
from main_node.engine.engine import Engine, Waits
from main_node.engine.reconnector import keep_connected
from main_node.node import MainNode
from main_node.shape import model_shape
from main_node.sources import Computing, PredictionSources
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from shadow_node.model import ShadowModel
from shadow_node.node import Shadow
from support.nodes.engine_world import WAIT_S
from wire import messages as w
from wire.base import Node, Role
from wire.rpc.client import connect
from wire.rpc.server import GrpcServer
from worker_node.form_choice import FormChoice
from worker_node.loaders.memory import MemoryLoader
from worker_node.node import Worker

FIRST_S, REACH_S = 20.0, 1.0
"""Longest waits to reach a node: when the cluster is made, and in each attempt to bring a lost one back."""


class Link:
    """Forwards TCP connections to `address`, in both directions, except while it is away: then nothing passes, as where
    a cable is pulled, and new connections come to nothing."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._to = host, int(port)
        self._here = threading.Event()
        self._here.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def away(self) -> None:
        self._here.clear()

    def back(self) -> None:
        self._here.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        self._sockets.append(near)
        if not self._here.is_set():
            self._here.wait()
            near.close()
            return
        with contextlib.suppress(OSError):
            far = socket.create_connection(self._to)
            self._sockets.append(far)
            threading.Thread(target=self._pump, args=(near, far), daemon=True).start()
            self._pump(far, near)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._here.wait()
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()
        self._here.set()
        for one in self._sockets:
            one.close()


class ServedCluster:
    """A main node, `workers` workers and, with a `shadow` model, a shadow; lost ones are brought back."""

    def __init__(
        self,
        store: ExpertStore,
        workers: int = 3,
        shadow: ShadowModel | None = None,
        worker_wait_s: float = WAIT_S,
        device: str = "cpu",
        drafts: DraftSource | None = None,
    ) -> None:
        """`device`, `drafts`: of the main node."""
        manifest = store.manifest
        core = Core(model_shape(store), RoundRobin(2), Alignment(), 4096)
        hello = w.Hello(w.PROTOCOL_VERSION, manifest.model_digest, manifest.dtype, "main")
        self.engine = Engine(core, hello, Waits(worker_s=worker_wait_s))
        self._reconnector = keep_connected(self.engine, WAIT_S)
        arithmetic = ExpertArithmetic(manifest.config, manifest.dtype)
        self._nodes: list[Node] = []
        self.servers: list[GrpcServer] = []
        self.links: list[Link] = []
        self._shadow_model = shadow
        for number in range(workers):
            worker = Worker(f"worker {number}", store, arithmetic, MemoryLoader(store), FormChoice(slots=1))
            self.engine.peers.add_worker(number, self._served(worker, "worker"), WAIT_S)
        if shadow is not None:
            node = Shadow("shadow", shadow, manifest.model_digest, manifest.dtype)
            self.engine.peers.add_shadow(self._served(node, "shadow"), WAIT_S)
        self.main = MainNode(store, self.engine, Computing(torch.float32, device), prediction=PredictionSources(drafts))

    def _served(self, node: Node, kind: Role) -> Any:
        self._nodes.append(node)
        self.servers.append(GrpcServer(node, kind))
        self.links.append(Link(self.servers[-1].address))
        address, first = self.links[-1].address, itertools.chain([FIRST_S], itertools.repeat(REACH_S))
        return lambda handler: connect(address, kind, handler, deadline_s=next(first))

    def cut_streams(self) -> None:
        """Every node gives up its stream, as where the main node has been frozen."""
        for server in self.servers:
            for stream in list(server._live):
                stream.cut()

    def away(self) -> None:
        for link in self.links:
            link.away()

    def back(self) -> None:
        for link in self.links:
            link.back()

    def close(self) -> None:
        self.back()
        self._reconnector.close()
        self.main.close()
        for server in self.servers:
            server.close(0.1)
        for node in self._nodes:
            node.close()
        for link in self.links:
            link.close()
        if self._shadow_model is not None:
            self._shadow_model.on_routed = None  # the model serves other tests
