"""Bytes over time and round trips between two hosts of the testbed, with plain TCP sockets of a program in each."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from contextlib import suppress
from typing import Any

from odmoe.machines.cluster_file import Host
from scripts.testbed import links
from scripts.testbed.layout import Layout, TestbedError
from scripts.testbed.namespaces import enter

ECHOES = {64: 300, 16384: 300}
"""Sizes of message, the second that of an embedding of Mixtral's in the paper, and how many of each."""

MARGIN_S = 30.0
FRAME, PAYLOAD = 1514, 1448
"""Bytes of a full frame as the link counts them, and of what TCP carries in it."""

PROGRAM = r"""
import json, socket, sys, time

def serve(address):
    with socket.create_server((address, 0)) as door:
        door.settimeout(20)
        print(door.getsockname()[1], flush=True)
        peer, _ = door.accept()
    peer.settimeout(20)
    return peer

def receive(address):
    buffer = bytearray(1 << 20)
    with serve(address) as peer:
        peer.recv_into(buffer, 1)  # the clock starts with the first byte, which is not counted
        start = last = time.perf_counter()
        total = 0
        while count := peer.recv_into(buffer):
            total += count
            last = time.perf_counter()
    print(json.dumps({"bytes": total, "seconds": last - start}))

def send(address, port, milliseconds):
    data = bytes(1 << 17)
    with socket.create_connection((address, port), timeout=20) as peer:
        end = time.perf_counter() + milliseconds / 1000
        while time.perf_counter() < end:
            peer.sendall(data)

def echo(address):
    with serve(address) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while got := peer.recv(1 << 16):
            peer.sendall(got)

def ask(address, port, size, count):
    data, times = bytes(size), []
    with socket.create_connection((address, port), timeout=20) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            start, left = time.perf_counter(), size
            peer.sendall(data)
            while left:
                got = len(peer.recv(left))
                if not got:
                    raise SystemExit("the other end closed")
                left -= got
            times.append(time.perf_counter() - start)
            time.sleep(0.001)
    print(json.dumps(times))

name, address, *numbers = sys.argv[1:]
globals()[name](address, *map(int, numbers))
"""


def measure_link(layout: Layout, source: Host, target: Host, pids: list[int], seconds: float) -> dict[str, Any]:
    """`pids`: a process of each. Bytes a second each way, then echoes from `source`. Raises TestbedError."""
    if source == target:
        raise TestbedError(f"{source.name} has no link to itself; name two hosts")
    inside = dict(zip((source.name, target.name), pids, strict=True))
    asked = min(links.rate_of(layout.link(host)) for host in (source, target))
    ways = []
    for one, other in ((source, target), (target, source)):
        found = _pair(
            layout, inside, (one, "send", [str(round(1000 * seconds))]), (other, "receive"), seconds + MARGIN_S
        )[1]
        ways.append(
            {"from": one.name, "to": other.name, "gbit_s": found["bytes"] * 8 / found["seconds"] / 1e9, **found}
        )
    echoes = []
    for size, count in ECHOES.items():
        times = _pair(layout, inside, (source, "ask", [str(size), str(count)]), (target, "echo"), MARGIN_S)[0]
        times_us = sorted(1e6 * time for time in times)
        echoes.append(
            {
                "bytes": size,
                "count": count,
                "median_us": statistics.median(times_us),
                "p99_us": times_us[int(0.99 * (count - 1))],
                "wire_us": 2e6 * size * 8 * FRAME / PAYLOAD / asked,
            }
        )
    return {"asked_gbit_s": asked / 1e9, "ways": ways, "echoes": echoes}


def _pair(
    layout: Layout,
    inside: dict[str, int],
    caller: tuple[Host, str, list[str]],
    server: tuple[Host, str],
    limit_s: float,
) -> tuple[Any, Any]:
    """Runs a server's program and its caller's to their ends. What each printed last. Raises TestbedError."""

    def program(host: Host, *words: str) -> subprocess.Popen[str]:
        command = enter(inside[host.name], layout.cluster.user, [sys.executable, "-I", "-S", "-c", PROGRAM, *words])
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    answering = program(server[0], server[1], server[0].address)
    started = [answering]
    try:
        port = answering.stdout.readline().strip() if answering.stdout else ""
        if port:
            started.insert(0, program(caller[0], caller[1], server[0].address, port, *caller[2]))
        said = [process.communicate(timeout=limit_s) for process in started]
    except subprocess.TimeoutExpired:
        raise TestbedError(f"{caller[0].name} and {server[0].name}: no end within {limit_s:.0f} s") from None
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                process.kill()
    for process, (_, errors) in zip(started, said, strict=True):
        if process.returncode or not port:
            last = errors.strip().splitlines()[-1:] or ["it said nothing"]
            raise TestbedError(f"no connection from {caller[0].name} to {server[0].name}: {last[0]}")
    results = [json.loads(out) if out.strip() else None for out, _ in said]
    return results[0], results[1]
