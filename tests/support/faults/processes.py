"""Workers and shadows in processes of their own, served over gRPC, which can be killed, frozen and made faulty.

They are forked from a process that has imported what they need, so that one is there within a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from checkpoint.expert import ExpertArithmetic
from checkpoint.store import ExpertStore
from odmoe.clusters import nodes
from odmoe.clusters.configuration import resources
from odmoe.clusters.credentials import credentials
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.settings import Settings
from support.faults.outputs import LyingWorker
from support.faults.parts import FaultyArithmetic, FaultyLoader
from support.faults.shadows import RogueShadow
from wire.base import Role
from wire.rpc.server import GrpcServer

START_S = 60.0
"""Longest wait for a process."""
_TIME = time.time

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["odmoe.clusters.nodes", "shadow_node.node", "wire.rpc.server", "transformers.models.mixtral.modeling_mixtral"]
)


class ForkedProcess:
    """A process that runs `target(pipe, *args)` and ends with this one."""

    def __init__(self, target: Any, *args: Any) -> None:
        self._target, self._args = target, args
        self.start()

    def start(self) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=self._target, args=(theirs, *self._args), daemon=True)
        process.start()
        self.process = process  # now that it has a number: a signal to 0 would end whoever runs this
        theirs.close()

    def hear(self) -> Any:
        """What the process sends next. Raises TimeoutError, EOFError."""
        if not self.pipe.poll(START_S):
            raise TimeoutError(f"{self._target.__name__} has sent nothing for {START_S:g} s")
        return self.pipe.recv()

    @property
    def pid(self) -> int:
        assert self.process.pid
        return int(self.process.pid)

    def kill(self) -> None:
        """As the kernel does when memory runs out."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self.process.join(START_S)
        self.pipe.close()


class Supervisor:
    """Starts nodes again as soon as they end, each with the same fault. `flap_s`: it also kills each one, whatever it
    does, so long after its start."""

    def __init__(
        self, nodes: list[NodeProcess], what: str = "", value: Any = None, flap_s: float | None = None
    ) -> None:
        self.deaths = 0
        self._nodes = nodes
        self._over = threading.Event()
        self._fault, self._flap_s = (what, value), flap_s
        self._threads = [threading.Thread(target=self._watch, args=(node,), daemon=True) for node in nodes]
        for node in nodes if what else ():
            node.set(what, value)
        for thread in self._threads:
            thread.start()

    def _watch(self, node: NodeProcess) -> None:
        while not self._over.wait(0.05 if self._flap_s is None else self._flap_s):
            if self._flap_s is not None:
                node.kill()
            node.process.join(0 if self._flap_s is None else START_S)
            if not node.process.is_alive():
                self.deaths += 1
                with contextlib.suppress(EOFError, OSError):  # it has died again before it said what it was to say
                    node.restart()
                    if self._fault[0]:
                        node.set(*self._fault)

    def close(self) -> None:
        """All nodes run again afterwards, without the fault."""
        self._over.set()
        for thread in self._threads:
            thread.join(START_S)
        for node in self._nodes:
            node.kill()
            node.process.join(START_S)
            node.restart()


class NodeProcess(ForkedProcess):
    """A worker or the shadow. It keeps its address when it is started again."""

    def __init__(self, role: Role, number: int, settings: Settings, store: Path) -> None:
        self._address = ""
        super().__init__(_serve, role, number, settings, store)

    @property
    def address(self) -> str:
        """Where it is served. Waits until it is."""
        if not self._address:
            self._address = str(self.hear())
            self._args = (*self._args[:4], int(self._address.rpartition(":")[2]))
        return self._address

    def wait(self) -> None:
        """Until it is served."""
        self.address  # noqa: B018

    def restart(self, wait: bool = True) -> None:
        """A new process at the same address. `wait`: until it is served."""
        if len(self._args) == 4:  # its port is not known yet
            self.wait()
        self.close()
        self._address = ""
        self.start()
        if wait:
            self.wait()

    def set(self, what: str, value: Any) -> None:
        """Set a fault from now on: None for a sound node.

        Of a worker: `lie` (a `Lie`), `load` or `compute` (a fault of `parts`), `slowness` (how many times as long it
        takes); of the shadow: `predictions`; of both: `clock`, seconds by which the wall clock is wrong.
        """
        self.wait()
        self.pipe.send((what, value))
        self.hear()

    def told(self) -> int:
        """Outputs that a lying worker has changed since `set`."""
        self.pipe.send(("told", None))
        return int(self.hear())


def _serve(pipe: Connection, role: Role, number: int, settings: Settings, path: Path, port: int = 0) -> None:
    prepare_process()
    prepare_libraries(settings.threads_a_node)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = ExpertStore.open(path)
    secret, identity = credentials(settings)
    node: Any
    if role == "shadow":
        node = RogueShadow(nodes.make_shadow(settings, store, None), store.manifest.experts)
        parts: list[Any] = []
    else:
        arithmetic: Any = FaultyArithmetic(ExpertArithmetic(store.manifest.config, store.manifest.dtype))
        loader: Any = None

        def make_loader(*args: Any, **named: Any) -> Any:
            nonlocal loader
            loader = FaultyLoader(sound_loader(*args, **named))
            return loader

        sound_loader, nodes.make_loader = nodes.make_loader, make_loader
        found = resources(settings, store, settings.workers)
        worker = nodes.make_worker(number, settings, store, arithmetic, None, found)
        parts = [loader, arithmetic]
        node = LyingWorker(worker, store.manifest.experts)
    server = GrpcServer(node, role, port=port, secret=secret, identity=identity)
    pipe.send(server.address)
    with contextlib.suppress(EOFError, OSError):
        while True:
            what, value = pipe.recv()
            pipe.send(_set(node, parts, what, value))
    os._exit(0)


def _set(node: Any, parts: list[Any], what: str, value: Any) -> int:
    if what == "told":
        return int(node.told)
    if what == "lie":
        node.set(value)
    elif what == "predictions":
        node.fault = value
    elif what == "clock":
        time.time = lambda: _TIME() + (value or 0)
    elif what == "slowness":
        for part in parts:
            part.slowness = value or 1
    else:
        parts[("load", "compute").index(what)].fault = value
    return 0
