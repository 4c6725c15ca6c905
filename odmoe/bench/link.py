"""What a gRPC stream of ours carries: bytes a second, and the time of a round trip."""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from scheduler.errors import DeadlineError, LaunchError, LinkError, ODMoEError
from wire.base import Channel
from wire.messages import Compute, Computed, Message, Tensor
from wire.rpc.client import connect
from wire.rpc.server import GrpcServer
from wire.rpc.stream import is_loopback
from wire.rpc.tls import Identity

SMALL, BULK = 16 << 10, 1 << 20
"""Bytes of a message: in a round trip, and where the rate is measured."""
ROUND_TRIPS, WARM_UP = 200, 20
AHEAD = 8
"""Messages on their way at once, where the rate is measured."""
SECONDS = 1.5
DEADLINE_S = 20.0
"""Longest wait for one answer, or for the start of the peer on this machine."""
TOTAL_S = 120.0
"""Longest measurement of one link. At 1 Mbit/s it takes about that long."""
SERVE_S = 600.0
"""How long a peer waits to be measured."""

Step = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Link:
    """Of one stream: payload in bits a second, one way, and seconds of a round trip of `SMALL` bytes each way."""

    address: str
    loopback: bool
    """The peer is on this machine, and no network is in between."""
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
        self._end = time.monotonic() + TOTAL_S
        self._queue: SimpleQueue[Message | ODMoEError | None] = SimpleQueue()

    def on_message(self, message: Message) -> None:
        self._queue.put(message)

    def on_close(self, error: ODMoEError | None) -> None:
        self._queue.put(error)

    def next(self) -> Computed:
        """Raises LinkError where the stream has ended, DeadlineError."""
        left = self._end - time.monotonic()
        try:
            found = self._queue.get(timeout=max(0.0, min(DEADLINE_S, left)))
        except Empty:
            if left < DEADLINE_S:
                raise DeadlineError(
                    f"the link could not be measured within {TOTAL_S:g} s; it is too slow, or the peer is busy"
                ) from None
            raise DeadlineError(f"the peer did not answer within {DEADLINE_S:g} s; is it busy, or frozen?") from None
        if isinstance(found, Computed):
            return found
        raise found if isinstance(found, ODMoEError) else LinkError("the peer hung up while it was measured")


def measure_link(address: str, step: Step, secret: str | None = None, identity: Identity | None = None) -> Link:
    """Of a new stream to a peer that `serve` runs. `address`: host:port.

    Raises ConfigError, LinkError, SecretError, CertificateError or DeadlineError.
    """
    answers = _Answers()
    channel = connect(address, "worker", answers, secret, identity=identity)
    try:
        trips = _round_trips(channel, answers, step)
        rate = _rate(channel, answers, step)
    finally:
        channel.close()
    return Link(
        address, is_this_machine(address), rate, statistics.median(trips), statistics.quantiles(trips, n=10)[-1]
    )


def is_this_machine(address: str) -> bool:
    """Whether host:port is on this machine: a loopback address, or one of its own in a network."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if is_loopback(host):
        return True
    try:
        for family, kind, *_, place in socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing: the kernel chooses the address to send from
                if probe.getsockname()[0] == probe.getpeername()[0]:
                    return True
    except OSError:
        pass
    return False


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
    """The address of a peer in a process of its own on this machine. It ends with this process.

    Raises LaunchError.
    """
    command, pipe = [sys.executable, "-m", "odmoe.bench.link"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        expired = threading.Event()

        def end() -> None:
            expired.set()
            process.kill()

        late = threading.Timer(DEADLINE_S, end)
        late.start()
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                error = process.stderr.read().strip().splitlines() if process.stderr else []
                code = process.wait(DEADLINE_S)
                why = f"did not start within {DEADLINE_S:g} s" if expired.is_set() else f"ended with exit code {code}"
                raise LaunchError(f"the peer on this machine {why}: {error[-1] if error else 'it printed no error'}")
            late.cancel()
            yield line.strip()
        finally:
            late.cancel()
            process.kill()


def _serve_parent() -> None:
    """The peer of `loopback_peer`: be measured until standard input ends, which it does when that process ends."""
    server = GrpcServer(Echo(), "worker")
    print(server.address, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()
    server.close(0.5)


def serve(host: str, port: int, secret: str | None, identity: Identity | None, ready: Callable[[str], None]) -> None:
    """Be measured, for `SERVE_S` seconds or until Ctrl-C. Raises ConfigError, LaunchError."""
    server = GrpcServer(Echo(), "worker", host, port, secret, identity)
    try:
        ready(server.address)
        time.sleep(SERVE_S)
    finally:
        server.close(0.5)


if __name__ == "__main__":
    _serve_parent()
