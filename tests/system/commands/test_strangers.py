"""Thousands of connections that ask nothing, with few files allowed at first: requests with the key are answered, and
the log stays short. So it is with clients that reset theirs."""

from __future__ import annotations

import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI

from support.machines.processes import Starter
from support.machines.served_process import SERVED_SMALL, address_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

KEY = "a-key-that-is-long-enough"
MANY = 6000
SOON_S = 10.0
"""With a machine that is busy; it takes about a second for the connections that are in the kernel's queue."""


@contextmanager
def few_files() -> Iterator[None]:
    """For what is started meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, MANY + 1000)), hard))


def check_answers(url: str) -> None:
    with OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=SOON_S) as client:
        assert client.completions.create(model="demo-moe", prompt="Natalia", max_tokens=2).choices
    assert httpx2.get(url.replace("/v1", "/health"), timeout=SOON_S).status_code == 200


def test_six_thousand_silent_connections(start: Starter, demo: Path) -> None:
    with few_files():
        running = start("serve", "-m", str(demo), *SERVED_SMALL, ODMOE_API_KEY=KEY)
    url = address_of(running)
    address = ("127.0.0.1", int(url.rsplit(":", 1)[1].partition("/")[0]))
    with ExitStack() as stack:
        for number in range(MANY):
            stack.enter_context(socket.create_connection(address, SOON_S))
            if number % 1500 == 1499:
                check_answers(url)
        files = len(list(Path(f"/proc/{running.process.pid}/fd").iterdir()))
        assert files < 1000
    for number in range(1000):
        with socket.create_connection(address, SOON_S) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if number % 2:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * (number % 7))
    time.sleep(1.0)
    check_answers(url)
    running.interrupt()
    code, _, err = running.finish()
    assert code == 0
    assert b"Traceback" not in err
    assert len(err) < 4000, err.decode()
