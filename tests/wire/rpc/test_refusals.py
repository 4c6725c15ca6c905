"""Who does not belong is refused, and both sides say why: with the same error, and each with its own words."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from main_node.engine.peer import PeerHandler
from scheduler.errors import (
    CertificateError,
    HandshakeError,
    LinkError,
    ModelMismatchError,
    ProtocolError,
    SecretError,
    VersionError,
)
from support.nodes.streams import WAIT_S, Answering, EchoNode, Recorder
from wire.handshake import check_hello
from wire.messages import PROTOCOL_VERSION, Failed, Hello, Load, Loaded, WorkerReady
from wire.rpc import doorman
from wire.rpc.tls import Identity
from wire.rpc.tls_probe import TlsProbe
from wire.sessions import Session, Sessions

ECHO = [Loaded(1, 10, 0.25)]


@pytest.fixture
def said(caplog):
    """What the logger `wire` has said at WARNING, once it has said something that fits."""
    caplog.set_level(logging.WARNING, "wire")

    def wait(pattern: str) -> str:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            for record in caplog.records:
                if record.levelno == logging.WARNING and re.search(pattern, record.getMessage()):
                    assert record.name == "wire"
                    return record.getMessage()
            time.sleep(0.02)
        raise AssertionError(f"nothing like {pattern!r} was logged: {[r.getMessage() for r in caplog.records]}")

    return wait


def without_reading(folder):
    """The identity in a folder whose dates are over: as that of a process that has run for long."""
    contexts = [ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)]
    for context in contexts:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(folder / "ca.pem")
        context.load_cert_chain(folder / "node.pem", folder / "node.key")
        context.set_alpn_protocols(["h2"])
    texts = ((folder / name).read_bytes() for name in ("ca.pem", "node.pem", "node.key"))
    return Identity(*texts, 0.0, *contexts, contexts[0])


def refuses(kit, server, error, pattern, **settings) -> str:
    node_heard = Recorder()
    with pytest.raises(error, match=pattern) as raised:
        kit.connect(server.address, node_heard, **settings)
    assert type(raised.value) is error, "only found at the deadline"
    assert not node_heard.ends
    return str(raised.value)


def lets_in(kit, server, identity, secret="s3cret") -> None:
    heard = Recorder()
    kit.connect(server.address, heard, secret=secret, identity=identity).send(Load(1, 0, 0, 0))
    assert heard.take(1) == ECHO


# --- secrets, versions, models -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "what"), [("gu3ss", "wrong"), (None, "missing")])
def test_secret(kit, said, given, what):
    server = kit.serve(secret="s3cret")
    text = refuses(kit, server, SecretError, f"the secret is {what}; give both nodes the same", secret=given)
    logged = said(rf"^SecretError: refused ipv4:127\.0\.0\.1:\d+: the secret is {what}$")
    assert "s3cret" not in text + logged
    assert "gu3ss" not in text + logged


@pytest.mark.parametrize(
    ("changes", "error", "what"),
    [
        ({"version": PROTOCOL_VERSION + 1}, VersionError, "protocol version"),
        ({"fingerprint": "xyz"}, ModelMismatchError, "model fingerprint abc, main has xyz"),
        ({"dtype": "float16"}, ModelMismatchError, "dtype float32, main has float16"),
        ({"version": 1, "fingerprint": "xyz"}, VersionError, "protocol version"),
    ],
)
def test_hello(said, changes, error, what):
    hello = Hello(**{"version": PROTOCOL_VERSION, "fingerprint": "abc", "dtype": "float32", "node": "main"} | changes)
    with pytest.raises(error, match=f"worker 3 has {what}"):
        check_hello(hello, "worker 3", "abc", "float32", "the client at ipv4:10.77.0.11:999")
    said(rf"^{error.__name__}: refused the client at ipv4:10\.77\.0\.11:999: worker 3 has {what}")


class Guarded(Session):
    """A node's end of a stream that does nothing but check who says Hello."""

    def ready(self):
        return WorkerReady(PROTOCOL_VERSION, self.name, 1, 1, "cpu", "memory", "h", 1, "p", 1, 0.0)

    def dispatch(self, message):
        raise ProtocolError("nothing is expected")

    def report(self, error, about=None):
        self.reply.send(Failed(type(error).__name__, str(error)))

    def end(self):
        pass


@pytest.mark.parametrize(
    ("changes", "error"), [({"version": 1}, VersionError), ({"fingerprint": "xyz"}, ModelMismatchError)]
)
def test_hello_over_a_stream(kit, said, changes, error):
    """Both sides hear the same, and the node knows from where it was called."""
    sessions = Sessions()
    node = EchoNode(lambda reply: sessions.add(Guarded("worker 3", ("abc", "float32"), sessions, reply)))
    lost = []
    peer = PeerHandler("worker 3", lambda event: None, lost.append)
    hello = Hello(**{"version": PROTOCOL_VERSION, "fingerprint": "abc", "dtype": "float32", "node": "main"} | changes)
    address = kit.serve(node).address
    with pytest.raises(error, match="worker 3 has") as raised:
        peer.open(lambda handler: kit.connect(address, handler), hello, WAIT_S)
    assert type(raised.value) is error
    logged = said(rf"^{error.__name__}: refused the client at ipv4:127\.0\.0\.1:\d+: worker 3 has")
    assert str(raised.value) in logged


def test_hello_that_fits(caplog):
    check_hello(Hello(PROTOCOL_VERSION, "abc", "float32", "main"), "worker 3", "abc", "float32")
    assert not caplog.records


@pytest.mark.parametrize(
    "error", [SecretError, CertificateError, VersionError, ModelMismatchError, HandshakeError, ProtocolError, LinkError]
)
def test_an_error_keeps_its_name_over_the_wire(kit, error):
    def refuse(reply):
        raise error("not this one")

    with pytest.raises(error, match="not this one") as raised:
        kit.connect(kit.serve(EchoNode(refuse)).address, Recorder())
    assert type(raised.value) is error

    class Refusing(Answering):
        def on_message(self, message):
            raise error("not this message")

    heard = Recorder()
    kit.connect(kit.serve(EchoNode(Refusing)).address, heard).send(Load(1, 0, 0, 0))
    assert type(heard.end()) is error


@pytest.mark.parametrize(
    "name", ["ValueError", "os", "ODMoEError", "PromptError", "ODMoEError.__init__", "", "annotations"]
)
def test_a_name_that_is_no_error_between_nodes(kit, name):
    def refuse(requests, context):
        context.set_trailing_metadata((("odmoe-error", name),))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        method = grpc.stream_stream_rpc_method_handler(refuse)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("odmoe.Worker", {"Work": method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with pytest.raises(HandshakeError) as raised:
            kit.connect(f"127.0.0.1:{port}", Recorder())
        server.stop(None).wait(WAIT_S)
    assert type(raised.value) is HandshakeError


# --- certificates ------------------------------------------------------------------------------------------------


def test_client_whose_certificate_has_expired(kit, authority, said):
    ca = authority()
    server = kit.serve(secret="s3cret", identity=Identity.read(ca.folder()))
    expired = without_reading(ca.folder(days=(-5, -1)))
    refuses(
        kit,
        server,
        CertificateError,
        "refuses this host's certificate: it has expired",
        identity=expired,
        secret="s3cret",
    )
    said(r"^CertificateError: refused 127\.0\.0\.1: its certificate has expired .*; renew")
    lets_in(kit, server, Identity.read(ca.folder()))


def test_client_of_another_ca(kit, authority, said):
    ca, other = authority("ours"), authority("theirs")
    server = kit.serve(secret="s3cret", identity=Identity.read(ca.folder()))
    stranger = without_reading(other.folder(ca=ca))
    refuses(
        kit,
        server,
        CertificateError,
        "this host's certificate: it is not signed by the other's CA",
        identity=stranger,
        secret="s3cret",
    )
    said(r"^CertificateError: refused 127\.0\.0\.1: its certificate is signed by another CA")
    lets_in(kit, server, Identity.read(ca.folder()))


def test_two_clusters(kit, authority, said):
    server = kit.serve(secret="s3cret", identity=Identity.read(authority("ours").folder()))
    stranger = Identity.read(authority("theirs").folder())
    refuses(
        kit,
        server,
        CertificateError,
        r"refused the worker at .*: its certificate is signed by another CA",
        identity=stranger,
        secret="s3cret",
    )
    said(r"^CertificateError: refused 127\.0\.0\.1: it does not take this host's certificate: it is not signed by")


def test_server_whose_certificate_has_expired(kit, authority, said):
    ca = authority()
    server = kit.serve(secret="s3cret", identity=without_reading(ca.folder(days=(-5, -1))))
    text = refuses(
        kit,
        server,
        CertificateError,
        "refused the worker at .* expired on 20..-..-.. .*this host's clock says",
        identity=Identity.read(ca.folder()),
        secret="s3cret",
    )
    assert "renew it with `odmoe certs`" in text
    said(r"^CertificateError: refused 127\.0\.0\.1: it does not take this host's certificate: it has expired")


def test_server_whose_certificate_is_for_another_address(kit, authority, said):
    ca = authority()
    server = kit.serve(secret="s3cret", identity=Identity.read(ca.folder("127.0.0.9")))
    refuses(
        kit,
        server,
        CertificateError,
        r"its certificate is for 127\.0\.0\.9, not for 127\.0\.0\.1",
        identity=Identity.read(ca.folder()),
        secret="s3cret",
    )
    said(
        r"^CertificateError: refused 127\.0\.0\.1: it does not take this host's certificate: it is for another address"
    )


def test_client_without_a_certificate(kit, authority, said):
    ca = authority()
    node = EchoNode()
    server = kit.serve(node, secret="s3cret", identity=Identity.read(ca.folder()))
    credentials = grpc.ssl_channel_credentials(Identity.read(ca.folder()).ca)
    again_soon = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100)]
    with grpc.secure_channel(server.address, credentials, options=again_soon) as channel:
        call = channel.stream_stream("/odmoe.Worker/Work")(iter([]), timeout=WAIT_S, wait_for_ready=True)
        said(r"^CertificateError: refused 127\.0\.0\.1: it shows no certificate")
        assert not call.done()  # it may go on trying
        call.cancel()
    assert not node.streams
    lets_in(kit, server, Identity.read(ca.folder()))


def test_client_without_tls(kit, authority, said):
    ca = authority()
    server = kit.serve(secret="s3cret", identity=Identity.read(ca.folder()))
    refuses(kit, server, CertificateError, "speaks TLS only, and this host has no certificate", secret="s3cret")
    said(r"^CertificateError: refused 127\.0\.0\.1: it speaks no TLS, which is demanded here")
    lets_in(kit, server, Identity.read(ca.folder()))


def test_server_without_tls(kit, authority):
    identity = Identity.read(authority().folder())
    refuses(kit, kit.serve(), CertificateError, r"the worker at .* speaks no TLS; start it with", identity=identity)


def test_a_caller_that_does_not_come_back(kit, authority, said, monkeypatch):
    """Why it could not be let in is not known then, but that it was there is."""
    monkeypatch.setattr(doorman, "GIVEN_UP_S", 0.3)
    server = kit.serve(secret="s3cret", identity=Identity.read(authority().folder()))
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 2) as visitor:
        visitor.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with contextlib.suppress(OSError):
            visitor.recv(100)
    said(r"^CertificateError: refused 127\.0\.0\.1: it connects and leaves without opening a stream")


class Examined:
    """The context by which callers are examined; counts them."""

    def __init__(self, context):
        self._context = context
        self.count = 0

    def wrap_socket(self, *args, **settings):
        self.count += 1
        return self._context.wrap_socket(*args, **settings)


def test_callers_that_stall_do_not_keep_others_out(kit, authority, monkeypatch):
    """Connections that say nothing cost a new one at most `SPEND_S` and one examination more, all together."""
    monkeypatch.setattr(doorman, "EXAMINE_S", 0.05)
    monkeypatch.setattr(doorman, "SPEND_S", 0.1)
    ca = authority()
    identity = Identity.read(ca.folder())
    examined = Examined(identity.as_server)
    server = kit.serve(secret="s3cret", identity=replace(identity, as_server=examined))
    host, _, port = server.address.rpartition(":")
    end = time.monotonic() + WAIT_S
    while not examined.count:  # it is one only from when the server has noticed that an earlier one has gone
        assert time.monotonic() < end
        socket.create_connection((host, int(port)), WAIT_S).close()
        time.sleep(0.05)
    examined.count = 0
    stalled = []
    for _ in range(8):
        stalled.append(socket.create_connection((host, int(port)), WAIT_S))
        time.sleep(0.1)  # time to examine this one alone
    lets_in(kit, server, Identity.read(ca.folder()))
    for each in stalled:
        each.close()
    assert 1 <= examined.count <= 3


def test_a_caller_examined_in_anothers_place_is_not_called_refused(kit, authority, monkeypatch):
    """It belongs here, and is hung up on because its address was refused before: its probe must not blame its files."""
    ca = authority()
    server = kit.serve(identity=Identity.read(ca.folder()))
    monkeypatch.setattr(doorman.Doorman, "_suspects", lambda self, address: True)
    host, _, port = server.address.rpartition(":")
    probe = TlsProbe(host, int(port), Identity.read(ca.folder()), "the worker")
    assert [probe.probe(2.0) for _ in range(6)] == [None] * 6


@pytest.mark.slow
def test_refused_callers_do_not_keep_others_out(kit, authority, said):
    """One address, two clients at once: one belongs here, one does not and tries all the time."""
    ca = authority()
    server = kit.serve(secret="s3cret", identity=Identity.read(ca.folder()))
    over = threading.Event()
    bad = without_reading(ca.folder(days=(-5, -1)))

    def bother():
        while not over.is_set():
            with (
                contextlib.suppress(grpc.RpcError),
                grpc.secure_channel(server.address, bad.channel_credentials()) as channel,
            ):
                channel.unary_unary("/odmoe.Worker/Work")(b"", timeout=0.3)

    botherer = threading.Thread(target=bother)
    botherer.start()
    try:
        good = Identity.read(ca.folder())
        for _ in range(10):
            lets_in(kit, server, good)
    finally:
        over.set()
        botherer.join(WAIT_S)
    said("its certificate has expired")
