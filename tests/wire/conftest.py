"""A node that answers, and a handler that remembers: for every test of the transports."""

from __future__ import annotations

import datetime
import ipaddress
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from scheduler.errors import ODMoEError
from wire import inprocess
from wire.base import Channel, Handler
from wire.messages import AskUsage, Compute, Computed, Load, Loaded, Message, WorkerUsage
from wire.rpc.client import connect
from wire.rpc.server import GrpcServer


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.got: SimpleQueue[Message] = SimpleQueue()
        self.ends: list[ODMoEError | None] = []
        self.over = threading.Event()

    def on_message(self, message: Message) -> None:
        assert not self.over.is_set(), "a message after on_close"
        self.got.put(message)

    def on_close(self, error: ODMoEError | None) -> None:
        self.ends.append(error)
        self.over.set()

    def take(self, n: int) -> list[Message]:
        return [self.got.get(timeout=10) for _ in range(n)]

    def end(self, within: float = 5.0) -> ODMoEError | None:
        """The one argument of the one call of `on_close`."""
        assert self.over.wait(within), f"on_close was not called within {within} s"
        time.sleep(0.1)  # a second call would come about now
        assert len(self.ends) == 1
        return self.ends[0]


class Answering(Recorder):
    """The node's end of one stream: `Compute` -> `Computed`, `Load` -> `Loaded`, `AskUsage` -> `WorkerUsage`."""

    def __init__(self, reply: Channel) -> None:
        super().__init__()
        self.reply = reply

    def on_message(self, message: Message) -> None:
        super().on_message(message)
        match message:
            case Compute():
                self.reply.send(Computed(message.call_id, message.hidden, 0.5))
            case Load():
                self.reply.send(Loaded(message.load_id, 10, 0.25))
            case AskUsage():
                self.reply.send(WorkerUsage(1, 2, 3, 4))


class EchoNode:
    """Hands each stream to a handler made by `make`; `streams` keeps them."""

    def __init__(self, make: Callable[[Channel], Any] = Answering) -> None:
        self.make = make
        self.streams: list[Any] = []

    def accept(self, reply: Channel) -> Handler:
        handler = self.make(reply)
        self.streams.append(handler)
        return handler

    def close(self) -> None:
        pass


class Kit:
    """The classes above, as a fixture, since test files do not import each other. Closes what it opened."""

    Recorder, Answering, EchoNode = Recorder, Answering, EchoNode

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def serve(self, node: EchoNode | None = None, **settings: Any) -> GrpcServer:
        server = GrpcServer(node or EchoNode(), "worker", **settings)
        self._stack.callback(server.close, 0.5)
        return server

    def connect(self, address: str, handler: Handler, **settings: Any) -> Channel:
        channel = connect(address, settings.pop("kind", "worker"), handler, **settings)
        self._stack.callback(channel.close)
        return channel


@pytest.fixture
def kit() -> Iterator[Kit]:
    with ExitStack() as stack:
        yield Kit(stack)


class Authority:
    """A CA, and folders of certificates signed by it, in every way right or wrong. Days count from today."""

    def __init__(self, folder: Path, name: str = "a CA", days: tuple[int, int] = (-9, 9)) -> None:
        self._folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        self.certificate = _begun(name, name, self.key, days).add_extension(constraints, critical=True)
        self.certificate = self.certificate.sign(self.key, hashes.SHA256())
        self._name = name

    def folder(self, address: str = "127.0.0.1", days: tuple[int, int] = (-1, 9), ca: Authority | None = None) -> Path:
        """`ca.pem` (of `ca`, or this one), `node.pem` (of this one) and `node.key`."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        begun = _begun("a node", self._name, key, days).add_extension(usage, False).add_extension(names, False)
        folder = self._folder / str(len(list(self._folder.iterdir())))
        folder.mkdir()
        (folder / "ca.pem").write_bytes(pem(ca.certificate if ca else self.certificate))
        (folder / "node.pem").write_bytes(pem(begun.sign(self.key, hashes.SHA256())))
        (folder / "node.key").write_bytes(pem(key))
        (folder / "node.key").chmod(0o600)
        return folder


def _begun(name: str, issuer: str, key: Any, days: tuple[int, int]) -> x509.CertificateBuilder:
    today = datetime.datetime.now(datetime.UTC)
    first, last = (today + datetime.timedelta(days=count) for count in days)
    subject, issued = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, issuer))
    return x509.CertificateBuilder(issued, subject, key.public_key(), x509.random_serial_number(), first, last)


def pem(thing: Any) -> bytes:
    if hasattr(thing, "public_bytes"):
        return thing.public_bytes(serialization.Encoding.PEM)
    plain = serialization.NoEncryption()
    return thing.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


@pytest.fixture
def authority(tmp_path: Path) -> Callable[..., Authority]:
    """Makes a CA."""
    folder = tmp_path / "certificates"
    folder.mkdir()
    return lambda *args, **settings: Authority(folder, *args, **settings)


@pytest.fixture(params=["in-process", "gRPC"])
def open_stream(request: pytest.FixtureRequest, kit: Kit) -> Callable[[EchoNode, Handler], Channel]:
    """Opens a stream from a handler to a node, over each transport in turn."""
    if request.param == "in-process":
        return inprocess.connect
    return lambda node, handler: kit.connect(kit.serve(node).address, handler)
