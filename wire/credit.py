"""Back-pressure by bytes: rows may wait at a worker, as many as the main node has credit for.

The main node keeps to it, and the worker enforces it. Both count the same messages by the same sizes, in the same
order. A computation counts from when it is sent until it is answered, or its slot is evicted. The worker's count is
never above the main node's: it receives a computation later, and answers it earlier. One computation may always be
sent, however large.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from wire import runtime
from wire.messages import MAX_MESSAGE_BYTES, Align, Compute, Evict, LocalTensor, Message, Tensor

QUEUE_BYTES = MAX_MESSAGE_BYTES
"""Of the rows that wait at one worker."""

MESSAGE_BYTES = 1024
"""What a message takes beside its tensors."""


def message_bytes(message: Compute | Align) -> int:
    """What a message with tensors takes in memory."""
    tensors = message.kv if isinstance(message, Align) else (message.hidden, message.weights)
    return sum(map(_tensor_bytes, tensors)) + MESSAGE_BYTES


def _tensor_bytes(tensor: Tensor | LocalTensor) -> int:
    return int(tensor.local.nbytes) if isinstance(tensor, LocalTensor) else len(tensor.data)


class RowCredit:
    """The main node's side, of one worker. Called with the engine's lock."""

    def __init__(self, most: int) -> None:
        """`most`: the worker's `queue_bytes`."""
        self.nbytes = 0
        """Sent, and not answered."""
        self._most = most or QUEUE_BYTES
        self._sent: dict[int, tuple[int, int]] = {}
        """Call -> slot and bytes."""
        self._held: deque[Message] = deque()
        """Not sent yet, in order."""

    def admit(self, messages: Iterable[Message]) -> list[Message]:
        """The messages that may be sent now, in order: those held back before, then `messages`, up to the first that
        has to wait."""
        held = self._held
        held.extend(messages)
        free: list[Message] = []
        while held and self._may_go(held[0]):
            free.append(held.popleft())
        return free

    @property
    def holds(self) -> bool:
        """Messages wait."""
        return bool(self._held)

    def settle(self, call_id: int) -> None:
        """A computation was answered, or cannot be sent."""
        _, nbytes = self._sent.pop(call_id, (0, 0))
        self.nbytes -= nbytes

    def _may_go(self, message: Message) -> bool:
        if isinstance(message, Compute):
            size = message_bytes(message)
            if self.nbytes and self.nbytes + size > self._most:
                return False
            self._sent[message.call_id] = message.slot, size
            self.nbytes += size
        elif isinstance(message, Evict):
            for call_id in [call for call, (slot, _) in self._sent.items() if slot == message.slot]:
                self.settle(call_id)
        return True


class RowBudget:
    """The worker's side, of one stream. Thread-safe."""

    def __init__(self, most: int = QUEUE_BYTES) -> None:
        self.most = most
        self.nbytes = 0
        """Received, and neither answered nor evicted."""
        self._held: dict[int, tuple[Compute, int]] = {}
        self._lock = runtime.Lock()

    def add(self, message: Compute) -> bool:
        """A computation has come. False, and not counted, if the main node exceeds its credit."""
        size = message_bytes(message)
        with self._lock:
            if self.nbytes and self.nbytes + size > self.most:
                return False
            self._held[id(message)] = message, size
            self.nbytes += size
        return True

    def drop(self, message: Compute) -> None:
        """It is about to be answered."""
        with self._lock:
            _, size = self._held.pop(id(message), (None, 0))
            self.nbytes -= size

    def drop_slot(self, slot: int) -> None:
        """The slot is evicted: what waits for it is not answered."""
        with self._lock:
            for message, size in [held for held in self._held.values() if held[0].slot == slot]:
                del self._held[id(message)]
                self.nbytes -= size
