"""A shadow's model of exact arithmetic, and a session whose work is done on the test's own thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from checkpoint.coroutine import Coroutine, in_coroutine, suspend
from checkpoint.tensors import tensor_bytes
from scheduler.model_limits import ModelLimits
from shadow_node.model import Gate
from shadow_node.node import Shadow
from shadow_node.pace import Pace
from wire.messages import PROTOCOL_VERSION, Align, Failed, Hello, Message, OpenRequest, Prediction, Tensor

LAYERS, EXPERTS = 3, 6
VOCABULARY = 3
"""So few that a shadow's own token is often the main model's."""


class ArithmeticModel:
    """Whole numbers below 1000 in float64: every row depends on all rows before it, and nothing is rounded.

    `window`: layer 1 keeps a sliding window of so many rows, 0: all. `states`: layer 2 has a state beside its rows.
    """

    scheme, device, device_bytes, layers, streams = "none", "cpu", 0, LAYERS, ()
    remote_cache_bytes = 0
    limits = ModelLimits(dict.fromkeys(range(LAYERS), EXPERTS))

    def __init__(self, window: int = 0, states: bool = False) -> None:
        self._window, self._states = window, states
        self.on_routed: Callable[[int, list[int], list[float]], None] | None = None
        self.on_layer: Callable[[], None] = lambda: None

    def reach(self) -> None:
        pass

    def new_cache(self) -> Any:
        cache = DynamicCache()
        if self._window or self._states:
            windowed = DynamicSlidingWindowLayer(self._window) if self._window else DynamicLayer()
            cache.layers = [DynamicLayer(), windowed, DynamicLayer()]
        if self._states:
            cache.layers[2].conv_states = {0: torch.zeros(1, 1, dtype=torch.float64)}
        return cache

    def forward(self, tokens: list[int], cache: Any) -> int:
        value = 0
        for token in tokens:
            value = self._row(token, cache, last=token is tokens[-1])
        return value % VOCABULARY

    def lock_step(self, tokens: list[int], cache: Any) -> Coroutine[int]:
        return Coroutine(lambda: self.forward(tokens, cache))

    def experts_of(self, gates: Sequence[Gate]) -> list[torch.Tensor]:
        self.on_layer()
        return [gate.hidden for gate in gates]

    def _row(self, token: int, cache: Any, last: bool) -> int:
        value = token
        for layer in range(LAYERS):
            row = torch.full((1, 1, 1, 1), float(value), dtype=torch.float64)
            keys, _ = cache.update(row, row + 1, layer)
            weights = torch.arange(1, keys.shape[2] + 1, dtype=torch.float64)
            value = int((keys.flatten() * weights).sum() + 7 * layer) % 997
            if self._states and layer == 2:
                state = cache.layers[layer].conv_states[0]
                value = (value + int(state)) % 997
                cache.layers[layer].conv_states = {0: torch.full_like(state, value)}
            first = value % EXPERTS
            experts = [first, (first + 1 + value // EXPERTS % (EXPERTS - 1)) % EXPERTS]
            if in_coroutine():
                chosen, weights = torch.tensor([experts]), torch.tensor([[0.5, 0.5]])
                suspend(Gate(layer, row.view(1, 1), chosen, weights, [0.5, 0.5]))
            elif self.on_routed is not None:
                self.on_layer()
                self.on_routed(layer, experts, [0.5, 0.5])
        return value


class _Jobs:
    """In place of a thread: jobs wait until the test runs them."""

    def submit(self, job: Callable[..., object], *args: Any) -> None:
        pass

    def close(self) -> bool:
        return True


class Followed:
    """A main model's answer: `tokens` of decode passes 0, 1, ..., and the number in each row of its KV cache."""

    def __init__(self, number: int, prompt: list[int], tokens: list[int], rows: list[int], **opened: Any) -> None:
        self.number, self.prompt, self.tokens, self.rows = number, prompt, tokens, rows
        self.token, self.kv = opened["token"], opened["kv"]
        self._window, self._states = opened.get("window", 0), opened.get("states", False)
        self.message = OpenRequest(
            number, tuple(prompt), 0, len(tokens) + 1, self.token, self.kv, opened.get("lookahead", 2), opened["late"]
        )
        self.told = 0
        """Alignments that were sent."""
        self._aligned = 0

    def align(self, passes: int = 1, drafts: int = 0) -> Align:
        """The next one. `passes`: of a block, which is aligned once."""
        block = range(self.told, self.told + passes)
        step, end = block[-1], len(self.prompt) + block[-1]
        self.told += passes
        due = self.token and any(one % self.token == 0 for one in block)
        token = self.tokens[step] if due else None
        before = tuple(self.tokens[one] for one in block[:-1]) if due else ()
        start, kv = end, []
        if self.kv and any(one % self.kv == 0 for one in block):
            start, self._aligned = self._aligned, end
            kv = self._kv(start, end)
        return Align(self.number, step, token, start, tuple(kv), False, drafts, before)

    def _kv(self, start: int, end: int) -> list[Tensor]:
        found = []
        for layer in range(LAYERS):
            first = max(start, end - self._window + 1) if self._window and layer == 1 else start
            rows = torch.tensor(self.rows[first:end], dtype=torch.float64).view(1, 1, -1, 1)
            found += [rows + layer, rows + layer + 1]
        if self._states:
            found.append(torch.full((1, 1), self.rows[end - 1] + 100.0))
        return [Tensor(*tensor_bytes(each.float())) for each in found]


class Bench:
    """A shadow on the test's thread. `on_layer` is called at each layer of a pass."""

    def __init__(self, window: int = 0, states: bool = False, pace: Pace | None = None) -> None:
        self.model = ArithmeticModel(window, states)
        self.got: list[Message] = []
        self.session = Shadow("shadow", self.model, "abc", "float32", pace).accept(self)  # type: ignore[arg-type]
        self.session._thread.close()
        self.session._thread = _Jobs()  # type: ignore[assignment]
        self.session.on_message(Hello(PROTOCOL_VERSION, "abc", "float32", "main"))

    def send(self, *messages: Message) -> None:
        self.got += messages

    def close(self) -> None: ...

    def take(self, message: Message) -> None:
        self.session.on_message(message)

    def work(self) -> None:
        """Until the shadow waits for a message."""
        self.session._work()

    def repeats(self, number: int) -> bool:
        """Whether a pass of the request is just being repeated."""
        course = self.session._requests[number].course
        return course.running and course.again

    def failures(self) -> list[Failed]:
        return [message for message in self.got if isinstance(message, Failed)]

    def stands(self, followed: Followed, step: int) -> list[frozenset[int]]:
        """What was predicted last for each layer of a pass."""
        position, found = len(followed.prompt) + step, {}
        for message in self.got:
            if isinstance(message, Prediction) and (message.request, message.position) == (followed.number, position):
                found[message.layer] = frozenset(message.experts)
        return [found[layer] for layer in range(LAYERS)]
