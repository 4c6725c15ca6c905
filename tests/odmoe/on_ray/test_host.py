"""What is done around Ray, without Ray."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from odmoe.on_ray import host as ray_host
from odmoe.on_ray.host import check_reachable, check_running, check_token, warn_if_no_token
from scheduler.errors import LaunchError


@pytest.mark.parametrize(
    ("address", "mode", "warned"),
    [
        ("192.0.2.7:6379", None, True),
        ("192.0.2.7:6379", "disabled", True),
        ("[2001:db8::1]:6379", None, True),
        ("192.0.2.7:6379", "token", False),
        ("127.0.0.1:6379", None, False),
        ("[::1]:6379", None, False),
    ],
)
def test_joining_without_a_token_is_said(
    address: str, mode: str | None, warned: bool, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    warn_if_no_token(address)
    assert ("joined without a token" in caplog.text) == warned
    assert (address in caplog.text) == warned
    assert len(caplog.records) == warned


def test_nobody_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is bound and not listened on refuses."""
    monkeypatch.setattr(ray_host, "REACH_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LaunchError, match=f"no Ray cluster answers at {address}"):
            check_reachable(address)


@pytest.mark.parametrize("address", [None, "127.0.0.1:1", "nowhere", "host.invalid:6379"])
def test_no_ray_at_the_address_of_this_host(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    began = time.monotonic()
    with pytest.raises(LaunchError, match="no Ray runs on this host"):
        check_running(address)
    assert time.monotonic() - began < 10  # Ray itself takes 40


def test_a_dead_address_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(
        LaunchError, match=r"no Ray answers at 127\.0\.0\.1:1, which RAY_ADDRESS names; unset that variable, start"
    ):
        check_running("127.0.0.1:1")


@pytest.fixture
def guarded() -> Iterator[str]:
    """The address of a server that takes `Bearer right` alone, as a Ray with a token."""

    class Guard(grpc.GenericRpcHandler):
        def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            right = ("authorization", "Bearer right") in call.invocation_metadata
            return grpc.unary_unary_rpc_method_handler(lambda data, context: answer(context, right))

    def answer(context: grpc.ServicerContext, right: bool) -> bytes:
        if not right:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, handlers=[Guard()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait(5)


def test_a_ray_that_refuses_the_token(guarded: str) -> None:
    check_token(guarded, {"authorization": "Bearer right"})
    for headers, words in (({}, "a client without a token"), ({"authorization": "Bearer wrong"}, "this token")):
        with pytest.raises(LaunchError, match=f"the Ray cluster at {guarded} refuses {words}; set RAY_AUTH_MODE"):
            check_token(guarded, headers)


@pytest.mark.slow
def test_something_else_at_the_address_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections and never answers."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(
            LaunchError, match=r"no Ray runs on this host: nothing answers at 127\.0\.0\.1:\d+, where its last"
        ),
    ):
        check_running(f"127.0.0.1:{other.getsockname()[1]}")
