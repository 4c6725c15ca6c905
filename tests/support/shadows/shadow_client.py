"""The main node's end of a shadow's stream: what the main model has answered, told pass by pass."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint.tensors import tensor_bytes
from scheduler.errors import ODMoEError
from shadow_node.model import ShadowModel
from shadow_node.node import Shadow
from support.nodes import remote_stream
from wire.base import Channel
from wire.messages import (
    PROTOCOL_VERSION,
    Align,
    Hello,
    Message,
    OpenRequest,
    Prediction,
    Tensor,
)

WAIT_S = 30.0
LAYERS = list(range(8))
PROMPT_TOKENS = 12
STEPS = 9


@dataclass
class MainAnswer:
    """What the main model makes of a prompt: its tokens, and keys and values of all layers, [1, heads, T, D] each."""

    prompt: tuple[int, ...]
    tokens: list[int]
    kv: list[torch.Tensor]

    def rows(self, start: int, stop: int) -> tuple[Tensor, ...]:
        return tuple(Tensor(*tensor_bytes(t[:, :, start:stop])) for t in self.kv)


class ShadowClient:
    """The main node's end: keeps what it is told, sends alignments, and knows when the shadow has nothing to do."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow
        self.caches: dict[int, Any] = {}
        self.got: list[Message] = []
        self.on_prediction: Callable[[Prediction], None] = lambda message: None
        self._changed = threading.Condition()
        self._requests: dict[int, tuple[OpenRequest, MainAnswer]] = {}
        self.channel: Channel = remote_stream.connect(shadow, self)

    def on_message(self, message: Message) -> None:
        with self._changed:
            self.got.append(message)
            self._changed.notify_all()
        if isinstance(message, Prediction):
            self.on_prediction(message)

    def on_close(self, error: ODMoEError | None) -> None:
        pass

    def hello(self, **changes: Any) -> None:
        fields: dict[str, Any] = {"version": PROTOCOL_VERSION, "fingerprint": "abc", "dtype": "float32", "node": "main"}
        fields["session"] = "one main node"
        self.channel.send(Hello(**(fields | changes)))

    def of(self, kind: type) -> list[Any]:
        with self._changed:
            return [m for m in self.got if isinstance(m, kind)]

    def wait(self, ready: Callable[[], object], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(ready, WAIT_S), f"{what} did not come within {WAIT_S:g} s: {self.got[-3:]}"

    def open(
        self,
        number: int,
        answer: MainAnswer,
        token: int = 1,
        kv: int = 1,
        first: int = 0,
        new: int = STEPS,
        lookahead: int = 2,
        late: bool = True,
    ) -> None:
        prompt = (*answer.prompt, *answer.tokens[:first])
        message = OpenRequest(number, prompt, first, new, token, kv, lookahead, late)
        self._requests[number] = (message, answer)
        self._open(message)

    def _open(self, message: OpenRequest) -> None:
        """And see which cache the shadow makes for it."""
        model = self.shadow.model
        new_cache = model.new_cache

        def noted() -> Any:
            self.caches[message.request] = new_cache()
            return self.caches[message.request]

        model.new_cache = noted  # type: ignore[method-assign]
        try:
            self.channel.send(message)
        finally:
            model.new_cache = new_cache  # type: ignore[method-assign]

    def align(self, number: int, step: int, kv_from: int | None = None, parts: int = 1, **changes: Any) -> None:
        """What the engine would send before that pass: token and rows where due, here all rows since `kv_from`."""
        opened, answer = self._requests[number]
        token = answer.tokens[step] if opened.align_token and step % opened.align_token == 0 else None
        stop = len(answer.prompt) + step
        if not opened.align_kv or step % opened.align_kv:
            self.channel.send(Align(number, step, changes.get("token", token), stop, ()))
            return
        start = kv_from if kv_from is not None else (stop - opened.align_kv if step else 0)
        cuts = [start + (stop - start) * i // parts for i in range(parts + 1)]
        for a, b in itertools.pairwise(cuts):
            self.channel.send(Align(number, step, changes.get("token", token), a, answer.rows(a, b), b < stop))

    def settle(self) -> None:
        """Until the shadow waits for us: a job on the passes' thread begins when no pass may run."""
        idle = threading.Event()
        session = self.shadow.sessions._served
        assert session is not None
        session._thread.submit(idle.set)
        assert idle.wait(WAIT_S), f"the shadow is not idle after {WAIT_S:g} s"

    def passes(self, number: int) -> list[int]:
        """Decode passes predicted so far, in order; each of them whole, every layer once, at the right position."""
        self.settle()
        answer = self._requests[number][1]
        found = [m for m in self.of(Prediction) if m.request == number]
        positions = [m.position for m in found[::8]]
        assert [m.position for m in found] == [p for p in positions for _ in LAYERS]
        assert [m.layer for m in found] == LAYERS * len(positions)
        assert all(len(set(m.experts)) == 2 and len(m.scores) == 2 for m in found)
        assert len(set(positions)) == len(positions)
        return [p - len(answer.prompt) for p in positions]

    def routes(self, number: int, step: int) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """(experts, scores) of every layer in one pass."""
        position = len(self._requests[number][1].prompt) + step
        return [(m.experts, m.scores) for m in self.of(Prediction) if (m.request, m.position) == (number, position)]

    def final(self, number: int, step: int) -> list[set[int]]:
        """What stands at the end: the experts that were predicted last for each layer in one pass."""
        position = len(self._requests[number][1].prompt) + step
        found = [m for m in self.of(Prediction) if (m.request, m.position) == (number, position)]
        return [set(next(m.experts for m in reversed(found) if m.layer == layer)) for layer in LAYERS]

    def predicted(self, number: int, step: int) -> list[int]:
        """The layers that were predicted in one pass, in order; a layer that was predicted anew is there again."""
        position = len(self._requests[number][1].prompt) + step
        return [m.layer for m in self.of(Prediction) if (m.request, m.position) == (number, position)]

    def cache(self, number: int) -> list[torch.Tensor]:
        """The shadow's own keys and values."""
        return [t for layer in self.caches[number].layers for t in (layer.keys, layer.values)]


def routes_of(model: ShadowModel, tokens: list[int], cache: Any) -> tuple[int, list[Any]]:
    """The next token, and what the model itself routes for the last of `tokens`."""
    found: list[Any] = []
    model.on_routed = lambda layer, experts, scores: found.append((tuple(experts), tuple(scores)))
    try:
        return model.forward(tokens, cache), found
    finally:
        model.on_routed = None
