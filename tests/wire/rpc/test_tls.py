"""A node's own certificate: every way in which its files may be wrong is named before anything listens or calls."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives import serialization as s

from scheduler.errors import CertificateError, LinkError
from support.nodes.streams import WAIT_S, EchoNode, Recorder
from support.paths import ROOT
from wire.codec import TO_WORKER
from wire.messages import AskUsage, Load, Loaded, WorkerUsage
from wire.rpc import doorman
from wire.rpc.tls import Identity

ECHO = [Loaded(1, 10, 0.25)]


# --- over TLS --------------------------------------------------------------------------------------------------------


def test_both_ways_over_tls(kit, authority):
    ca = authority()
    node, heard = EchoNode(), Recorder()
    server = kit.serve(node, secret="s3cret", identity=Identity.read(ca.folder()))
    channel = kit.connect(server.address, heard, secret="s3cret", identity=Identity.read(ca.folder()))
    channel.send(Load(1, 0, 0, 0))
    channel.send(AskUsage())
    assert heard.take(2) == [*ECHO, WorkerUsage(1, 2, 3, 4)]
    channel.close()
    assert heard.end() is None
    assert node.streams[0].end() is None


def test_what_is_sent_cannot_be_read_on_the_way(kit, authority):
    """A relay between the two sees neither the secret nor a message; over a stream without TLS it sees both."""
    seen: dict[str, bytes] = {}
    marked = Load(1, 0, 0, 123456789)
    for how, identity in (("plain", None), ("TLS", Identity.read(authority().folder()))):
        server = kit.serve(secret="s3cret-word", identity=identity)
        with Relay(server.address) as (address, passed):
            heard = Recorder()
            kit.connect(address, heard, secret="s3cret-word", identity=identity).send(marked)
            assert heard.take(1) == ECHO
            seen[how] = bytes(passed)
    assert TO_WORKER.encode(marked) in seen["plain"]
    assert TO_WORKER.encode(marked) not in seen["TLS"]
    assert len(seen["TLS"]) > 1000
    assert b"s3cret" not in seen["TLS"]


class Relay:
    """Passes bytes to `address` and back, and keeps them. Enters as its own address and what has passed."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._far = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.passed = bytearray()

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return f"127.0.0.1:{self._listener.getsockname()[1]}", self.passed

    def __exit__(self, *_):
        for each in self._sockets:
            each.close()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._far, 5)
            self._sockets += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one, other):
        try:
            while data := one.recv(65536):
                self.passed += data
                other.sendall(data)
        except OSError:
            return


def test_the_certificates_of_each_side_may_differ_in_address(kit, authority):
    """A client's own address is not compared: it may call from any interface of its host."""
    ca = authority()
    heard = Recorder()
    server = kit.serve(host="127.0.0.2", identity=Identity.read(ca.folder("127.0.0.2")))
    kit.connect(server.address, heard, identity=Identity.read(ca.folder("10.0.0.1"))).send(Load(1, 0, 0, 0))
    assert heard.take(1) == ECHO


@pytest.mark.slow
def test_a_certificate_that_expires_while_a_stream_is_open(kit, authority):
    """The stream goes on; a new one is refused by name, whichever side it is whose certificate has expired."""
    ca = authority()
    good = ca.folder()

    def opened(seconds: int):
        """Streams whose certificates expire in so many seconds, and when that is over."""
        short, end = ca.folder(days=(-1, seconds / 86400)), time.monotonic() + seconds + 1
        for server_folder, client_folder in ((short, good), (good, short)):
            server = kit.serve(EchoNode(), identity=Identity.read(server_folder))
            identity, heard = Identity.read(client_folder), Recorder()
            channel = kit.connect(server.address, heard, identity=identity)
            channel.send(Load(1, 0, 0, 0))
            assert heard.take(1) == ECHO
            yield end, server, identity, channel, heard

    for seconds in (3, 12, 48):  # a busy machine may be too slow for the first
        with contextlib.suppress(CertificateError):
            kept = list(opened(seconds))
            break
    else:
        pytest.fail("no stream was opened before its certificate expired")
    time.sleep(max(0.0, kept[0][0] - time.monotonic()))
    for _, server, identity, channel, heard in kept:
        channel.send(Load(1, 0, 0, 0))
        assert heard.take(1) == ECHO
        with pytest.raises(CertificateError, match="expired"):
            kit.connect(server.address, Recorder(), identity=identity)
        channel.send(Load(1, 0, 0, 0))
        assert heard.take(1) == ECHO


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), pytest.param("::1", "::1", marks=needs_ipv6)],
)
def test_who_belongs_is_never_named_as_refused(kit, authority, monkeypatch, caplog, host, address):
    """Whatever address the server has bound, it recognises the connections whose streams it has taken."""
    monkeypatch.setattr(doorman, "GIVEN_UP_S", 0.1)
    identity = Identity.read(authority().folder(address))
    server = kit.serve(host=host, secret="s3cret", identity=identity)
    port = server.address.rpartition(":")[2]
    for _ in range(3):
        heard = Recorder()
        where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        channel = kit.connect(where, heard, secret="s3cret", identity=identity)
        channel.send(Load(1, 0, 0, 0))
        assert heard.take(1) == ECHO
        channel.close()
        heard.end()
    time.sleep(0.3)  # who is given up is named meanwhile
    assert not caplog.records


def test_a_node_that_comes_up_late_is_waited_for(kit, authority):
    identity = Identity.read(authority().folder())
    first = kit.serve(identity=identity)
    port = int(first.address.rpartition(":")[2])
    first.close(0.2)
    later = threading.Timer(0.4, lambda: kit.serve(port=port, identity=identity))
    later.start()
    heard = Recorder()
    kit.connect(first.address, heard, identity=identity).send(Load(1, 0, 0, 0))
    assert heard.take(1) == ECHO
    later.join(WAIT_S)


def test_nobody_there(kit, authority):
    identity = Identity.read(authority().folder())
    server = kit.serve(identity=identity)
    server.close(0.2)
    with pytest.raises(LinkError, match=r"cannot reach the worker at .* within 0\.4 s"):
        kit.connect(server.address, Recorder(), identity=identity, deadline_s=0.4)


def test_somebody_there_who_says_nothing(kit, authority):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(LinkError, match=r"cannot reach .* within 0\.4 s"):
            kit.connect(address, Recorder(), identity=Identity.read(authority().folder()), deadline_s=0.4)


# --- the files -------------------------------------------------------------------------------------------------------


def test_what_is_read(authority):
    folder = authority().folder(days=(-1, 9))
    identity = Identity.read(folder)
    assert identity.ca == (folder / "ca.pem").read_bytes()
    assert identity.chain == (folder / "node.pem").read_bytes()
    assert abs(identity.expires - time.time() - 9 * 86400) < 600
    assert "PRIVATE" not in repr(identity)


@pytest.mark.parametrize("name", ["ca.pem", "node.pem", "node.key"])
def test_missing(authority, name):
    folder = authority().folder()
    (folder / name).unlink()
    with pytest.raises(CertificateError, match=rf"{folder / name} is not there; .*odmoe certs"):
        Identity.read(folder)


@pytest.mark.parametrize("name", ["ca.pem", "node.pem", "node.key"])
def test_not_readable(authority, name):
    folder = authority().folder()
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(CertificateError, match=rf"{folder / name} cannot be read: Is a directory"):
        Identity.read(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users(authority):
    with tempfile.TemporaryDirectory() as open_to_all:
        folder = Path(open_to_all) / "node"
        shutil.copytree(authority().folder(), folder)
        for path in (folder.parent, folder):
            path.chmod(0o755)
        code = (
            "import os\nfrom pathlib import Path\nfrom wire.rpc.tls import Identity\n"
            f"os.setuid(65534)\nIdentity.read(Path({str(folder)!r}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
    assert f"CertificateError: {folder}/node.key cannot be read: Permission denied" in done.stderr


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_for_everyone(authority, mode):
    folder = authority().folder()
    (folder / "node.key").chmod(mode)
    with pytest.raises(CertificateError, match=rf"node\.key can be read by other users \(mode {mode:o}\).*chmod 600"):
        Identity.read(folder)


@pytest.mark.parametrize("name", ["ca.pem", "node.pem", "node.key"])
@pytest.mark.parametrize("damage", ["empty", "garbage", "cut", "flipped", "another kind"])
def test_no_pem(authority, name, damage):
    folder = authority().folder()
    whole = (folder / name).read_bytes()
    middle = len(whole) // 3
    other = (folder / ("node.key" if name.endswith("pem") else "node.pem")).read_bytes()
    (folder / name).write_bytes(
        {
            "empty": b"",
            "garbage": bytes(range(256)),
            "cut": whole[: len(whole) // 2],
            "flipped": whole[:middle] + b"!" * 40 + whole[middle + 40 :],
            "another kind": other,
        }[damage]
    )
    with pytest.raises(CertificateError, match=rf"{folder / name} is no (certificate|private key) in PEM"):
        Identity.read(folder)


def test_a_key_with_a_password(authority):
    folder = authority().folder()
    key = s.load_pem_private_key((folder / "node.key").read_bytes(), None)
    locked = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"word"))
    (folder / "node.key").write_bytes(locked)
    with pytest.raises(CertificateError, match="no private key in PEM without a password"):
        Identity.read(folder)


def test_a_key_of_another(authority):
    ca = authority()
    folder, other = ca.folder(), ca.folder()
    (folder / "node.key").write_bytes((other / "node.key").read_bytes())
    with pytest.raises(CertificateError, match=rf"{folder}/node\.key is not the key of {folder}/node\.pem"):
        Identity.read(folder)


@pytest.mark.parametrize(
    ("days", "said"),
    [((-9, -2), r"expired on 20\d\d-.*; this host's clock says 20"), ((1, 9), r"is not valid before 20\d\d-.*clock")],
)
def test_dates(authority, days, said):
    folder = authority().folder(days=days)
    with pytest.raises(CertificateError, match=rf"the certificate in {folder}/node\.pem {said}"):
        Identity.read(folder)


def test_dates_of_the_ca(authority):
    folder = authority(days=(-9, -2)).folder()
    with pytest.raises(CertificateError, match=rf"the certificate in {folder}/ca\.pem expired on .*make a new CA"):
        Identity.read(folder)


@pytest.mark.parametrize("name", ["a CA", "another name"])
def test_another_ca(authority, name):
    """Also where the two have one name, so that only the signature tells them apart."""
    folder = authority("a CA").folder(ca=authority(name))
    with pytest.raises(CertificateError, match=rf"in {folder}/node\.pem cannot be used: it is not signed by the CA"):
        Identity.read(folder)


def test_no_ca_in_the_cas_file(authority):
    folder = authority().folder()
    (folder / "ca.pem").write_bytes((folder / "node.pem").read_bytes())
    with pytest.raises(CertificateError, match=rf"{folder}/ca\.pem holds no CA's certificate|not signed by the CA"):
        Identity.read(folder)


# --- what gRPC is given ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_client_must_show_a_certificate_even_to_a_single_call(kit, authority):
    """Past our client: with the right CA and the right secret, but no certificate, nothing is answered."""
    identity = Identity.read(authority().folder())
    node = EchoNode()
    server = kit.serve(node, secret="s3cret", identity=identity)
    for credentials, served in (
        (grpc.ssl_channel_credentials(identity.ca), False),
        (identity.channel_credentials(), True),
    ):
        with grpc.secure_channel(server.address, credentials) as channel:
            secret = (("odmoe-secret", "s3cret"),)
            call = channel.stream_stream("/odmoe.Worker/Work")(
                iter([]), metadata=secret, timeout=WAIT_S, wait_for_ready=served
            )
            assert (call.code() is grpc.StatusCode.OK) == served
            assert bool(node.streams) == served
