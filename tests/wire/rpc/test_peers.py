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
from support.paths import ROOT
from support.streams import Answering, EchoNode, Recorder
from wire.messages import Compute, Evict, Load, Loaded, Tensor
from wire.rpc.pulse import PULSE, Pulse

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
        child.communicate(timeout=10)


NODE = """
import sys, time
from wire.rpc.client import connect
from wire.rpc.server import GrpcServer
from wire.messages import Load, Loaded
class Node:
    def accept(self, reply): self.reply = reply; return self
    def on_message(self, message):
        time.sleep(message.slot)  # how long the handler is to be busy
        self.reply.send(Loaded(message.load_id, 10, 0.25))
    def on_close(self, error): pass
"""
SERVER = NODE + "server = GrpcServer(Node(), 'worker'); print(server.address, flush=True); sys.stdin.read()"


# By its silence, not by gRPC's keepalive, which takes twice as long.
FATES = [(signal.SIGKILL, "the stream"), (signal.SIGSTOP, rf"has been silent for {PULSE.lost_after_s:g} s")]


@pytest.mark.parametrize(("fate", "said"), FATES)
def test_server_lost_mid_stream(kit, fate, said):
    heard = Recorder()
    with process(SERVER) as (child, address):
        channel = kit.connect(address, heard)
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
    address = kit.serve(node).address
    client = NODE + f"channel = connect('{address}', 'worker', Node()); print('up', flush=True); sys.stdin.read()"
    with process(client) as (child, _):
        child.send_signal(fate)
        error = node.streams[0].end()
        assert isinstance(error, LinkError)
        assert re.search(said, str(error))
        with pytest.raises(LinkError, match="closed"):
            node.streams[0].reply.send(Loaded(1, 0, 0.0))


def test_a_short_freeze_is_forgiven(kit):
    heard = Recorder()
    with process(SERVER) as (child, address):
        channel = kit.connect(address, heard)
        child.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        child.send_signal(signal.SIGCONT)
        channel.send(Load(1, 0, 0, 0))
        assert heard.take(1) == ECHO
        time.sleep(1.5)
        assert not heard.ends


@pytest.mark.parametrize("busy", ["node", "main node"])
def test_a_busy_handler_is_not_a_dead_one(kit, busy):
    class Slow(Recorder):
        def on_message(self, message):
            super().on_message(message)
            if busy == "main node" and self.got.qsize() == 1:
                time.sleep(5)

    heard = Slow()
    with process(SERVER) as (_, address):
        channel = kit.connect(address, heard)
        channel.send(Load(1, 5 if busy == "node" else 0, 0, 0))
        channel.send(Load(2, 0, 0, 0))
        assert [answer.load_id for answer in heard.take(2)] == [1, 2]
        time.sleep(1.5)  # where time with a message in hand counted as silence, it would be held against the peer now
        assert not heard.ends


def test_beats_reach_no_handler(kit):
    quick = Pulse(beat_s=0.02, lost_after_s=1.0)
    node, heard = EchoNode(), Recorder()
    channel = kit.connect(kit.serve(node, pulse=quick).address, heard, pulse=quick)
    time.sleep(1.5)  # 75 beats each way, and longer than a silent peer would have
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
        with contextlib.suppress(OSError):
            while not stop.is_set() and (data := source.recv(8192)):
                time.sleep(len(data) / bytes_a_second)
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


def test_a_large_message_on_a_slow_link_is_not_silence(kit):
    """4 MB at 10 Mbit/s take more than three seconds, in which nothing whole arrives."""
    node, heard = EchoNode(), Recorder()
    rows = Tensor("uint8", (4_000_000,), bytes(4_000_000))
    with slow_link(kit.serve(node).address, 1.25e6) as address:
        channel = kit.connect(address, heard)
        start = time.monotonic()
        channel.send(Compute(1, 0, 0, 0, rows, Tensor("float32", (1,), bytes(4)), evict=True))
        assert node.streams[0].take(1)[0].hidden == rows
        assert time.monotonic() - start > PULSE.lost_after_s  # or the link was not slow
        assert heard.take(1)[0].output == rows
        assert not heard.ends


def test_an_idle_stream_stays(kit):
    heard = Recorder()
    channel = kit.connect(kit.serve().address, heard)
    time.sleep(3)  # two keepalives
    assert not heard.ends
    channel.send(Load(1, 0, 0, 0))
    assert heard.take(1) == ECHO


def test_server_close_is_peaceful_and_bounded(kit):
    held = threading.Event()

    class Stuck(Answering):
        def on_message(self, message):
            held.wait(20)

    node, calm, stuck = EchoNode(), Recorder(), Recorder()
    server = kit.serve(node)
    kit.connect(server.address, calm)
    node.make = Stuck
    kit.connect(server.address, stuck).send(Evict(0))
    start = time.monotonic()
    server.close(0.5)
    assert time.monotonic() - start < 4
    assert calm.end() is None
    held.set()
    stuck.end()


def test_threads_end_with_their_streams(kit):
    server = kit.serve()
    for _ in range(3):
        heard = Recorder()
        kit.connect(server.address, heard).close()
        assert heard.end() is None
    server.close(0.5)
    deadline = time.monotonic() + 5
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
        assert child.wait(10) == 0
