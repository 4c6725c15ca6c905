"""What strangers make a node write: a line of our own for each reason, and none of gRPC's."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys

import pytest

from support.paths import ROOT

NODE = """
import logging, sys, time
from pathlib import Path
logging.basicConfig(level=logging.WARNING)
from odmoe.bench.link import Echo
from wire.rpc.server import GrpcServer
from wire.rpc.tls import Identity
server = GrpcServer(Echo(), "worker", identity=Identity.read(Path(sys.argv[1])), secret="s3cret")
print(server.address, flush=True)
sys.stdin.read()
server.close()
"""


def knock(address: tuple[str, int], kind: str) -> None:
    """A handshake that fails."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(address, 5) as made:
            if kind == "http":
                made.sendall(b"GET / HTTP/1.1\r\n\r\n")
            elif kind == "noise":
                made.sendall(os.urandom(50))
            elif kind == "no certificate":
                context.wrap_socket(made).close()
    except OSError:
        pass


@pytest.mark.parametrize("kind", ["http", "noise", "no certificate"])
def test_failed_handshakes_are_not_logged_one_by_one(authority, kind):
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    command = [sys.executable, "-c", NODE, str(authority().folder())]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as node:
        host, _, port = node.stdout.readline().strip().rpartition(":")
        for _ in range(30):
            knock((host, int(port)), kind)
        _, err = node.communicate(timeout=60)
    assert node.returncode == 0
    lines = err.splitlines()
    assert len(lines) <= 2, err
    assert all(line.startswith("WARNING:wire:CertificateError: refused 127.0.0.1: ") for line in lines)
