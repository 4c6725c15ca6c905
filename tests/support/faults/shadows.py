"""Shadows that are silent or wrong: a `Node` around a sound one, which changes what that one predicts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from scheduler.errors import LinkError
from wire.base import Channel, Handler, Node
from wire.messages import Message, Prediction

FAR = 1000
"""How many positions ahead a far-future prediction is."""
MANY = 50
"""Far-future predictions for each sound one."""


class RogueShadow:
    """As `node`, until a `fault` is set: `silent`, `wrong experts`, `far future` or `other layers`."""

    def __init__(self, node: Node, experts: int) -> None:
        """`experts`: of each layer."""
        self.fault: str | None = None
        self._node = node
        self._draw = random.Random(0)
        self._faults: dict[str, Callable[[Prediction], list[Message]]] = {
            "silent": lambda message: [],
            "wrong experts": lambda message: [
                replace(message, experts=tuple(self._draw.sample(range(experts), len(message.experts))))
            ],
            "far future": lambda message: [
                message,
                *(replace(message, position=message.position + FAR + number) for number in range(MANY)),
            ],
            "other layers": lambda message: [replace(message, layer=1 << 20)],
        }

    def accept(self, reply: Channel) -> Handler:
        return self._node.accept(_Reply(self, reply))

    def close(self) -> None:
        self._node.close()

    def said(self, message: Message) -> list[Message]:
        if self.fault is None or not isinstance(message, Prediction):
            return [message]
        return self._faults[self.fault](message)


class _Reply:
    def __init__(self, shadow: RogueShadow, channel: Channel) -> None:
        self._shadow, self._channel = shadow, channel

    def send(self, *messages: Message) -> None:
        changed = [one for message in messages for one in self._shadow.said(message)]
        if changed:
            try:
                self._channel.send(*changed)
            except LinkError:
                if len(changed) == len(messages):
                    raise

    def close(self) -> None:
        self._channel.close()
