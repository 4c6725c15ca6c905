"""Transport within a process: messages are passed as objects, uncopied, in the sender's thread."""

from __future__ import annotations

from scheduler.errors import LinkError, ODMoEError
from wire import runtime
from wire.base import Channel, Handler, Node
from wire.messages import Message


class _Pipe:
    """One direction. The receiver is set after construction, since each end needs the other's."""

    in_process = True

    def __init__(self) -> None:
        self.receiver: Handler | None = None
        self.other: _Pipe | None = None
        self._closed = False
        self._lock = runtime.Lock()

    def send(self, *messages: Message) -> None:
        for message in messages:
            if self._closed or self.receiver is None:
                raise LinkError("the in-process stream is closed; connect to the node again")
            self.receiver.on_message(message)

    def close(self) -> None:
        self.shut(None)
        if self.other is not None:
            self.other.shut(None)

    def shut(self, error: ODMoEError | None) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self.receiver is not None:
            self.receiver.on_close(error)


def connect(node: Node, handler: Handler) -> Channel:
    """Open a stream to `node`; its answers go to `handler`."""
    there, back = _Pipe(), _Pipe()
    there.other, back.other = back, there
    back.receiver = handler
    there.receiver = node.accept(back)
    return there
