"""Streams that never say Hello end after a while, and never take the place of a main node that does."""

from __future__ import annotations

import logging
import time

import pytest

from main_node.engine.peer import PeerHandler
from scheduler.errors import LinkError, ProtocolError, VersionError
from support.nodes.streams import WAIT_S, EchoNode, Recorder
from wire import refusals as refusals_module
from wire import sessions as sessions_module
from wire.messages import PROTOCOL_VERSION, Echo, Failed, Hello, WorkerReady
from wire.refusals import MAX_CALLERS, MOST_LINES, Refusals, host_of
from wire.rpc import server as server_module
from wire.sessions import MAX_STREAMS, Session, Sessions

HELLO = Hello(PROTOCOL_VERSION, "abc", "float32", "main", False, "one main node")


class Quiet(Session):
    """A node's end of a stream that answers Hello and Echo."""

    def ready(self):
        return WorkerReady(PROTOCOL_VERSION, self.name, 1, 1, "cpu", "memory", "h", 1, "p", 1, 0.0)

    def dispatch(self, message):
        raise ProtocolError("nothing is expected")

    def report(self, error, about=None):
        self.reply.send(Failed(type(error).__name__, str(error)))

    def end(self):
        pass


@pytest.fixture
def sessions():
    return Sessions()


@pytest.fixture
def address(kit, sessions):
    node = EchoNode(lambda reply: sessions.add(Quiet("worker 3", ("abc", "float32"), sessions, reply)))
    return kit.serve(node).address


def main_node(kit, address) -> PeerHandler:
    peer = PeerHandler("worker 3", lambda event: None, lambda error: None)
    peer.open(lambda handler: kit.connect(address, handler), HELLO, WAIT_S)
    return peer


def echoes(peer: PeerHandler) -> bool:
    return isinstance(peer.ask(Echo(1), Echo, WAIT_S), Echo)


def until(found) -> None:
    end = time.monotonic() + WAIT_S
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_main_node_is_let_in_whatever_else_is_open(kit, address, sessions, monkeypatch):
    """And stays, whatever is opened after it."""
    monkeypatch.setattr(sessions_module, "HELLO_S", 10 * WAIT_S)  # a busy machine opens 64 streams slowly
    silent = [Recorder() for _ in range(MAX_STREAMS - 1)]
    for heard in silent:
        kit.connect(address, heard)
    first = main_node(kit, address)
    assert not any(heard.ends for heard in silent), "there was room"
    again = main_node(kit, address)  # as after a lost connection
    assert echoes(again)
    until(lambda: first.has_ended)
    more = [Recorder() for _ in range(8)]
    for heard in more:
        kit.connect(address, heard)
        assert echoes(again)
    until(lambda: sum(bool(heard.ends) for heard in silent) >= len(more))
    ended = [bool(heard.ends) for heard in silent]
    assert ended == sorted(ended, reverse=True), "the oldest make room"
    [failed] = silent[0].take(1)
    assert isinstance(failed, Failed)
    assert "64 streams are open, and this one is the oldest without a Hello" in failed.message
    assert sessions.refusals.counts() == {"127.0.0.1": sum(ended)}


def test_hello_has_a_deadline(kit, address, sessions, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "wire")
    monkeypatch.setattr(sessions_module, "HELLO_S", 0.3)
    peer, silent, wrong = main_node(kit, address), Recorder(), Recorder()
    kit.connect(address, silent)
    kit.connect(address, wrong).send(Hello(1, "abc", "float32", "old"))
    for heard in (silent, wrong):
        heard.end()
    [failed] = silent.take(1)
    assert isinstance(failed, Failed)
    assert failed.message == "worker 3: no Hello came within 0.3 s; a stream begins with Hello"
    first, second = wrong.take(2)
    assert (first.error, second.error) == (VersionError.__name__, ProtocolError.__name__)
    time.sleep(0.5)
    assert echoes(peer), "the deadline is that of the first Hello"
    text = [record.getMessage() for record in caplog.records]
    assert sum("no Hello came" in line for line in text) == 1, "one host's fault is logged once in a while"


def test_a_full_server_is_an_error_of_the_link(kit, monkeypatch):
    """It may have room soon: who reconnects, goes on."""
    monkeypatch.setattr(server_module, "MAX_CALLS", 1)
    address = kit.serve().address
    kit.connect(address, Recorder())
    with pytest.raises(LinkError, match="as many streams as it can take"):
        kit.connect(address, Recorder())


def test_refusals_are_counted_by_host(caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "wire")
    refusals = Refusals()
    for port in range(50):
        refusals.say(f"ipv4:10.0.0.7:{port}", LinkError("gone"))
    refusals.say("ipv4:10.0.0.7:99", LinkError("late"))
    refusals.say("the client at ipv6:[::1]:4000", LinkError("gone"))
    assert refusals.counts() == {"10.0.0.7": 51, "[::1]": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "LinkError: refused ipv4:10.0.0.7:0: gone",
        "LinkError: refused ipv4:10.0.0.7:99: late (51 refused from there so far)",
        "LinkError: refused the client at ipv6:[::1]:4000: gone",
    ]
    for number in range(2 * MAX_CALLERS):
        refusals.say(f"ipv4:10.0.{number // 250}.{number % 250}:1", LinkError("gone"))
    assert len(refusals.counts()) == MAX_CALLERS
    assert len(caplog.records) == MOST_LINES, "of all hosts together"
    monkeypatch.setattr(refusals_module, "LINE_S", 0.0)
    refusals.say("ipv4:10.0.0.7:100", LinkError("gone"))
    lost = 2 * MAX_CALLERS - (MOST_LINES - 3) - 1  # the first host's first text was logged already
    assert f"({lost} of other hosts or for other reasons before were not" in caplog.records[-1].getMessage()
    assert host_of("main") == "main"
