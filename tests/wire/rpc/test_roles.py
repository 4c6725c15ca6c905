"""A host has the roles that its certificate states, and no other; and one main node at a time is served."""

from __future__ import annotations

import logging
import time
from contextlib import closing

import pytest

from main_node.engine.peer import PeerHandler
from odmoe.machines.certs import ensure_certs
from scheduler.errors import CertificateError, LinkError, OtherMainNodeError
from support.faults.links import Relay
from support.nodes.streams import WAIT_S, EchoNode, Recorder
from wire import sessions as sessions_module
from wire.messages import PROTOCOL_VERSION, Echo, Failed, Hello, Load, Loaded, WorkerReady
from wire.rpc.pulse import PULSE
from wire.rpc.server import GrpcServer
from wire.rpc.tls import Identity, role_name, roles_in
from wire.sessions import Session, Sessions

ROLES = ("main", "shadow", "worker")
SECRET = "s3cret"


# --- certificates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("roles", [("worker",), ("shadow",), ("shadow", "worker"), ()])
def test_only_a_main_node_opens_a_stream(kit, authority, caplog, roles):
    """Neither our client nor one that does not look at its own certificate, as a stranger's program may not."""
    caplog.set_level(logging.WARNING, "wire")
    ca, node = authority(), EchoNode()
    server = kit.serve(node, secret=SECRET, identity=Identity.read(ca.folder(roles=("worker",))))
    first = Recorder()
    main = kit.connect(server.address, first, secret=SECRET, identity=Identity.read(ca.folder(roles=("main",))))
    other = Identity.read(ca.folder(roles=roles))
    stated = " and ".join(roles)
    reason = f"is for the role {stated}, not for main" if roles else "is for no role, as those made by older versions"
    with pytest.raises(CertificateError, match=f"node.pem {reason}.*odmoe up"):
        kit.connect(server.address, Recorder(), secret=SECRET, identity=other)
    with pytest.raises(CertificateError, match=f"the certificate of ipv4:127.0.0.1:[0-9]+ {reason}.*odmoe up"):
        kit.connect(server.address, Recorder(), secret=SECRET, identity=other.whatever_role())
    assert [reason in record.getMessage() for record in caplog.records] == [True], "the worker's own log names it"
    assert len(node.streams) == 1
    main.send(Load(1, 0, 0, 0))
    assert first.take(1) == [Loaded(1, 10, 0.25)], "the main node that was there goes on"


@pytest.mark.parametrize(
    ("there", "wanted"), [(("worker",), "shadow"), (("shadow",), "worker"), (("main",), "worker"), ((), "worker")]
)
def test_a_node_of_another_role_is_not_connected(kit, authority, there, wanted):
    """Whatever it serves: its program does not look at its own certificate."""
    ca, node = authority(), EchoNode()
    server = kit.serve(node, identity=Identity.read(ca.folder(roles=there)).whatever_role())
    reason = f"is for the role {there[0]}, not for {wanted}" if there else "is for no role"
    with pytest.raises(CertificateError, match=f"refused the {wanted} at .*: its certificate {reason}"):
        kit.connect(server.address, Recorder(), kind=wanted, identity=Identity.read(ca.folder(roles=("main",))))
    assert not node.streams


def test_a_stage_is_a_shadows_and_only_a_shadow_calls_it(kit, authority):
    ca = authority()
    identities = {role: Identity.read(ca.folder(roles=(role,))) for role in ROLES}
    for role in ("main", "worker"):
        with pytest.raises(CertificateError, match="not for shadow"):
            GrpcServer(EchoNode(), "stage", identity=identities[role])
    with closing(GrpcServer(EchoNode(), "stage", identity=identities["shadow"])) as server:
        kit.connect(server.address, Recorder(), kind="stage", identity=identities["shadow"])
        for role in ("main", "worker"):
            other = identities[role].whatever_role()
            with pytest.raises(CertificateError, match=f"is for the role {role}, not for shadow"):
                kit.connect(server.address, Recorder(), kind="stage", identity=other)


def test_a_host_with_two_roles(kit, authority):
    """It opens streams and serves: each of its roles is one that it has."""
    identity = Identity.read(authority().folder(roles=("main", "worker")))
    heard = Recorder()
    kit.connect(kit.serve(identity=identity).address, heard, identity=identity).send(Load(1, 0, 0, 0))
    assert heard.take(1) == [Loaded(1, 10, 0.25)]
    assert identity.roles == {"main", "worker"}


@pytest.mark.parametrize("roles", [("main",), ("shadow",), ()])
def test_a_node_does_not_serve_what_its_host_is_not(kit, authority, roles):
    with pytest.raises(CertificateError, match=r"not for worker|for no role"):
        kit.serve(identity=Identity.read(authority().folder(roles=roles)))


def test_the_role_of_another_host(kit, authority):
    """Of this cluster, too: the address that is called decides."""
    ca = authority()
    server = kit.serve(identity=Identity.read(ca.folder("127.0.0.2", roles=("worker",))))
    with pytest.raises(CertificateError, match=r"its certificate is for 127\.0\.0\.2, not for 127\.0\.0\.1"):
        kit.connect(server.address, Recorder(), identity=Identity.read(ca.folder(roles=("main",))))


def test_another_clusters_main_node_with_the_same_secret(kit, authority):
    node = EchoNode()
    server = kit.serve(node, secret=SECRET, identity=Identity.read(authority("ours").folder()))
    with pytest.raises(CertificateError, match="another CA"):
        kit.connect(server.address, Recorder(), secret=SECRET, identity=Identity.read(authority("theirs").folder()))
    assert not node.streams


def test_certificates_as_they_are_made(kit, tmp_path):
    """`odmoe certs` gives each host the role of its name; called by its address or by its name, it is that."""
    ensure_certs(tmp_path, [("main", "127.0.0.9"), ("worker-3", "127.0.0.1")])
    main, worker = (Identity.read(tmp_path / address) for address in ("127.0.0.9", "127.0.0.1"))
    assert (main.roles, worker.roles) == ({"main"}, {"worker"})
    server, heard = kit.serve(identity=worker), Recorder()
    kit.connect(server.address, heard, identity=main).send(Load(1, 0, 0, 0))
    assert heard.take(1) == [Loaded(1, 10, 0.25)]
    with pytest.raises(CertificateError, match="is for the role worker, not for shadow"):
        kit.connect(server.address, Recorder(), kind="shadow", identity=main)
    with pytest.raises(CertificateError, match="is for the role worker, not for main"):
        kit.connect(server.address, Recorder(), identity=worker)


def test_names_of_roles():
    names = [role_name(role, host) for role in ROLES for host in ("10.0.0.1", "::1", "Box.lan")]
    assert names[0] == "main.10-0-0-1.od-moe.internal"
    assert names[1] == "main.0000-0000-0000-0000-0000-0000-0000-0001.od-moe.internal"
    assert names[2] == "main.box.lan.od-moe.internal"
    assert all(roles_in([name]) == {name.partition(".")[0]} for name in names)
    for other in ("main", "main.odmoe", "mainly.10-0-0-1.od-moe.internal", "10.0.0.1", "x.main.1.od-moe.internal"):
        assert not roles_in([other]), other


# --- one main node at a time -----------------------------------------------------------------------------------------


class Quiet(Session):
    """A node's end of a stream that answers Hello and Echo."""

    def ready(self):
        return WorkerReady(PROTOCOL_VERSION, self.name, 1, 1, "cpu", "memory", "h", 1, "p", 1, 0.0)

    def dispatch(self, message):
        raise LinkError("nothing is expected")

    def report(self, error, about=None):
        self.reply.send(Failed(type(error).__name__, f"{self.name}: {error}"))

    def end(self):
        pass


@pytest.fixture
def server(kit):
    sessions = Sessions()
    node = EchoNode(lambda reply: sessions.add(Quiet("worker 3", ("abc", "float32"), sessions, reply)))
    return kit.serve(node, pulse=PULSE)


def main_node(kit, address: str, session: str) -> PeerHandler:
    peer = PeerHandler("worker 3", lambda event: None, lambda error: None)
    hello = Hello(PROTOCOL_VERSION, "abc", "float32", "main", False, session)
    peer.open(lambda handler: kit.connect(address, handler, pulse=PULSE), hello, WAIT_S)
    return peer


def patient_main_node(kit, address: str, session: str) -> PeerHandler:
    """Tries again if it is refused: a machine that is busy takes longer to notice that the first one is silent."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            return main_node(kit, address, session)
        except OtherMainNodeError:
            if time.monotonic() > end:
                raise


def echoes(peer: PeerHandler) -> bool:
    return isinstance(peer.ask(Echo(1), Echo, WAIT_S), Echo)


@pytest.mark.slow
@pytest.mark.parametrize("session", ["the second", ""])
def test_a_second_main_node_is_refused_by_name(kit, server, session, caplog):
    caplog.set_level(logging.WARNING, "wire")
    first = main_node(kit, server.address, "the first")
    began = time.monotonic()
    with pytest.raises(OtherMainNodeError, match=r"worker 3 serves another main node, .*127\.0\.0\.1.* which is alive"):
        main_node(kit, server.address, session)
    assert time.monotonic() - began < sessions_module.GONE_S + 5
    assert echoes(first)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["OtherMainNodeError"]


def test_a_main_node_replaces_its_own_stream_at_once(kit, server):
    first = main_node(kit, server.address, "the first")
    began = time.monotonic()
    again = main_node(kit, server.address, "the first")
    assert time.monotonic() - began < sessions_module.GONE_S
    assert echoes(again)
    end = time.monotonic() + WAIT_S
    while not first.has_ended and time.monotonic() < end:
        time.sleep(0.01)
    assert first.has_ended


def test_a_second_main_node_is_let_in_when_the_first_has_closed(kit, server):
    first = main_node(kit, server.address, "the first")
    first.close()
    assert echoes(main_node(kit, server.address, "the second"))


@pytest.mark.slow
def test_a_second_main_node_is_let_in_when_the_first_has_fallen_silent(kit, server):
    """Its machine is gone, or its link: no packet says so, and its stream looks open until heartbeats are missed."""
    with closing(Relay(server.address)) as relay:
        first = main_node(kit, relay.address, "the first")
        assert echoes(first)
        relay.cut()
        assert echoes(patient_main_node(kit, server.address, "the second"))
