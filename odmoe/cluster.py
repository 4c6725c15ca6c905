"""A running cluster, whatever it is made of; and the one that is made of this process alone."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol

from checkpoint.family import parse_dtype
from checkpoint.single import ExpertArithmetic
from checkpoint.store import ExpertStore
from main_node.engine import Engine
from main_node.node import MainNode, ShadowStart, Step, model_shape
from odmoe.process import prepare_libraries
from odmoe.settings import Settings
from scheduler.core import Core
from scheduler.placement import RoundRobin
from wire import inprocess
from wire.base import Channel, Handler, Node
from wire.messages import PROTOCOL_VERSION, Hello
from worker_node.loaders import make_loader
from worker_node.node import Worker

Say = Callable[[str], None]


class Cluster(Protocol):
    """What answers prompts."""

    def generate(self, prompt: list[int], max_new_tokens: int, ignore_eos: bool = False) -> Generator[Step, None, None]:
        """One step a token, the last with the report. Closing the iterator gives the request up."""

    def close(self) -> None:
        """Stop every node that this cluster started, and free what it holds."""


def make_engine(settings: Settings, store: ExpertStore) -> Engine:
    """The scheduler with the OD-MoE choices, and the engine around it."""
    shape = model_shape(store)
    group = settings.group_size or min(shape.top_k, settings.workers)
    core = Core(shape, RoundRobin(group), settings.alignment, settings.mini_batch)
    return Engine(core, Hello(PROTOCOL_VERSION, store.manifest.fingerprint, store.manifest.dtype, "main"))


def make_worker(number: int, settings: Settings, store: ExpertStore, arithmetic: ExpertArithmetic) -> Worker:
    return Worker(f"worker {number}", store, arithmetic, make_loader(settings.loader, store), settings.slots)


def make_shadow(settings: Settings, store: ExpertStore) -> Node:
    """Quantises the whole model: takes as long as reading it."""
    from shadow_node.model import ShadowModel
    from shadow_node.node import Shadow

    manifest = store.manifest
    return Shadow("shadow", ShadowModel(store, settings.shadow), manifest.fingerprint, manifest.dtype)


class EmbeddedCluster:
    """Every node in this process: one main, one shadow, `settings.workers` workers, messages handed over in memory.

    The shadow is made ready after the first token, which needs no predictions.
    """

    def __init__(self, settings: Settings, store: ExpertStore, say: Say = lambda text: None) -> None:
        prepare_libraries(settings.threads_a_node)
        self._nodes: list[Node] = []
        self._settings = settings
        self._store = store
        self._closed = False
        say(f"loading the main model and {settings.workers} worker(s)")
        engine = make_engine(settings, store)
        arithmetic = ExpertArithmetic(store.manifest.config, store.manifest.dtype)
        shadow = None if settings.shadow == "none" else ShadowStart(self._join_shadow)
        try:
            for number in range(settings.workers):
                worker = make_worker(number, settings, store, arithmetic)
                self._nodes.append(worker)
                engine.add_worker(number, _to(worker), settings.launch_s)
            dtype = parse_dtype(store.manifest.dtype)
            self.main = MainNode(store, engine, dtype, shadow, settings.launch_s)
        except BaseException:
            engine.close()
            self._close_nodes()
            raise

    def _join_shadow(self) -> None:
        shadow = make_shadow(self._settings, self._store)
        if self._closed:
            return
        self._nodes.append(shadow)
        self.main.engine.add_shadow(_to(shadow), self._settings.launch_s)

    def generate(self, prompt: list[int], max_new_tokens: int, ignore_eos: bool = False) -> Generator[Step, None, None]:
        yield from self.main.generate(prompt, max_new_tokens, ignore_eos)

    def close(self) -> None:
        self._closed = True
        self.main.close()
        self._close_nodes()

    def _close_nodes(self) -> None:
        for node in self._nodes:
            node.close()


def _to(node: Node) -> Callable[[Handler], Channel]:
    return lambda handler: inprocess.connect(node, handler)
