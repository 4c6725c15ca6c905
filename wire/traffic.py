"""Counts the messages of a stream and their encoded bytes, at both ends, without beats."""

from __future__ import annotations

from typing import NamedTuple

from wire import runtime
from wire.base import Channel
from wire.messages import Message, Stamped


class Count(NamedTuple):
    """`nbytes` is the encoded size, without the headers of gRPC, TLS and TCP (some 40 bytes a message). Messages that
    travel as one are counted one by one."""

    messages: int
    nbytes: int


class MessageCounts:
    """One direction of a stream, by kind of message. Thread-safe."""

    def __init__(self) -> None:
        self._lock = runtime.Lock()
        self._messages: dict[type, int] = {}
        self._nbytes: dict[type, int] = {}

    def add(self, kind: type, nbytes: int) -> None:
        with self._lock:
            self._messages[kind] = self._messages.get(kind, 0) + 1
            self._nbytes[kind] = self._nbytes.get(kind, 0) + nbytes

    def count_of(self, *kinds: type) -> Count:
        """The count of these kinds of messages; of all if no kind is given."""
        with self._lock:
            wanted = kinds or tuple(self._messages)
            return Count(
                sum(self._messages.get(kind, 0) for kind in wanted), sum(self._nbytes.get(kind, 0) for kind in wanted)
            )


class Traffic(NamedTuple):
    """Both directions, as counted by one end."""

    sent: MessageCounts
    received: MessageCounts


def kind_of(message: Message) -> type:
    """The kind of a message; of a stamped one, the kind of its content."""
    return type(message.message if isinstance(message, Stamped) else message)


def traffic_of(channel: Channel) -> Traffic | None:
    """The counts of a channel; None for one within a process, which encodes nothing."""
    found = getattr(channel, "traffic", None)
    return found if isinstance(found, Traffic) else None
