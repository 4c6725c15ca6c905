"""A running cluster, whatever it is made of; and the one that is made of this process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, Unpack

from checkpoint import kv
from checkpoint.expert import ExpertArithmetic
from checkpoint.family import config_from_dict, parse_dtype
from checkpoint.store import ExpertStore
from main_node.answer import Answer, Step
from main_node.engine import Connect, Engine
from main_node.node import MainNode
from main_node.pace import MainPace
from main_node.sampling import How
from main_node.shadow_start import ShadowStart
from main_node.shape import model_shape
from odmoe.budget import find_token_predictor, slots_of
from odmoe.places import make_host
from odmoe.process import prepare_libraries
from odmoe.recording import choices_of, record, taken
from odmoe.settings import Settings
from odmoe.text import make_stopper
from scheduler.build import make_core
from scheduler.emulation.clock import Emulation
from scheduler.emulation.expected import Awaited
from scheduler.policies.choices import Choices
from scheduler.policies.registry import forms_of, residency_of
from scheduler.timing.links import MainLinks
from scheduler.timing.profile import find_profile
from scheduler.trace import Span
from shadow_node.pace import ShadowPace
from wire import inprocess
from wire.base import Channel, Handler, Node
from wire.messages import PROTOCOL_VERSION, Hello
from wire.timed import MainWay, TimedChannel, TimedHandler, TimedNode
from worker_node.loaders.make import make_loader
from worker_node.node import Worker

Say = Callable[[str], None]


class Answering(Protocol):
    """An answer on its way: iterate over it for its tokens."""

    def __iter__(self) -> Iterator[Step]: ...

    def __next__(self) -> Step: ...

    def cancel(self) -> None:
        """Give it up, from any thread, in the middle of a pass too. Whoever iterates gets RequestCancelledError."""

    def close(self) -> None:
        """Give it up, from the thread that iterates."""


class Cluster(Protocol):
    """What answers prompts."""

    def generate(self, prompt: list[int], max_new_tokens: int, **how: Unpack[How]) -> Answering:
        """One step a token, the last with the report. Several answers may be open at once, a thread each."""

    def trace(self) -> list[Span]:
        """What every node has done since the last time, where `settings.trace` is set."""

    def recording(self) -> bytes:
        """What the scheduler was told and decided since the nodes started, where `settings.record` is set."""

    def store(self) -> Path:
        """Of the model that is served."""

    def serves(self) -> Settings:
        """With which settings the nodes run."""

    def close(self) -> None:
        """Stop every node that this cluster started, and free what it holds."""


def emulation_of(settings: Settings) -> Emulation | None:
    """The time that --profile keeps, one for all nodes of a process. Raises ConfigError for a profile that is none."""
    if settings.profile is None:
        return None
    return Emulation(find_profile(settings.profile), duplex=settings.prefill == "ahead")


def travelling(node: Node, emulation: Emulation | None) -> Node:
    """The node, whose end of each stream keeps the profile's times."""
    return node if emulation is None else TimedNode(node, emulation)


def travelled(emulation: Emulation | None, engine: Engine) -> Callable[[Connect], Connect]:
    """As `travelling`, for the main node's end of its streams, which all share its link."""
    if emulation is None:
        return lambda to: to
    owed = emulation.agenda.awaited = Awaited(emulation.profile, engine.core.shape.layers[-1])
    way = MainWay(MainLinks(emulation.profile, emulation.duplex), owed)

    def timed(to: Connect) -> Connect:
        return lambda handler: TimedChannel(to(TimedHandler(handler, way, emulation)), way, emulation)

    return timed


def make_engine(settings: Settings, store: ExpertStore, emulation: Emulation | None = None) -> Engine:
    """The scheduler with its choices, and the engine around it. Raises ConfigError where slots do not suffice."""
    if settings.shadowed and settings.align_kv:
        kv.kinds(config_from_dict(store.manifest.config))
    choices = choices_of(settings, model_shape(store))
    _check_slots(settings, store, choices)
    manifest, traced = store.manifest, settings.trace is not None
    hello = Hello(PROTOCOL_VERSION, manifest.fingerprint, manifest.dtype, "main", traced)
    return Engine(make_core(choices), hello, pace=MainPace(emulation) if emulation else None)


def check_fits(settings: Settings, store: ExpertStore) -> None:
    """What no node need be started for to know. Raises ConfigError where slots do not suffice, or a predictor has no
    weights."""
    _check_slots(settings, store, choices_of(settings, model_shape(store)))
    if not settings.joined:
        find_token_predictor(settings, store)


def _check_slots(settings: Settings, store: ExpertStore, choices: Choices) -> None:
    if settings.workers_wanted:
        residency_of(choices).check(choices.shape, settings.workers * slots_of(settings, store))


def make_worker(
    number: int, settings: Settings, store: ExpertStore, arithmetic: ExpertArithmetic, emulation: Emulation | None
) -> Node:
    """Raises LaunchError where the loader's memory does not suffice."""
    name = settings.loader if emulation is None else "emulated"
    slots, forms = slots_of(settings, store), forms_of(settings.precision)
    loader = make_loader(name, store, emulation, settings.loader, forms)
    return travelling(Worker(f"worker {number}", store, arithmetic, loader, slots, forms), emulation)


def make_shadow(settings: Settings, store: ExpertStore, emulation: Emulation | None) -> Node:
    """Quantises the whole model: takes as long as reading it."""
    from shadow_node.model import ShadowModel
    from shadow_node.node import Shadow

    manifest, pace = store.manifest, ShadowPace(emulation) if emulation else None
    shadow = Shadow("shadow", ShadowModel(store, settings.shadow), manifest.fingerprint, manifest.dtype, pace)
    return travelling(shadow, emulation)


def make_main(settings: Settings, store: ExpertStore, engine: Engine, shadow: ShadowStart | None) -> MainNode:
    """Raises ConfigError where --ctx-size is beyond the model."""
    dtype = parse_dtype(store.manifest.dtype)
    stopper = make_stopper(store.dense)
    token_file = find_token_predictor(settings, store)
    return MainNode(store, engine, dtype, shadow, settings.launch_s, stopper, settings.ctx_size, token_file)


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
        emulation = self._emulation = emulation_of(settings)
        engine = make_engine(settings, store, emulation)
        self._travelled = travelled(emulation, engine)
        self._recorder = record(engine, settings, store)
        arithmetic = ExpertArithmetic(store.manifest.config, store.manifest.dtype)
        shadow = ShadowStart(self._join_shadow) if settings.shadowed else None
        try:
            for number in range(settings.workers):
                worker = make_worker(number, settings, store, arithmetic, emulation)
                self._nodes.append(worker)
                engine.add_worker(number, self._travelled(_to(worker)), settings.launch_s)
            host = make_host(settings, store, arithmetic, emulation)
            if host is not None:
                node = travelling(host, emulation)
                self._nodes.append(node)
                engine.add_worker(settings.workers, self._travelled(_to(node)), settings.launch_s)
            self.main = make_main(settings, store, engine, shadow)
        except BaseException:
            engine.close()
            self._close_nodes()
            raise

    def _join_shadow(self) -> None:
        shadow = make_shadow(self._settings, self._store, self._emulation)
        if self._closed:
            return
        self._nodes.append(shadow)
        self.main.engine.add_shadow(self._travelled(_to(shadow)), self._settings.launch_s)

    def generate(self, prompt: list[int], max_new_tokens: int, **how: Unpack[How]) -> Answer:
        return self.main.generate(prompt, max_new_tokens, **how)

    def trace(self) -> list[Span]:
        return self.main.engine.trace()

    def recording(self) -> bytes:
        return taken(self._recorder)

    def store(self) -> Path:
        return self._store.path

    def serves(self) -> Settings:
        return self._settings

    def close(self) -> None:
        self._closed = True
        self.main.close()
        self._close_nodes()

    def _close_nodes(self) -> None:
        if self._emulation is not None:
            self._emulation.close()
        for node in self._nodes:
            node.close()


def _to(node: Node) -> Callable[[Handler], Channel]:
    return lambda handler: inprocess.connect(node, handler)
