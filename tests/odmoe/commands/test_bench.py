"""`odmoe bench`: its figures beside the kernel's counters, and beside loads and peers of a known speed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from odmoe.bench import link, loads
from odmoe.bench.loads import file_system, measure_disk, temporary_store
from odmoe.commands.bench import Bench, Device, as_text, link_text, rate_text
from odmoe.machines.certs import ensure_certs
from odmoe.settings.units import parse_link, parse_rate
from odmoe.stores import prepare_store
from support.machines.cli import CommandLine, check_one_line
from wire.messages import Message
from wire.rpc.server import GrpcServer
from wire.rpc.tls import Identity

EXPERT = 1 << 20


def nothing(done: int, total: int) -> None:
    pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "SECONDS", 0.2)
    monkeypatch.setattr(link, "SECONDS", 0.3)
    monkeypatch.setattr(link, "ROUND_TRIPS", 40)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    if file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("temporary files are in memory here")
    return tmp_path


def read_from_disk() -> int:
    """Bytes that this process has had fetched from a disk: what the page cache gives is not among them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


@pytest.mark.parametrize("direct", [True, False])
def test_every_byte_comes_from_the_disk(disk: Path, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With O_DIRECT, and where a file system refuses it."""
    with temporary_store(disk, EXPERT, nothing) as store:
        assert list(disk.iterdir()) == [], "whatever ends this process, no file is left"
        if not direct:
            opened = os.open

            def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
                if flags & os.O_DIRECT:
                    raise OSError(errno.EINVAL, "no O_DIRECT")
                return opened(path, flags, *more, **named)

            monkeypatch.setattr(os, "open", refuse)
        before = read_from_disk()
        found = measure_disk(store, nothing)
        moved = read_from_disk() - before
    assert found.past_cache is direct
    assert found.loads >= loads.LEAST
    assert moved >= found.loads * EXPERT
    assert found.slowest <= found.bytes_per_s <= found.fastest


def test_a_disk_of_known_speed(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load takes 20 ms and a little."""
    read = os.preadv

    def slow(*args: Any) -> int:
        time.sleep(0.02)
        return read(*args)

    with temporary_store(disk, EXPERT, nothing) as store:
        monkeypatch.setattr(os, "preadv", slow)
        found = measure_disk(store, nothing)
    assert 0.4 * EXPERT / 0.02 < found.bytes_per_s <= EXPERT / 0.02


class SlowEcho(link.Echo):
    """Takes 10 ms for each message."""

    def accept(self, reply: Any) -> SlowEcho:
        return SlowEcho(reply)

    def on_message(self, message: Message) -> None:
        time.sleep(0.01)
        super().on_message(message)


def test_a_link_of_known_speed() -> None:
    server = GrpcServer(SlowEcho(), "worker")
    try:
        found = link.measure_link(server.address, nothing)
    finally:
        server.close()
    assert 0.01 <= found.round_trip_s < 0.05
    assert found.round_trip_s <= found.round_trip_90_s
    assert 0.4 * link.BULK * 8 / 0.01 < found.bits_per_s < 1.1 * link.BULK * 8 / 0.01


@pytest.fixture
def own_address() -> str:
    """This machine's address in its network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 9))
        except OSError:
            pytest.skip("this machine is in no network")
        return str(probe.getsockname()[0])


def test_own_addresses_are_no_network(own_address: str) -> None:
    for host in ("127.0.0.1", "127.0.0.5", "localhost", "[::1]", own_address):
        assert link.is_this_machine(f"{host}:7200"), host
    for host in ("192.0.2.77", "10.255.255.254", "host.invalid"):
        assert not link.is_this_machine(f"{host}:7200"), host


def test_a_slow_link_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer comes in time, and all of them together do not."""
    monkeypatch.setattr(link, "TOTAL_S", 0.15)
    server = GrpcServer(SlowEcho(), "worker")
    try:
        with pytest.raises(link.DeadlineError, match=r"could not be measured within 0\.15 s"):
            link.measure_link(server.address, nothing)
    finally:
        server.close()


PARENT = """
import sys, time
from odmoe.bench.link import loopback_peer
with loopback_peer() as address:
    print(address, flush=True)
    time.sleep(60)
"""


def test_the_peer_ends_with_the_process_that_measures() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    host, port = parent.stdout.readline().strip().split(":")

    def listens() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((host, int(port)), 5).close()
            return True
        return False

    assert listens()
    parent.kill()
    parent.wait(10)
    deadline = time.monotonic() + 10
    while listens():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_peer_that_dies_is_not_called_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(link.LaunchError, match="ended with exit code 1"), link.loopback_peer():
        pass


def loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[0])


def test_the_rate_is_what_crossed_the_interface() -> None:
    with link.loopback_peer() as address:
        before = loopback_bytes()
        found = link.measure_link(address, nothing)
        crossed = loopback_bytes() - before
    assert found.address == address
    assert 0 < found.bits_per_s * link.SECONDS / 8 < crossed


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address of a peer that speaks TLS, and this host's certificates."""
    ensure_certs(tmp_path / "certs", [("localhost", "127.0.0.1")])
    folder = tmp_path / "certs" / "127.0.0.1"
    server = GrpcServer(link.Echo(), "worker", identity=Identity.read(folder).whatever_role())
    yield server.address, str(folder)
    server.close()


def test_the_command_line(cli: CommandLine, disk: Path, served: tuple[str, str]) -> None:
    """With a host for --link: a peer that speaks TLS."""
    address, certificates = served
    flags = ("--folder", str(disk), "--expert-bytes", "1MiB", "--link", address, "--tls", certificates)
    answer = cli("bench", *flags, "--json")
    assert (answer.code, answer.err) == (0, "")
    found = json.loads(answer.out)
    assert found["disk"]["expert_bytes"] == EXPERT
    assert found["link"]["address"] == address
    assert found["link"]["loopback"] is True
    assert found["plan_flags"][::2][0] == "--load-bandwidth"
    assert "--link" not in found["plan_flags"], "the peer is on this machine: no network was measured"
    refused = cli("bench", "--folder", str(disk), "--expert-bytes", "1MiB", "--link", address)
    check_one_line(refused, 1, "CertificateError", [address])


@pytest.mark.slow
def test_a_store_is_read_as_it_is(cli: CommandLine, disk: Path, demo: Path) -> None:
    store = prepare_store(str(demo), str(disk / "store"), None)
    before = sorted(path.stat().st_mtime_ns for path in store.path.rglob("*"))
    answer = cli("bench", "--store", str(store.path))
    assert answer.code == 0, answer.err
    assert f"loads of {store.manifest.blob_bytes / 2**20:.3g} MiB" in answer.out
    assert f"{store.path}, past the page cache" in answer.out
    assert "\nFor odmoe plan:\n  --load-bandwidth " in answer.out
    assert "--link " not in answer.out.partition("For odmoe plan:")[2], "loopback is no network"
    assert sorted(path.stat().st_mtime_ns for path in store.path.rglob("*")) == before


def test_the_peer_says_where_it_is(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SERVE_S", 0.01)
    answer = cli("bench", "--serve", "127.0.0.1:0")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.split()[-1].startswith("127.0.0.1:")


def test_a_peer_that_hangs_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    server = GrpcServer(SlowEcho(), "worker")
    threading.Timer(0.1, server.close, (0.1,)).start()
    with pytest.raises(link.LinkError):
        link.measure_link(server.address, nothing)


SLOW, FAST = loads.Loads(EXPERT, 5, 1.234e9, 1e9, 2e9, True), loads.Loads(EXPERT, 5, 24.9e9, 20e9, 25e9, True)


@pytest.mark.slow
@pytest.mark.usefixtures("short_plans")
def test_a_plan_takes_the_flags(cli: CommandLine, demo: Path) -> None:
    """With a GPU loads are those from host memory, and a link is one to another host."""
    to_host = link.Link("10.0.0.5:7200", False, 0.94e9, 3e-4, 4e-4)
    found = Bench("host", "processor", "/disk", SLOW, Device("a GPU", 23_456_789_012, FAST), to_host)
    expected = ["--load-bandwidth", "24.9GB/s", "--worker-memory", "23.4GB", "--link", "940Mbit"]
    assert found.flags() == expected
    assert as_text(found).endswith(f"  {' '.join(expected)}")
    answer = cli("plan", "-m", str(demo), *expected, "--json", "-q")
    assert answer.code == 0, answer.err
    alone = Bench("host", "processor", "/disk", SLOW, None, link.Link("127.0.0.1:1", True, 4e9, 3e-4, 4e-4))
    assert alone.flags() == ["--load-bandwidth", "1.23GB/s"]


@pytest.mark.parametrize("value", [4.2e3, 9.87654e6, 123e6, 1e9, 1.2345e9, 99.95e9, 4.7e11])
def test_rates_are_read_back_to_three_digits(value: float) -> None:
    assert parse_rate(rate_text(value)) == pytest.approx(value, rel=5e-3)
    assert parse_link(link_text(value)) == pytest.approx(value, rel=5e-3)


def test_the_file_system_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n/dev/b {tmp_path}/disk xfs rw 0 0\n")
    kinds = [file_system(path, mounts) for path in (Path("/"), tmp_path, tmp_path / "disk" / "a")]
    assert kinds == ["ext4", "tmpfs", "xfs"]
    assert file_system(tmp_path, tmp_path / "missing") == ""


def test_wrong_usage_is_said_before_anything_is_measured(
    cli: CommandLine, tmp_path: Path, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(prepare_store(str(demo), None, None).path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("odmoe.bench.loads.measure_disk", lambda *_: pytest.fail("the disk was measured"))
    monkeypatch.setattr("odmoe.bench.link.measure_link", lambda *_: pytest.fail("the link was measured"))
    for args, kind, words in (
        (("--expert-bytes", "1"), "ConfigError", ["--expert-bytes is 1", "4KiB to 1GiB"]),
        (("--expert-bytes", "much"), "ConfigError", ["--expert-bytes is 'much'"]),
        (("--link", "host"), "ConfigError", ["--link is 'host'", "10.0.0.5:7200"]),
        (("--link", "a:1", "--serve", "b:1"), "ConfigError", ["--serve and --link"]),
        (("--store", "a", "--folder", "b"), "ConfigError", ["--store and --folder"]),
        (("--tls", "certs"), "ConfigError", ["--tls is given without --link or --serve"]),
        (("--serve", "127.0.0.1:0", "--folder", "a"), "ConfigError", ["--serve and --folder"]),
        (("--store", store, "--expert-bytes", "1MiB"), "ConfigError", ["--expert-bytes", "--store"]),
        (("--folder", str(tmp_path / "none")), "ConfigError", ["--folder", "can be written to"]),
        (("--serve", "10.1.2.3:7200"), "ConfigError", ["10.1.2.3"]),
    ):
        check_one_line(cli("bench", *args), 2, kind, words)
    check_one_line(cli("bench", "--store", str(tmp_path)), 1, "StoreNotFoundError", [str(tmp_path)])
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**9}))
    full = ["1.0 GB free", "1.4 GB are needed", "--expert-bytes"]
    check_one_line(cli("bench", "--folder", str(tmp_path)), 2, "ConfigError", full)
    if Path("/dev/shm").is_dir() and file_system(Path("/dev/shm")) == "tmpfs":
        monkeypatch.undo()
        check_one_line(cli("bench", "--folder", "/dev/shm"), 2, "ConfigError", ["/dev/shm", "tmpfs, which is memory"])
