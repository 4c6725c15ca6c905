"""Peers that die, freeze, idle or leave."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from scheduler.errors import LinkError
from support.nodes.streams import WAIT_S, Answering, EchoNode, Recorder
from support.paths import ROOT
from wire.messages import Compute, Evict, Load, Loaded, Message, Tensor
from wire.rpc.pulse import PULSE, Monitor, Pulse

ECHO = [Loaded(1, 10, 0.25)]


@contextmanager
def process(code: str):
    """Another interpreter that runs `code`; yields it and the first line that it printed."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        yield child, child.stdout.readline().strip()
    finally:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.communicate(timeout=WAIT_S)


NODE = """
import sys
from wire.rpc.client import connect
from wire.rpc.server import GrpcServer
from wire.messages import Loaded
class Node:
    def accept(self, reply): self.reply = reply; return self
    def on_message(self, message): self.reply.send(Loaded(message.load_id, 10, 0.25))
    def on_close(self, error): pass
"""
SERVER = NODE + "server = GrpcServer(Node(), 'worker'); print(server.address, flush=True); sys.stdin.read()"


# By its silence, not by gRPC's keepalive, which takes twice as long.
FATES = [(signal.SIGKILL, "the stream"), (signal.SIGSTOP, rf"has been silent for {PULSE.lost_after_s:g} s")]


@pytest.mark.parametrize(("fate", "said"), FATES)
def test_server_lost_mid_stream(kit, fate, said):
    heard = Recorder()
    with process(SERVER) as (child, address):
        channel = kit.connect(address, heard, pulse=PULSE)
        channel.send(Load(1, 0, 0, 0))
        assert heard.take(1) == ECHO
        child.send_signal(fate)
        error = heard.end()
        assert isinstance(error, LinkError)
        assert f"the worker at {address}" in str(error)
        assert re.search(said, str(error))
        with pytest.raises(LinkError, match="closed"):
            channel.send(Load(2, 0, 0, 0))


@pytest.mark.parametrize(("fate", "said"), FATES)
def test_client_lost_mid_stream(kit, fate, said):
    node = EchoNode()
    address = kit.serve(node, pulse=PULSE).address
    client = NODE + f"channel = connect('{address}', 'worker', Node()); print('up', flush=True); sys.stdin.read()"
    with process(client) as (child, _):
        child.send_signal(fate)
        error = node.streams[0].end()
        assert isinstance(error, LinkError)
        assert re.search(said, str(error))
        with pytest.raises(LinkError, match="closed"):
            node.streams[0].reply.send(Loaded(1, 0, 0.0))


@pytest.mark.slow
def test_a_short_freeze_is_forgiven(kit):
    heard = Recorder()
    with process(SERVER) as (child, address):
        channel = kit.connect(address, heard)
        child.send_signal(signal.SIGSTOP)
        channel.send(Load(1, 0, 0, 0))
        time.sleep(1.1)  # a keepalive is due meanwhile
        assert heard.got.empty()
        child.send_signal(signal.SIGCONT)
        assert heard.take(1) == ECHO
        channel.send(Load(1, 0, 0, 0))
        assert heard.take(1) == ECHO
        assert not heard.ends
        channel.close()
        assert heard.end() is None


QUICK, PATIENT_QUICK = Pulse(beat_s=0.02, lost_after_s=0.5), Pulse(beat_s=0.02, lost_after_s=60)
LONG = 2 * int(QUICK.lost_after_s / QUICK.beat_s)
"""So many beats take twice as long as a silent peer has."""


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released for each message, a beat too, that arrives at either end."""
    found = threading.Semaphore(0)
    hear = Monitor.hear

    def counted(self: Monitor, coming: int = 0) -> None:
        hear(self, coming)
        found.release()

    monkeypatch.setattr(Monitor, "hear", counted)
    return found


def wait_for(arrivals: threading.Semaphore, count: int) -> None:
    for _ in range(count):
        assert arrivals.acquire(timeout=WAIT_S), f"fewer than {count} came"


@pytest.mark.slow
@pytest.mark.parametrize("busy", ["node", "main node"])
def test_a_busy_handler_is_not_a_dead_one(kit, beats, busy):
    """The other end goes on hearing it; and its own end, which hears nothing meanwhile, does not count that."""
    arrived, free = threading.Event(), threading.Event()

    def held(kind: type[Recorder]) -> type[Recorder]:
        class Held(kind):
            def on_message(self, message: Message) -> None:
                arrived.set()
                assert free.wait(2 * WAIT_S)
                super().on_message(message)

        return Held

    node = EchoNode(held(Answering) if busy == "node" else Answering)
    heard = Recorder() if busy == "node" else held(Recorder)()
    there, here = (QUICK, PATIENT_QUICK) if busy == "node" else (PATIENT_QUICK, QUICK)
    channel = kit.connect(kit.serve(node, pulse=there).address, heard, pulse=here)
    channel.send(Load(1, 0, 0, 0))
    channel.send(Load(2, 0, 0, 0))
    assert arrived.wait(WAIT_S)
    wait_for(beats, LONG)
    free.set()
    assert [answer.load_id for answer in heard.take(2)] == [1, 2]
    wait_for(beats, 2 * LONG)  # were time with a message in hand counted as silence, this would be too much
    assert not heard.ends
    assert not node.streams[0].ends


def test_beats_reach_no_handler(kit, beats):
    node, heard = EchoNode(), Recorder()
    channel = kit.connect(kit.serve(node, pulse=QUICK).address, heard, pulse=QUICK)
    wait_for(beats, 2 * LONG)
    channel.send(Load(1, 0, 0, 0))
    assert heard.take(1) == ECHO
    assert node.streams[0].take(1) == [Load(1, 0, 0, 0)]
    assert heard.got.empty()
    assert node.streams[0].got.empty()


@contextmanager
def slow_link(address: str, bytes_a_second: float):
    """A way to `address` that lets so many bytes through, and buffers little. Yields its own address."""
    host, _, port = address.rpartition(":")
    stop = threading.Event()

    def pump(source, sink):
        free_at = 0.0  # when the link has sent what it has taken
        with contextlib.suppress(OSError):
            while not stop.is_set() and (data := source.recv(8192)):
                free_at = max(free_at, time.monotonic()) + len(data) / bytes_a_second
                time.sleep(max(0.0, free_at - time.monotonic()))
                sink.sendall(data)

    def accept():
        with contextlib.suppress(OSError):
            near, _ = listener.accept()
            far = socket.create_connection((host, int(port)), 5)
            ends.extend((near, far))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    ends: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        stop.set()
        for end in ends:
            end.close()


@pytest.mark.slow
def test_a_large_message_on_a_slow_link_is_not_silence(kit):
    """1 MB at 1 MB/s takes a second, in which nothing whole arrives; a slower link yet would be allowed."""
    pulse = Pulse(beat_s=0.05, lost_after_s=0.5, slowest_link=1e5)
    node, heard = EchoNode(), Recorder()
    rows = Tensor("uint8", (1_000_000,), bytes(1_000_000))
    with slow_link(kit.serve(node, pulse=pulse).address, 1e6) as address:
        channel = kit.connect(address, heard, pulse=pulse)
        start = time.monotonic()
        channel.send(Compute(1, 0, 0, 0, rows, Tensor("float32", (1,), bytes(4)), evict=True))
        assert node.streams[0].take(1)[0].hidden == rows
        assert time.monotonic() - start > pulse.lost_after_s  # or the link was not slow
        assert heard.take(1)[0].output == rows
        assert not heard.ends
        channel.close()
        assert heard.end() is None


@pytest.mark.slow
def test_an_idle_stream_stays(kit):
    heard = Recorder()
    channel = kit.connect(kit.serve().address, heard)
    time.sleep(2.2)  # two keepalives
    assert not heard.ends
    channel.send(Load(1, 0, 0, 0))
    assert heard.take(1) == ECHO


def test_server_close_is_peaceful_and_bounded(kit):
    arrived, held = threading.Event(), threading.Event()

    class Stuck(Answering):
        def on_message(self, message):
            arrived.set()
            assert held.wait(2 * WAIT_S)

    node, calm, stuck = EchoNode(), Recorder(), Recorder()
    server = kit.serve(node)
    kit.connect(server.address, calm)
    node.make = Stuck
    kit.connect(server.address, stuck).send(Evict(0))
    assert arrived.wait(WAIT_S)
    server.close(0.2)  # although a handler has not come back
    assert calm.end() is None
    assert not held.is_set()
    held.set()
    stuck.end()


def test_threads_end_with_their_streams(kit):
    server = kit.serve()
    for _ in range(3):
        heard = Recorder()
        kit.connect(server.address, heard).close()
        assert heard.end() is None
    server.close(0.5)
    deadline = time.monotonic() + WAIT_S
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("odmoe-")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_process_may_end_with_streams_open():
    code = NODE + (
        "server = GrpcServer(Node(), 'worker'); channel = connect(server.address, 'worker', Node())\n"
        "print('up', flush=True)"
    )
    with process(code) as (child, said):
        assert said == "up"
        assert child.wait(WAIT_S) == 0
