"""Feeds frames to a handler as the gRPC transport would, by its own stream, without a socket."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue

from main_node.engine import peer
from wire.base import Handler, Node, Role
from wire.codec import Codec
from wire.messages import Echo, Hello, Message
from wire.rpc.pulse import PULSE
from wire.rpc.stream import EDGES, Stream

BLOCK_BYTES = 100


class _Heap(ctypes.Structure):
    """`struct mallinfo2` of glibc's malloc.h."""

    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]


def used_mib() -> float:
    """What this process has allocated and not freed, MiB: C's heap, and Python's small objects at `BLOCK_BYTES` each.
    Not memory that is mapped past C's heap, as `aligned_buffer` does; resident memory has that too. It also has what
    allocators keep free, which spreads over more arenas with every thousand threads."""
    of_heap = ctypes.CDLL(None).mallinfo2
    of_heap.restype = _Heap
    heap = of_heap()
    return (heap.uordblks + heap.hblkhd + sys.getallocatedblocks() * BLOCK_BYTES) / 2**20


def _opened(out: Codec, into: Codec) -> Stream:
    return Stream(out, into, "the client at ipv4:127.0.0.1:1", lambda: None, PULSE)


def _read(stream: Stream, frames: Iterator[bytes], handler: Handler) -> None:
    """Until the stream has ended, or there are no more frames."""

    def while_open() -> Iterator[bytes]:
        while not stream._closed:
            data = next(frames, None)
            if data is None:
                return
            yield data

    writer = threading.Thread(target=lambda: [None for _ in stream.outgoing()], daemon=True)
    writer.start()
    stream.read(while_open(), handler)
    writer.join(30)


def feed_node(node: Node, role: Role, frames: Iterator[bytes], first: list[Message]) -> int:
    """Feed frames to a node, by a new stream whenever one has ended. Each stream begins with the messages `first`.
    Returns the number of streams."""
    edge, streams = EDGES[role], 0
    begin = [edge.to_node.encode(message) for message in first]
    for data in frames:
        stream = _opened(edge.from_node, edge.to_node)
        _read(stream, itertools.chain(begin, [data], frames), node.accept(stream))
        streams += 1
    return streams


class FuzzedPeer:
    """A worker or a shadow that answers Hello and Echo as it should, and then sends frames; for `Peers.add_worker`."""

    def __init__(self, role: Role, ready: Message, frames: Iterator[bytes], most: int) -> None:
        """`most`: frames of one stream."""
        self.streams = 0
        self._edge = EDGES[role]
        self._ready = self._edge.from_node.encode(ready)
        self._frames = frames
        self._taking = threading.Lock()
        """A stream may still take a frame while the next has begun."""
        self._most = most

    def connect(self, handler: Handler) -> Stream:
        self.streams += 1
        stream = _opened(self._edge.to_node, self._edge.from_node)
        answers: SimpleQueue[bytes] = SimpleQueue()
        send = stream.send

        def noted(*messages: Message) -> None:
            send(*messages)
            for message in messages:
                if isinstance(message, Hello | Echo):
                    answers.put(self._ready if isinstance(message, Hello) else self._edge.from_node.encode(message))

        stream.send = noted  # type: ignore[method-assign]
        thread = threading.Thread(target=_read, args=(stream, self._talk(answers), handler), daemon=True)
        thread.start()
        return stream

    def _talk(self, answers: SimpleQueue[bytes]) -> Iterator[bytes]:
        for _ in range(1 + peer.ECHOES):
            yield answers.get(timeout=30)
        for _ in range(self._most):
            with self._taking:
                data = next(self._frames, None)
            if data is None:
                return
            yield data
