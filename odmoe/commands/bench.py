"""`odmoe bench`: what this machine's disk, GPU and link reach, as flags for `odmoe plan`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from odmoe.api.checks import check_writable
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.commands.shared.options import Debug, Json, Quiet, option
from odmoe.settings.table import value_text
from odmoe.settings.units import parse_address, parse_bytes
from odmoe.terminal import Terminal
from scheduler.errors import ConfigError
from scheduler.types import PAGE

if TYPE_CHECKING:
    from odmoe.bench.link import Link
    from odmoe.bench.loads import Loads
    from wire.rpc.tls import Identity

EXPERT_BYTES = 20 << 20
"""Size of an expert in the new file, if none is given."""


def bench(
    folder: Annotated[
        Path | None, option(help="Directory on the disk to measure (default: the cache directory)", metavar="PATH")
    ] = None,
    store: Annotated[Path | None, option(help="Read this expert store instead of a new file", metavar="PATH")] = None,
    expert_bytes: Annotated[
        str | None, option(help="Size of an expert in the new file (default: 20MiB)", metavar="TEXT")
    ] = None,
    link: Annotated[str | None, option(help="HOST:PORT of a host that runs bench --serve", metavar="TEXT")] = None,
    serve: Annotated[
        str | None, option(help="ADDRESS:PORT to listen on, for bench --link on another host", metavar="TEXT")
    ] = None,
    tls: Annotated[
        Path | None,
        option(help="Directory of this host's certificates, for --link and --serve (odmoe certs)", metavar="PATH"),
    ] = None,
    output: Annotated[
        Path | None,
        option(
            "--output",
            "-o",
            help="Measure the processor, too, and write a profile of this machine: FILE.yaml",
            metavar="PATH",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure disk, processor, GPU and network of this machine for odmoe plan.

    It loads whole experts past the page cache, as a worker does, from disk and to a GPU.

    The network is measured with a gRPC stream, over loopback unless --link names another host.
    """
    size = None if expert_bytes is None else _size(expert_bytes)
    if serve is not None and link is not None:
        raise ConfigError("--serve and --link are both given; run one of them on each host")
    if store is not None and folder is not None:
        raise ConfigError("--store and --folder are both given; give one of them")
    if tls is not None and serve is None and link is None:
        raise ConfigError("--tls is given without --link or --serve, and nothing reads it; leave it out")
    disk = {"--folder": folder, "--store": store, "--expert-bytes": expert_bytes, "--output": output}
    if serve is not None and (given := [name for name, value in disk.items() if value is not None]):
        raise ConfigError(f"--serve and {given[0]} are both given; --serve measures no disk, so leave {given[0]} out")
    if output is not None:
        check_writable("--output", str(output))
    secret, identity = _credentials(tls)
    if serve is not None:
        _serve_peer(serve, secret, identity)
        return
    if link is not None:
        _address("--link", link, 1)
    found = run_bench(folder, store, size, link, secret, identity, Terminal(quiet, debug))
    if output is not None:
        _write_profile(output, found, Terminal(quiet, debug))
    print(json.dumps(as_dict(found)) if as_json else as_text(found))


def _serve_peer(address: str, secret: str | None, identity: Identity | None) -> None:
    """Answer `bench --link` of other hosts. Raises ConfigError."""
    from odmoe.bench.link import SERVE_S, serve

    host, port = _address("--serve", address, 0)
    duration = f"for {SERVE_S / 60:g} minutes or until Ctrl-C"
    serve(host, port, secret, identity, lambda at: print(f"odmoe bench --link to here, {duration}: {at}", flush=True))


def _size(text: str) -> int:
    """Rounded down to whole pages of 4096 bytes, which O_DIRECT needs."""
    try:
        pages = parse_bytes(text) // PAGE
    except ValueError:
        pages = 0
    if not 1 <= pages <= 1 << 18:
        raise ConfigError(f"--expert-bytes is {value_text(text)}; allowed: 4KiB to 1GiB")
    return pages * PAGE


def _address(name: str, text: str, least: int) -> tuple[str, int]:
    try:
        return parse_address(text, least)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}; allowed: {error}") from None


def _credentials(tls: Path | None) -> tuple[str | None, Identity | None]:
    if tls is None:
        return None, None
    from odmoe.clusters.credentials import credentials
    from odmoe.settings.settings import Settings

    secret, identity = credentials(Settings(tls=str(tls)))
    return secret, identity.whatever_role() if identity else None


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU. `loads`: from page-locked host memory."""

    name: str
    free_bytes: int
    loads: Loads


@dataclass(frozen=True, slots=True)
class Bench:
    """What was measured on this machine."""

    host: str
    processor: str
    source: str
    """Where the disk was read."""
    disk: Loads
    device: Device | None
    link: Link

    def flags(self) -> list[str]:
        """For `odmoe plan`. A link over loopback is none: a network is in the way of every real one."""
        if self.device is None:
            found = ["--load-bandwidth", rate_text(self.disk.bytes_per_s)]
        else:
            found = ["--load-bandwidth", rate_text(self.device.loads.bytes_per_s)]
            found += ["--worker-memory", f"{int(self.device.free_bytes / 1e8) / 10:g}GB"]
        return found + ([] if self.link.loopback else ["--link", link_text(self.link.bits_per_s)])


def run_bench(
    folder: Path | None,
    store: Path | None,
    expert_bytes: int | None,
    peer: str | None,
    secret: str | None,
    identity: Identity | None,
    terminal: Terminal,
) -> Bench:
    """Measure. `peer`: address of a host that runs `odmoe bench --serve`; loopback if it is None.
    `expert_bytes`: size of an expert in the new file, EXPERT_BYTES if it is None.

    Raises ConfigError, StoreError, LaunchError, or a ClusterError of the link.
    """
    prepare_process(terminal.debug)
    import torch

    from checkpoint.store import ExpertStore
    from odmoe.bench.loads import check_disk, check_folder, measure_device, measure_disk, temporary_store
    from odmoe.stores import cache_dir
    from wire.machine import host_name, processor_name

    prepare_libraries(1)
    if folder is None:
        folder = cache_dir() / "stores"
        folder.mkdir(parents=True, exist_ok=True)
    given = None if store is None else ExpertStore.open(store)
    writes = given is None or torch.cuda.is_available()
    if expert_bytes is not None and not writes:
        raise ConfigError(
            "--expert-bytes is given with --store, and there is no GPU here, so no new file is written; leave one out"
        )
    size = expert_bytes or EXPERT_BYTES
    if writes:
        check_folder(folder, size)
    check_disk(given.path if given is not None else folder)
    device = None
    with terminal.progress() as progress:
        link = _link(peer, secret, identity, lambda done, total: progress("link", done, total))
        if given is not None:
            disk = measure_disk(given, lambda done, total: progress("disk", done, total))
        if writes:
            with temporary_store(folder, size, lambda done, total: progress("writing", done, total)) as made:
                if given is None:
                    disk = measure_disk(made, lambda done, total: progress("disk", done, total))
                if torch.cuda.is_available():
                    loads = measure_device(made, lambda done, total: progress("GPU", done, total))
                    device = Device(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0], loads)
    return Bench(host_name(), processor_name(), str(store or folder), disk, device, link)


def _write_profile(file: Path, found: Bench, terminal: Terminal) -> None:
    """Of a machine whose nodes compute on the processor, with all of its cores."""
    import os

    from odmoe.bench.processor import measure_processor, write_profile

    prepare_libraries(len(os.sched_getaffinity(0)))
    with terminal.progress() as progress:
        processor = measure_processor(lambda done, total: progress("processor", done, total))
    bits = None if found.link.loopback else found.link.bits_per_s
    write_profile(file, found.processor, processor, found.disk.bytes_per_s, (found.link.round_trip_s / 2, bits))


def _link(peer: str | None, secret: str | None, identity: Identity | None, step: Any) -> Link:
    from odmoe.bench.link import loopback_peer, measure_link

    if peer is not None:
        return measure_link(peer, step, secret, identity)
    with loopback_peer() as address:
        return measure_link(address, step)


def rate_text(bytes_per_s: float) -> str:
    """As `--load-bandwidth` takes it: `1.23GB/s`, `456MB/s`."""
    return f"{bytes_per_s / 1e9:.3g}GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g}MB/s"


def link_text(bits_per_s: float) -> str:
    """As `--link` takes it: `9.41Gbit`, `94.1Mbit`."""
    return f"{bits_per_s / 1e9:.3g}Gbit" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.3g}Mbit"


def as_dict(found: Bench) -> dict[str, Any]:
    """What --json prints: bytes, seconds, and the flags."""
    return {**dataclasses.asdict(found), "plan_flags": found.flags()}


def as_text(found: Bench) -> str:
    """A line a part, then the command."""
    disk, link = found.disk, found.link
    how = "past the page cache (O_DIRECT)" if disk.past_cache else "no O_DIRECT here: dropped from the page cache first"
    lines = [
        f"{found.host}: {found.processor}",
        f"  disk   {_loads(disk)}",
        f"         {found.source}, {how}",
    ]
    if found.device is None:
        lines += ["  GPU    none that torch can use: experts stay in host memory, and are computed there"]
    else:
        lines += [f"  GPU    {_loads(found.device.loads)}", f"         {found.device.name}, from page-locked memory"]
    trip = f"round trip of 16 KiB {link.round_trip_s * 1e3:.2f} ms, 90 % within {link.round_trip_90_s * 1e3:.2f} ms"
    lines += [f"  link   {link_text(link.bits_per_s)}/s to {link.address}, {trip}"]
    if link.loopback:
        lines += [
            "         loopback: the most that the software carries. For --link give the network's rate, or measure it:",
            "         odmoe bench --serve on another host, odmoe bench --link HOST:PORT here",
        ]
    return "\n".join([*lines, "For odmoe plan:", f"  {' '.join(found.flags())}"])


def _loads(loads: Loads) -> str:
    size = f"{loads.expert_bytes / 2**20:.3g} MiB"
    return (
        f"{rate_text(loads.bytes_per_s)}, median of {loads.loads} loads of {size}; "
        f"{rate_text(loads.slowest)} to {rate_text(loads.fastest)}"
    )
