"""A main node that means harm: what it may send to a worker, and how much memory the worker takes for it."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import Any

import grpc

from checkpoint.store import ExpertStore
from scheduler.errors import ODMoEError
from wire import messages as w
from wire import odmoe_pb2 as pb
from wire.rpc.client import connect
from wire.rpc.stream import EDGES

WAIT_S = 30.0
SETTLE_S = 1.0


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had since `forget_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak(pid: int) -> int:
    """The process's peak is what it has now. Returns it."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_bytes(pid)


class HostileMain:
    """A stream to a worker, past the handshake."""

    def __init__(self, address: str, store: ExpertStore) -> None:
        self.store = store
        self.heard: list[w.Message] = []
        self.error: ODMoEError | None = None
        self.ended = threading.Event()
        self._changed = threading.Condition()
        self.channel = connect(address, "worker", self)
        manifest = store.manifest
        self.channel.send(w.Hello(w.PROTOCOL_VERSION, manifest.model_digest, manifest.dtype, "main"))
        self.ready = self.wait(w.WorkerReady)

    def on_message(self, message: w.Message) -> None:
        with self._changed:
            self.heard.append(message)
            self._changed.notify_all()

    def on_close(self, error: ODMoEError | None) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()
        self.ended.set()

    def wait(self, kind: type) -> Any:
        """The first message of a kind. Raises TimeoutError."""

        def found() -> Any:
            return next((message for message in self.heard if isinstance(message, kind)), None)

        with self._changed:
            if self._changed.wait_for(lambda: found() or self.ended.is_set(), WAIT_S) and found():
                return found()
        raise TimeoutError(f"no {kind.__name__} came; the stream's error: {self.error}; heard {self.heard[-3:]}")

    def send(self, *messages: w.Message) -> bool:
        """False where the stream has ended, or the message cannot be encoded."""
        try:
            self.channel.send(*messages)
        except ODMoEError:
            return False
        return True

    def load(self, number: int = 1) -> tuple[int, int]:
        """Load an expert into slot 0. Returns its layer and number."""
        layer = self.store.manifest.moe_layers[0]
        self.send(w.Load(number, 0, layer, 0))
        return layer, 0

    def settle(self) -> None:
        """Give the worker time to do what it was sent."""
        self.ended.wait(SETTLE_S)
        time.sleep(SETTLE_S)

    def close(self) -> None:
        self.channel.close()


class RawMain:
    """A stream to a worker, past the handshake, that writes bytes which no codec of ours has seen."""

    def __init__(self, address: str, store: ExpertStore) -> None:
        edge, manifest = EDGES["worker"], store.manifest
        self._edge = edge
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address)
        open_stream: Any = self._channel.stream_stream(f"/{edge.service}/{edge.method}")
        self._answers = open_stream(iter(self._queue.get, None))
        self.send(w.Hello(w.PROTOCOL_VERSION, manifest.model_digest, manifest.dtype, "main"))
        self.wait(w.WorkerReady)

    def wait(self, kind: type | tuple[type, ...]) -> w.Message:
        """The next message of a kind. Raises grpc.RpcError, StopIteration where the stream ends."""
        while not isinstance(message := self._edge.from_node.decode(next(self._answers)), kind):
            pass
        return message

    def answer(self) -> str:
        """What the worker answers to a computation."""
        try:
            found = self.wait((w.Failed, w.Computed))
        except grpc.RpcError as error:
            return f"the stream was ended: {error.details()}"
        except StopIteration:
            return "the stream was ended"
        return f"{found.error}: {found.message}" if isinstance(found, w.Failed) else "computed"

    def send(self, message: w.Message) -> None:
        self._queue.put(self._edge.to_node.encode(message))

    def compute(self, layer: int, expert: int, rows: dict[str, Any], weights: dict[str, Any]) -> None:
        """Fields of the two tensors, as they are."""
        tensors = {"hidden": pb.Tensor(**rows), "weights": pb.Tensor(**weights)}
        call = pb.Compute(call_id=1, slot=0, layer=layer, expert=expert, evict=True, **tensors)
        self._queue.put(pb.ToWorker(compute=call).SerializeToString())

    def close(self) -> None:
        self._answers.cancel()
        self._channel.close()


def frames(store: ExpertStore) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Rows and weights of computations that claim more than they carry, by what is wrong with them."""
    hidden = int(store.manifest.config["hidden_size"])
    name = store.manifest.dtype
    dtype, size = pb.Tensor.DType.Value(name.upper()), w.DTYPE_BYTES[name]

    def tensor(*shape: int, data: bytes = b"") -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data": data}

    row, weight = tensor(1, hidden, data=bytes(size * hidden)), tensor(1, data=bytes(size))
    return {
        "rows [2^31, 0], no weights": (tensor(1 << 31, 0), tensor(0)),
        "rows [2^27, 0], weights [2^27, 0]": (tensor(1 << 27, 0), tensor(1 << 27, 0)),
        "rows [0, 2^31], weights [1]": (tensor(0, 1 << 31), weight),
        "one row, weights [2^31, 0]": (row, tensor(1 << 31, 0)),
        "one row, two weights": (row, tensor(2, data=bytes(2 * size))),
    }
