"""One simulated world: a cluster's nodes as they are, on simulated time, threads, links and disks.

Not covered: torch's inference mode, which is of a thread, is on in all of them, so one that forgets it goes unnoticed.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import wire.runtime
from checkpoint.dense import load_dense
from checkpoint.family import whole_config
from checkpoint.sizes.message_limits import message_limits
from checkpoint.store import ExpertStore
from main_node.engine.engine import Waits
from main_node.engine.reconnector import keep_connected
from main_node.node import MainNode
from odmoe.clusters.configuration import configure
from odmoe.clusters.nodes import make_engine, make_main
from odmoe.settings.settings import Settings
from support.simulated.baton import Baton, Process
from support.simulated.hosts import Disks, Host, Made
from support.simulated.links import connect
from support.simulated.threads import SimulatedRuntime
from wire.base import Channel, Handler

JOIN_S = 3.0
ANSWER_S, SHADOW_S, WORKER_S, PREDICTIONS_S = 2.0, 1.5, 3.0, 2.0
"""The waits of the nodes, shorter than they are set: else most of a world's time is beats."""


@cache
def _dense(path: Any, dtype: torch.dtype) -> Any:
    store = ExpertStore.open(path)
    return load_dense(store.dense, store.manifest.config, dtype, torch.device("cpu"))


@cache
def _config_of(fields: str) -> Any:
    return whole_config(json.loads(fields))


def _config(fields: dict[str, Any]) -> Any:
    """To check one takes as long as a token."""
    return copy.copy(_config_of(json.dumps(fields)))


class World:
    """`made`: the model. `settings`: of the cluster; one worker and slot each as they say."""

    def __init__(self, seed: int, made: Made, settings: Settings, preempt: float = 0.0) -> None:
        self.baton = Baton(seed, preempt)
        self.settings, self.made = settings, made
        self.main_process = Process("main")
        slots = int(settings.slots) if settings.slots_given else 1
        self.workers = [
            Host(self.baton, "worker", n, slots, made, settings.check_loads) for n in range(settings.workers)
        ]
        self.shadow = Host(self.baton, "shadow", 0, 0, made, "none") if settings.has_shadow else None
        self.main: MainNode
        self.reconnector: Any = None

    @property
    def hosts(self) -> list[Host]:
        return [*self.workers, *([self.shadow] if self.shadow else [])]

    def run(self, play: Callable[[World], object]) -> int:
        """Start all nodes and `play`, on a thread of no node. Returns a hash of all that was done and when."""
        with _installed(self.baton):
            self.baton.run(lambda: self._play(play))
        return self.baton.trace

    def _play(self, play: Callable[[World], object]) -> None:
        for host in self.hosts:
            host.start()
        self.in_main("main", self._start)
        play(self)

    def in_main(self, name: str, call: Callable[[], object], within_s: float = 60.0) -> None:
        """Run something on a thread of the main node's process, to its end."""
        task = self.baton.spawn(name, self.main_process, call)
        end = self.baton.now + within_s
        while not task.ended:
            if not self.baton.wait(task.joiners, end - self.baton.now) and self.baton.now >= end:
                raise TimeoutError(f"{name} has not ended within {within_s:g} s")

    def _start(self) -> None:
        configuration = configure(self.settings, self.made.store)
        engine = make_engine(self.settings, self.made.store, configuration)
        self.reconnector = keep_connected(engine, JOIN_S)
        for host in self.workers:
            engine.peers.add_worker(host.number, self._to(host), JOIN_S)
        self.main = make_main(self.settings, self.made.store, engine, None)
        if self.shadow is not None:
            engine.peers.add_shadow(self._to(self.shadow), JOIN_S)

    def _to(self, host: Host) -> Callable[[Handler], Channel]:
        return lambda handler: connect(self.baton, host.address, self.main_process, host.name, handler)

    def close(self) -> None:
        """The main node ends in order."""
        self.reconnector.close()
        self.main.close()


@contextmanager
def _installed(baton: Baton) -> Iterator[None]:
    def parts_of() -> Any:
        return getattr(baton.current.process, "parts", None) if baton.current else None

    def name() -> str:
        return baton.current.process.name if baton.current else "host"

    def dense(path: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
        return copy.deepcopy(_dense(path.parent, dtype))

    with ExitStack() as at_end:
        at_end.enter_context(torch.inference_mode())
        disks = Disks(baton, parts_of)
        at_end.callback(disks.close_all)
        at_end.enter_context(wire.runtime.install(SimulatedRuntime(baton)))
        patches: dict[str, Any] = {
            "worker_node.loaders.disk.os": disks,
            "worker_node.node.load_bandwidth": lambda *_: 2e8,
            "worker_node.node.device_costs": lambda *_: (4e-4, 1e-5),
            "worker_node.session.host_name": name,
            "main_node.node.load_dense": dense,
            "checkpoint.family.whole_config": _config,
            "worker_node.node.message_limits": cache(message_limits),
            "main_node.node.LAST_PREDICTIONS_S": PREDICTIONS_S,
            "odmoe.clusters.nodes.random": SimpleNamespace(Random=lambda _: random.Random(baton.random.random())),
            "odmoe.clusters.nodes.Waits": partial(Waits, answer_s=ANSWER_S, shadow_s=SHADOW_S),
        }
        for what, instead in patches.items():
            at_end.enter_context(mock.patch(what, instead))

        gc.disable()
        at_end.callback(gc.enable)
        logging.disable(logging.CRITICAL)
        at_end.callback(logging.disable, logging.NOTSET)
        yield


@dataclass
class Answered:
    """What a client got."""

    tokens: list[int] = field(default_factory=list)
    report: Any = None
    error: BaseException | None = None
