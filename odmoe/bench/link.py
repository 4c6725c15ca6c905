"""What a gRPC stream of ours carries: bytes a second, and the time of a round trip."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Timer

from scheduler.errors import DeadlineError, LaunchError, LinkError, ODMoEError
from wire.base import Channel
from wire.messages import Compute, Computed, Message, Tensor
from wire.rpc.client import connect
from wire.rpc.server import GrpcServer
from wire.rpc.tls import Identity

SMALL, BULK = 16 << 10, 1 << 20
"""Bytes of a message: in a round trip, and where the rate is measured."""
ROUND_TRIPS, WARM_UP = 200, 20
AHEAD = 8
"""Messages on their way at once, where the rate is measured."""
SECONDS = 1.5
DEADLINE_S = 20.0
SERVE_S = 600.0
"""How long a peer waits to be measured."""

Step = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Link:
    """Of one stream: payload in bits a second, one way, and seconds of a round trip of `SMALL` bytes each way."""

    address: str
    loopback: bool
    bits_per_s: float
    round_trip_s: float
    round_trip_90_s: float
    """The 90th percentile."""


class Echo:
    """A peer to measure: a node whose streams return what they get. Of a `Compute` that does not evict only one row
    comes back, so that one direction can be measured by itself."""

    def __init__(self, reply: Channel | None = None) -> None:
        self._reply = reply

    def accept(self, reply: Channel) -> Echo:
        return Echo(reply)

    def on_message(self, message: Message) -> None:
        if isinstance(message, Compute) and self._reply is not None:
            output = message.hidden if message.evict else message.weights
            self._reply.send(Computed(message.call_id, output, 0.0))

    def on_close(self, error: ODMoEError | None) -> None:
        pass

    def close(self) -> None:
        pass


class _Answers:
    """The measuring end of the stream."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Message | ODMoEError | None] = SimpleQueue()

    def on_message(self, message: Message) -> None:
        self._queue.put(message)

    def on_close(self, error: ODMoEError | None) -> None:
        self._queue.put(error)

    def next(self) -> Computed:
        """Raises LinkError where the stream has ended, DeadlineError."""
        try:
            found = self._queue.get(timeout=DEADLINE_S)
        except Empty:
            raise DeadlineError(f"the peer did not answer within {DEADLINE_S:g} s; is it busy, or frozen?") from None
        if isinstance(found, Computed):
            return found
        raise found if isinstance(found, ODMoEError) else LinkError("the peer hung up while it was measured")


def measure_link(
    address: str, loopback: bool, step: Step, secret: str | None = None, identity: Identity | None = None
) -> Link:
    """Of a new stream to a peer that `serve` runs.

    Raises ConfigError, LinkError, SecretError, CertificateError or DeadlineError.
    """
    answers = _Answers()
    channel = connect(address, "worker", answers, secret, identity=identity)
    try:
        trips = _round_trips(channel, answers, step)
        rate = _rate(channel, answers, step)
    finally:
        channel.close()
    return Link(address, loopback, rate, statistics.median(trips), statistics.quantiles(trips, n=10)[-1])


def _message(size: int, call: int, echoed: bool) -> Compute:
    rows = Tensor("float32", (1, size // 4), memoryview(bytearray(size)))
    return Compute(call, 0, 0, 0, rows, Tensor("float32", (1,), bytes(4)), evict=echoed)


def _round_trips(channel: Channel, answers: _Answers, step: Step) -> list[float]:
    message = _message(SMALL, 1, echoed=True)
    found = []
    for n in range(WARM_UP + ROUND_TRIPS):
        start = time.perf_counter()
        channel.send(message)
        answers.next()
        found.append(time.perf_counter() - start)
        step(n, 2 * (WARM_UP + ROUND_TRIPS))
    return found[WARM_UP:]


def _rate(channel: Channel, answers: _Answers, step: Step) -> float:
    """Bits a second of payload, by the answers: what is queued and has not arrived does not count."""
    message = _message(BULK, 2, echoed=False)
    for _ in range(AHEAD):
        channel.send(message)
    answers.next()
    channel.send(message)
    start, arrived = time.perf_counter(), 0
    while (taken := time.perf_counter() - start) < SECONDS or not arrived:
        answers.next()
        arrived += 1
        channel.send(message)
        step(50 + min(int(50 * taken / SECONDS), 50), 100)
    return arrived * BULK * 8 / (time.perf_counter() - start)


@contextlib.contextmanager
def loopback_peer() -> Iterator[str]:
    """The address of a peer in a process of its own on this machine. Raises LaunchError."""
    command = [sys.executable, "-m", "odmoe", "bench", "--serve", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        late = Timer(DEADLINE_S, process.kill)
        late.start()
        try:
            line = process.stdout.readline() if process.stdout else ""
            late.cancel()
            if not line:
                process.kill()
                error = process.stderr.read() if process.stderr else ""
                raise LaunchError(f"the peer on this machine did not start within {DEADLINE_S:g} s: {error.strip()}")
            yield line.split()[-1]
        finally:
            late.cancel()
            process.kill()


def serve(host: str, port: int, secret: str | None, identity: Identity | None, ready: Callable[[str], None]) -> None:
    """Be measured, for `SERVE_S` seconds or until Ctrl-C. Raises ConfigError, LaunchError."""
    server = GrpcServer(Echo(), "worker", host, port, secret, identity)
    try:
        ready(server.address)
        time.sleep(SERVE_S)
    finally:
        server.close(0.5)
