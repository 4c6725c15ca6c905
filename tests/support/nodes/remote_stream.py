"""A stream within the test's process, between ends that take each other for processes of their own."""

from __future__ import annotations

from wire import inprocess
from wire.base import Channel, Handler, Node


class _Pipe(inprocess._Pipe):
    in_process = False
    peer = "127.0.0.1:1"


def connect(node: Node, handler: Handler) -> Channel:
    """As `wire.inprocess.connect`, with what stands between processes: bounds, credit and checksums. No byte is
    counted."""
    there, back = _Pipe(), _Pipe()
    there.other, back.other = back, there
    back.receiver = handler
    there.receiver = node.accept(back)
    return there
