"""A worker whose outputs are wrong: a `Node` around a sound one, which changes what that one answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from checkpoint.tensors import received_tensor, tensor_bytes
from scheduler.errors import ODMoEError
from wire.base import Channel, Handler, Node
from wire.messages import Compute, Computed, Load, Message, Tensor

Change = Callable[[torch.Tensor, random.Random], torch.Tensor]


def _with_element(value: float) -> Change:
    def change(output: torch.Tensor, draw: random.Random) -> torch.Tensor:
        flat = output.flatten()
        flat[draw.randrange(len(flat))] = value
        return flat.view(output.shape)

    return change


def _flip(output: torch.Tensor, draw: random.Random) -> torch.Tensor:
    flat = output.view(torch.uint8).flatten()
    flat[draw.randrange(len(flat))] ^= 1 << draw.randrange(8)
    return flat.view(output.dtype).view(output.shape)


CHANGES: dict[str, Change] = {
    "nan": _with_element(float("nan")),
    "infinity": _with_element(float("inf")),
    "huge": lambda output, draw: torch.full_like(output, torch.finfo(output.dtype).max * 0.9),
    "large": lambda output, draw: torch.full_like(output, 1e15),
    "one huge element": _with_element(3e38),
    "bit flip": _flip,
    "zeros": lambda output, draw: torch.zeros_like(output),
    "scaled": lambda output, draw: output * 1.01,
    "another expert": lambda output, draw: output,
}
"""By name. `another expert` has the worker load and compute a neighbour of the expert that it was asked for."""

IN_TRANSIT = ("bit flip",)
"""Changes that happen after the worker has made its checksum. For all others no checksum is sent, as a liar would."""


@dataclass(frozen=True)
class Lie:
    """Which outputs are changed, and how."""

    kind: str
    """A name of `CHANGES`."""
    first: int = 0
    """The first computation, from 0, that is changed."""
    count: int | None = None
    """How many are changed; None: all that follow."""
    seed: int = 0

    def covers(self, computation: int) -> bool:
        return computation >= self.first and (self.count is None or computation < self.first + self.count)


class LyingWorker:
    """As `node`, until a `lie` is set."""

    def __init__(self, node: Node, experts: int) -> None:
        """`experts`: of each layer."""
        self.experts = experts
        self.told = 0
        """Outputs that were changed."""
        self._node = node
        self._lie: Lie | None = None
        self._draw = random.Random(0)
        self._computed = 0

    def set(self, lie: Lie | None) -> None:
        """From now on; computations are counted anew."""
        self._lie, self._computed, self.told = lie, 0, 0
        self._draw = random.Random(lie.seed if lie else 0)

    def accept(self, reply: Channel) -> Handler:
        return _Inward(self, self._node.accept(_Outward(self, reply)))

    def close(self) -> None:
        self._node.close()

    def answered(self, message: Message) -> Message:
        if not isinstance(message, Computed):
            return message
        number, self._computed = self._computed, self._computed + 1
        lie = self._lie
        if lie is None or not lie.covers(number):
            return message
        self.told += 1
        output = CHANGES[lie.kind](received_tensor(message.output).clone(), self._draw)
        checksum = message.checksum if lie.kind in IN_TRANSIT else 0
        return replace(message, output=Tensor(*tensor_bytes(output)), checksum=checksum)

    def asked(self, message: Message) -> Message:
        if isinstance(message, Load | Compute) and self._lie and self._lie.kind == "another expert":
            return replace(message, expert=(message.expert + 1) % self.experts)
        return message


class _Outward:
    """What the worker answers."""

    def __init__(self, worker: LyingWorker, channel: Channel) -> None:
        self._worker, self._channel = worker, channel

    def send(self, *messages: Message) -> None:
        self._channel.send(*map(self._worker.answered, messages))

    def close(self) -> None:
        self._channel.close()


class _Inward:
    """What the worker is asked."""

    def __init__(self, worker: LyingWorker, handler: Handler) -> None:
        self._worker, self._handler = worker, handler

    def on_message(self, message: Message) -> None:
        self._handler.on_message(self._worker.asked(message))

    def on_close(self, error: ODMoEError | None) -> None:
        self._handler.on_close(error)
