"""A cluster with all nodes in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Unpack

from checkpoint.expert import ExpertArithmetic
from checkpoint.kernels import linear_of
from checkpoint.store import ExpertStore
from main_node.activity import Activity
from main_node.answer import Answer
from main_node.collect_figures import activity_of, figures_of
from main_node.engine.reconnector import keep_connected
from main_node.figures import Figures
from main_node.sampling import GenerateOptions
from main_node.shadow_start import ShadowStart
from odmoe.clusters.base import Say
from odmoe.clusters.configuration import configure
from odmoe.clusters.device_choice import choice_text, choose_devices
from odmoe.clusters.devices import check_devices
from odmoe.clusters.event_log import make_recorder, recording_of
from odmoe.clusters.host_place import make_host
from odmoe.clusters.nodes import (
    emulation_of,
    make_engine,
    make_main,
    make_shadow,
    make_worker,
    timed_connect,
    with_timing,
)
from odmoe.clusters.process import prepare_libraries
from odmoe.settings.settings import Settings
from odmoe.terminal import count_text
from scheduler.trace import Span
from wire import inprocess
from wire.base import Channel, Handler, Node


class EmbeddedCluster:
    """All nodes in this process: main node, shadow and `settings.workers` workers. Messages are passed in memory.

    The shadow starts after the first token, which needs no predictions.
    """

    def __init__(self, settings: Settings, store: ExpertStore, say: Say = lambda text: None) -> None:
        check_devices(settings)
        prepare_libraries(settings.threads_a_node)
        self._nodes: list[Node] = []
        self._store = store
        self._closed = False
        configuration = configure(settings, store)
        chosen = choose_devices(settings, store)
        where = choice_text(settings, chosen)
        self._settings = settings = chosen
        say(f"loading the main model and {count_text(settings.workers, 'worker')}{where}")
        emulation = self._emulation = emulation_of(settings)
        self._recorder = make_recorder(settings, store, configuration)
        engine = make_engine(settings, store, configuration, emulation, self._recorder)
        self._reconnector = keep_connected(engine, settings.launch_s)
        self._timed_connect = timed_connect(emulation, engine)
        arithmetic = ExpertArithmetic(store.manifest.config, store.manifest.dtype, linear_of(settings.kernel))
        shadow = ShadowStart(self._join_shadow) if settings.has_shadow else None
        try:
            for number in range(settings.workers):
                worker = make_worker(
                    number, settings, store, arithmetic, emulation, configuration.resources, engine.lent
                )
                self._nodes.append(worker)
                engine.peers.add_worker(number, self._timed_connect(_to(worker)), settings.launch_s)
            host = make_host(settings, store, arithmetic, emulation)
            if host is not None:
                node = with_timing(host, emulation)
                self._nodes.append(node)
                engine.peers.add_worker(settings.workers, self._timed_connect(_to(node)), settings.launch_s)
            self.main = make_main(settings, store, engine, shadow)
        except BaseException:
            self._reconnector.close()
            engine.close()
            self._close_nodes()
            raise

    def _join_shadow(self) -> None:
        shadow = make_shadow(self._settings, self._store, self._emulation)
        if self._closed:
            return
        self._nodes.append(shadow)
        self.main.engine.peers.add_shadow(self._timed_connect(_to(shadow)), self._settings.launch_s)

    def generate(self, prompt: list[int], max_new_tokens: int, **how: Unpack[GenerateOptions]) -> Answer:
        return self.main.generate(prompt, max_new_tokens, **how)

    def rejoin(self, within_s: float, given_up: threading.Event) -> None:
        """The main node lives as long as this process."""

    def changes(self, since: int | None) -> tuple[int, list[str]]:
        return self.main.engine.peers.membership.since(since)

    def figures(self) -> Figures:
        return figures_of(self.main)

    def activity(self, since: int | None) -> Activity:
        return activity_of(self.main, since)

    def trace(self) -> list[Span]:
        return self.main.engine.trace()

    def recording(self) -> bytes:
        return recording_of(self._recorder)

    def store(self) -> Path:
        return self._store.path

    def serves(self) -> Settings:
        return self._settings

    def close(self) -> None:
        self._closed = True
        self._reconnector.close()
        self.main.close()
        self._close_nodes()

    def _close_nodes(self) -> None:
        if self._emulation is not None:
            self._emulation.close()
        for node in self._nodes:
            node.close()


def _to(node: Node) -> Callable[[Handler], Channel]:
    return lambda handler: inprocess.connect(node, handler)
