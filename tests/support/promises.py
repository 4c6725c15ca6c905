"""The nodes on which promises are tested: three workers and a shadow of a small model, each in a process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from odmoe.settings.settings import Settings
from odmoe.stores import prepare_store
from scripts.faults.cluster import GrpcCluster, Seen
from scripts.faults.links import Relay
from scripts.faults.processes import NodeProcess

WORKERS = 3
TOKENS = 40
PROMPT = [5, 17, 80, 33, 2, 61]

BUSY_S = 1.5
"""Added to each promised time: a machine that runs tests on all cores is late."""


class Nodes:
    """Three workers and a shadow, each in a process, and what Transformers answers to `PROMPT`."""

    def __init__(self, model: Path, store: Path, expected: list[int]) -> None:
        self.store = prepare_store(str(model), str(store), "float32")
        self.expected = expected
        self.settings = Settings(model=str(model), workers=WORKERS, threads=1, shadow="fp16", loader="memory")
        self.workers = [self.node("worker", number) for number in range(WORKERS)]
        self.shadow = self.node("shadow", 0)
        self._stack = ExitStack()

    def node(self, role: Any, number: int, store: Path | None = None, **settings: Any) -> NodeProcess:
        return NodeProcess(role, number, self.settings.but(**settings), store or self.store.path)

    @property
    def all(self) -> list[NodeProcess]:
        return [*self.workers, self.shadow]

    def cluster(self, shadow: bool = False, relays: list[Relay] | None = None, **settings: Any) -> GrpcCluster:
        """A main node; it is closed after the test. `relays`: links to the workers."""
        made = GrpcCluster(
            self.settings.but(**settings),
            self.store,
            [end.address for end in relays or self.workers],
            self.shadow.address if shadow else None,
        )
        self._stack.callback(made.close)
        return made

    def relays(self) -> list[Relay]:
        """A link to each worker; they are closed after the test."""
        made = [Relay(worker.address) for worker in self.workers]
        for relay in made:
            self._stack.callback(relay.close)
        return made

    def later(self, call: Callable[[], object]) -> None:
        """Done after the test."""
        self._stack.callback(call)

    def check_same(self, seen: Seen) -> None:
        assert seen.error is None, seen.error
        assert seen.tokens == self.expected
        assert seen.report.token_ids == self.expected

    def mend(self) -> None:
        self._stack.close()
        dead = []
        for node in self.all:
            node.thaw()
            if not node.process.is_alive():
                node.restart(wait=False)
                dead.append(node)
        for node in self.all:
            for what in (
                ("clock", "predictions") if node is self.shadow else ("clock", "lie", "load", "compute", "slowness")
            ):
                if node not in dead:
                    node.set(what, None)
            node.wait()

    def close(self) -> None:
        for node in self.all:
            node.close()


def greedy(model: Path, prompt: list[int], count: int) -> list[int]:
    """Transformers' own answer, `eager` experts."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype="float32", experts_implementation="eager")
    with torch.inference_mode():
        out = whole.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=1
        )
    return [int(token) for token in out[0, len(prompt) :]]
