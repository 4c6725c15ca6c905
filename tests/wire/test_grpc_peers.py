"""Peers that die, freeze, idle or leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from scheduler.errors import LinkError
from wire.messages import Evict, Load, Loaded

ROOT = Path(__file__).resolve().parents[2]
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
from wire.grpc_client import connect
from wire.grpc_server import GrpcServer
from wire.messages import Load, Loaded
class Node:
    def accept(self, reply): self.reply = reply; return self
    def on_message(self, message): self.reply.send(Loaded(message.load_id, 10, 0.25))
    def on_close(self, error): pass
"""
SERVER = NODE + "server = GrpcServer(Node(), 'worker'); print(server.address, flush=True); sys.stdin.read()"


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_server_lost_mid_stream(kit, fate):
    heard = kit.Recorder()
    with process(SERVER) as (child, address):
        channel = kit.connect(address, heard)
        channel.send(Load(1, 0, 0, 0))
        assert heard.take(1) == ECHO
        child.send_signal(fate)
        error = heard.end(within=10)
        assert isinstance(error, LinkError)
        assert f"the worker at {address}" in str(error)
        with pytest.raises(LinkError, match="closed"):
            channel.send(Load(2, 0, 0, 0))


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_client_lost_mid_stream(kit, fate):
    node = kit.EchoNode()
    address = kit.serve(node).address
    client = NODE + f"channel = connect('{address}', 'worker', Node()); print('up', flush=True); sys.stdin.read()"
    with process(client) as (child, _):
        child.send_signal(fate)
        assert isinstance(node.streams[0].end(within=10), LinkError)
        with pytest.raises(LinkError, match="closed"):
            node.streams[0].reply.send(Loaded(1, 0, 0.0))


def test_an_idle_stream_stays(kit):
    heard = kit.Recorder()
    channel = kit.connect(kit.serve().address, heard)
    time.sleep(3)  # two keepalives
    assert not heard.ends
    channel.send(Load(1, 0, 0, 0))
    assert heard.take(1) == ECHO


def test_server_close_is_peaceful_and_bounded(kit):
    held = threading.Event()

    class Stuck(kit.Answering):
        def on_message(self, message):
            held.wait(20)

    node, calm, stuck = kit.EchoNode(), kit.Recorder(), kit.Recorder()
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
        heard = kit.Recorder()
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
