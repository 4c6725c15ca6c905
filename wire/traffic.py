"""What one stream carries: messages and their encoded bytes, counted by both ends. Beats are left out."""

from __future__ import annotations

import threading
from typing import NamedTuple

from wire.base import Channel
from wire.messages import Message, Stamped


class Count(NamedTuple):
    """`nbytes`: as encoded, without what gRPC, TLS and TCP put around it (some 40 bytes a message)."""

    messages: int
    nbytes: int


class MessageCounts:
    """One direction of a stream, by kind of message. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[type, int] = {}
        self._nbytes: dict[type, int] = {}

    def add(self, kind: type, nbytes: int) -> None:
        with self._lock:
            self._messages[kind] = self._messages.get(kind, 0) + 1
            self._nbytes[kind] = self._nbytes.get(kind, 0) + nbytes

    def of(self, *kinds: type) -> Count:
        """Of these kinds; of all where none is named."""
        with self._lock:
            wanted = kinds or tuple(self._messages)
            return Count(
                sum(self._messages.get(kind, 0) for kind in wanted), sum(self._nbytes.get(kind, 0) for kind in wanted)
            )


class Traffic(NamedTuple):
    """Both directions, as the end sees them that counts."""

    sent: MessageCounts
    received: MessageCounts


def kind_of(message: Message) -> type:
    """Of what a stamped message is about."""
    return type(message.message if isinstance(message, Stamped) else message)


def traffic_of(channel: Channel) -> Traffic | None:
    """None where messages are handed over in memory: there nothing is encoded."""
    found = getattr(channel, "traffic", None)
    return found if isinstance(found, Traffic) else None
