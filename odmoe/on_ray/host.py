"""Checks around Ray that do not import it: reachability, a missing token, leftover processes."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from scheduler.errors import LaunchError
from wire.rpc.quiet_grpc import grpc
from wire.rpc.stream import is_loopback

REACH_S = 5.0
HERE_S = 1.5
"""As `REACH_S`, for the cluster of this host, whose address an ended Ray may have left."""

_ASKED = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""What a client asks a Ray first."""

_log = logging.getLogger(__name__)


def check_running(address: str | None) -> str:
    """The address that Ray gives for `auto`, if a Ray answers there. Raises LaunchError."""
    advice = (
        "start one (odmoe up FILE, or ray start), name one that runs with --cluster host:port, or use --cluster local"
    )
    named = os.environ.get("RAY_ADDRESS")
    if named:
        advice = f"unset that variable, {advice}"
    if address is None:
        here = f"no Ray answers at {named}, which RAY_ADDRESS names" if named else "no Ray runs on this host"
        raise LaunchError(f"{here}; {advice}")
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), HERE_S).close()  # where it is refused, at once
        check_reachable(address, HERE_S)
    except (LaunchError, OSError, ValueError) as error:
        here = f"no Ray runs on this host: nothing answers at {address}, where its last one ran"
        if named:
            here = f"no Ray answers at {named}, which RAY_ADDRESS names"
        raise LaunchError(f"{here}; {advice}") from error
    return address


def check_reachable(address: str, within_s: float | None = None) -> None:
    """Raises LaunchError if nothing at `address` speaks gRPC. Ray itself would try for minutes."""
    reach_s = within_s or REACH_S
    if os.environ.get("RAY_USE_TLS") == "1":
        return
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(reach_s)
        except grpc.FutureTimeoutError as error:
            raise LaunchError(
                f"no Ray cluster answers at {address} within {reach_s:g} s; check host and port (ray status), "
                "or use --cluster local"
            ) from error


def check_token(address: str, headers: Mapping[str, str]) -> None:
    """Raises LaunchError if the Ray at `address` refuses these headers, as its clients send them. Ray itself would try
    for a minute, and not say why. Any other answer is left to it."""
    if os.environ.get("RAY_USE_TLS") == "1":
        return
    with grpc.insecure_channel(address) as channel:
        try:
            ask = channel.unary_unary(_ASKED, request_serializer=None, response_deserializer=None)
            ask(b"", timeout=REACH_S, metadata=tuple(headers.items()))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                given = "this token" if headers else "a client without a token"
                raise LaunchError(
                    f"the Ray cluster at {address} refuses {given}; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the "
                    "token that it was started with (or keep that in ~/.ray/auth_token)"
                ) from error


def warn_if_no_token(address: str) -> None:
    """Warn of a Ray cluster without a token, on which everyone who reaches it can run programs."""
    if os.environ.get("RAY_AUTH_MODE") != "token" and not is_loopback(address.rpartition(":")[0].strip("[]")):
        _log.warning(
            "the Ray cluster at %s is joined without a token: everyone who reaches it can run programs on its hosts; "
            "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN on every host and here",
            address,
        )


def kill_half_started(home: str) -> None:
    """Kill the processes of an interrupted `ray.init`: Ray forgets the raylet's children. `home` is Ray's directory."""
    import psutil  # type: ignore[import-untyped]  # comes with ray

    def kill(process: Any) -> None:
        with contextlib.suppress(psutil.Error):
            process.suspend()  # so that it starts no more children
            for child in process.children():
                kill(child)
            process.kill()

    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(home in part for part in process.cmdline()):
                kill(process)
