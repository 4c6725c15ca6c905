"""Real nodes in one process, with a tap on each stream: what was said is there to be looked at."""

from __future__ import annotations

from typing import Any

import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.store import ExpertStore
from main_node.engine.engine import Engine, Waits
from main_node.node import MainNode
from main_node.report import Report
from main_node.shadow_start import ShadowStart
from main_node.shape import model_shape
from main_node.sources import Computing
from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from shadow_node.model import ShadowModel
from shadow_node.node import Shadow
from support.nodes import remote_stream
from support.nodes.engine_world import WAIT_S, nothing_left
from wire import inprocess
from wire import messages as w
from wire.base import Channel, Handler, Node
from worker_node.form_choice import FormChoice
from worker_node.loaders.memory import MemoryLoader
from worker_node.node import Worker

WORKERS = 4


class Tap:
    """A stream that keeps what passes, both ways."""

    def __init__(self, node: Node, remote: bool = False) -> None:
        self._open = remote_stream.connect if remote else inprocess.connect
        self.sent: list[w.Message] = []
        self.heard: list[w.Message] = []
        self._node = node

    def connect(self, handler: Handler) -> Channel:
        self._handler = handler
        self._channel = self._open(self._node, self)
        return self

    def send(self, *messages: w.Message) -> None:
        self.sent += messages
        self._channel.send(*messages)

    def on_message(self, message: w.Message) -> None:
        self.heard.append(message)
        self._handler.on_message(message)

    def on_close(self, error: Any) -> None:
        self._handler.on_close(error)

    def close(self) -> None:
        self._channel.close()


class TappedCluster:
    """A main node and four workers on one model, all that they say on tap; a shadow once one has joined. `remote`: the
    workers are taken for processes of their own."""

    def __init__(
        self, store: ExpertStore, slots: int = 1, shadow: ShadowStart | None = None, remote: bool = False
    ) -> None:
        self.store = store
        manifest = store.manifest
        core = Core(model_shape(store), RoundRobin(2), Alignment(), 4096)
        hello = w.Hello(w.PROTOCOL_VERSION, manifest.model_digest, manifest.dtype, "main")
        self.engine = Engine(core, hello, Waits(worker_s=1.0))
        arithmetic = ExpertArithmetic(manifest.config, manifest.dtype)
        self.nodes: list[Node] = []
        self.taps: list[Tap] = []
        self.shadow_tap: Tap | None = None
        self.gates: dict[t.Visit, set[int]] = {}
        for number in range(WORKERS):
            worker = Worker(f"worker {number}", store, arithmetic, MemoryLoader(store), FormChoice(slots=slots))
            self.nodes.append(worker)
            self.taps.append(Tap(worker, remote))
            self.engine.peers.add_worker(number, self.taps[-1].connect, WAIT_S)
        self.main = MainNode(store, self.engine, Computing(torch.float32), shadow)
        compute = self.main.experts.compute

        def noted(visit: t.Visit, hidden: Any, index: torch.Tensor, weights: Any, **how: Any) -> torch.Tensor:
            self.gates[visit] = set(torch.unique(index).tolist())
            return compute(visit, hidden, index, weights, **how)

        self.main.experts.compute = noted  # type: ignore[method-assign,assignment]

    def join_shadow(self, model: ShadowModel) -> Tap:
        shadow = Shadow("shadow", model, self.store.manifest.model_digest, self.store.manifest.dtype)
        self.nodes.append(shadow)
        self.shadow_tap = Tap(shadow)
        self.engine.peers.add_shadow(self.shadow_tap.connect, WAIT_S)
        return self.shadow_tap

    def answer(self, prompt: list[int], count: int, **settings: Any) -> tuple[list[int], Report]:
        """All tokens, and the report, which only the closing step may carry."""
        *steps, closing = self.main.generate(prompt, count, **settings)
        assert [step.report for step in steps] == [None] * len(steps)
        assert [step.finish is None for step in steps] == [True] * (len(steps) - 1) + [False]
        assert closing.token_id is None
        assert closing.report is not None
        return [step.token_id for step in steps if step.token_id is not None], closing.report

    def loads(self) -> int:
        return sum(isinstance(m, w.Load) for tap in self.taps for m in tap.sent)

    def forget(self) -> None:
        """Drop what was kept so far, which grows with each answer."""
        for tap in self.taps:
            tap.sent.clear()
            tap.heard.clear()
        self.gates.clear()

    def nothing_left(self) -> None:
        """No request, layer, load or call anywhere."""
        assert nothing_left(self.engine)

    def close(self) -> None:
        self.main.close()
        for node in self.nodes:
            node.close()
            if isinstance(node, Shadow):
                node.model.on_routed = None  # the model serves other tests
