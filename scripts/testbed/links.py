"""The testbed's network: a bridge for a switch, a veth pair for each host's cable, and how fast both ends may send.

Why these numbers. A token bucket (htb) at each end of a cable lets `rate` through, Ethernet headers counted: of 1514
bytes a frame 1448 are what TCP carries, so 1 Gbit/s carries at most 0.956 Gbit/s. `BURST_US` is how much of the rate
may be saved up in a pause: less, and a timer that fires late on a busy machine costs rate; more, and messages pass as
if there were no limit. htb and not tbf, since htb lets a packet pass as soon as the bucket is not in debt, however
large the packet is, and makes the next one wait; tbf would have to hold a whole packet of up to 64 KB, as TCP hands
them down, or cut it to frames, which costs two cores most of their time at 1 Gbit/s. The price is that a lone message
arrives early: up to 64 KB after a pause take no time, instead of 8 ns a byte, and what follows makes up for it. A
sender's queue holds `QUEUE_MS` of its rate, about what a small switch has.
"""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path

from odmoe.machines.cluster_file import Host
from scripts.testbed.layout import Layout, TestbedError, call, tool

DEVICE = "eth0"
"""A host's own side of its link."""

BURST_US = 64
BURST_LEAST = 8000
QUEUE_MS = 20
QUEUE_LEAST = 1 << 18
MAC = "02:0d"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits(rate: str) -> float:
    """Bits a second of `100mbit`, `1gbit`, ... Raises TestbedError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.strip().lower())
    value = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not 1e5 <= value <= 1e11:
        raise TestbedError(f"the rate is {rate!r}; allowed: 100kbit to 100gbit, such as 1gbit or 100mbit")
    return value


def spoken(value: float) -> str:
    """A rate as `bits` takes it."""
    for unit, size in reversed(UNITS.items()):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value / 1e3:g}kbit"


def exists(device: str) -> bool:
    return Path("/sys/class/net", device).exists()


def devices(start: str) -> list[str]:
    """Interfaces of this machine whose names start so."""
    return sorted(path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith(start))


def batch(lines: list[str], inside: int | None = None, program: str = "ip") -> None:
    """Commands of ip or tc in one go, `inside` a process's network if one is named. Raises TestbedError."""
    call([*_enter(inside), tool(program), "-batch", "-"], given="\n".join(lines) + "\n")


def _enter(inside: int | None) -> list[str]:
    return [tool("nsenter"), "--net", "--target", str(inside)] if inside else []


def check_range_free(layout: Layout) -> None:
    """Raises TestbedError naming who else has addresses of the testbed's network."""
    for device in json.loads(call([tool("ip"), "-json", "-4", "address"])):
        for address in device.get("addr_info", []):
            network = ipaddress.ip_network(f"{address['local']}/{address['prefixlen']}", strict=False)
            if device["ifname"] != layout.bridge and network.overlaps(layout.network):
                whose = f" ({device['ifalias']})" if device.get("ifalias") else ""
                raise TestbedError(
                    f"{device['ifname']}{whose} of this machine is already in {network}, and the testbed needs "
                    f"{layout.network}; give the hosts of {layout.cluster.path} addresses in another /24, or take "
                    "that interface down"
                )
    for route in json.loads(call([tool("ip"), "-json", "-4", "route"])):
        if route["dst"] == "default" or route.get("dev") == layout.bridge:
            continue
        if ipaddress.ip_network(route["dst"], strict=False).overlaps(layout.network):
            raise TestbedError(
                f"this machine already has a route to {route['dst']} by {route.get('dev', 'another way')}, and the "
                f"testbed needs {layout.network}; give the hosts of {layout.cluster.path} addresses in another /24"
            )


def make_bridge(layout: Layout) -> bool:
    """The switch, with the launching machine on it. True where it was not there."""
    fresh = not exists(layout.bridge)
    lines = [f"link add name {layout.bridge} address {hardware(layout.gateway)} type bridge"] if fresh else []
    batch(
        [
            *lines,
            f"link set dev {layout.bridge} addrgenmode none",
            f"link set dev {layout.bridge} alias odmoe-testbed:{layout.cluster.name}",
            f"address replace {layout.gateway}/24 dev {layout.bridge}",
            f"link set dev {layout.bridge} up",
        ]
    )
    return fresh


def hardware(address: str) -> str:
    """A MAC that follows from the address, so that nobody's neighbour table goes stale when a host is made again."""
    return ":".join([MAC, *(f"{byte:02x}" for byte in ipaddress.IPv4Address(address).packed)])


def connect(layout: Layout, host: Host, pid: int, rate: str) -> list[str]:
    """Lays the host's cable, or what is missing of it; `pid` is a process of the host. Returns what was not as asked.

    Raises TestbedError.
    """
    outer = layout.link(host)
    found: list[str] = []
    if not exists(outer):
        ends = f"name {outer} address 02:0e{hardware(host.address)[5:]} type veth"
        peer = f"peer name {DEVICE} address {hardware(host.address)} netns {pid}"
        call([tool("ip"), "link", "add", *ends.split(), *peer.split()])
        found.append("no link")
    else:
        found += [] if master(outer) == layout.bridge else ["link not on the bridge"]
        found += [] if plugged(outer) else ["unplugged"]
        found += [] if abs(rate_of(outer) / bits(rate) - 1) < 0.01 else [f"link rate {spoken(rate_of(outer))}"]
    batch(
        [
            f"link set dev {outer} master {layout.bridge} addrgenmode none",
            f"link set dev {outer} alias odmoe-testbed:{layout.cluster.name}:{host.name}",
            f"link set dev {outer} up",
        ]
    )
    batch(
        [
            "link set dev lo up",
            f"link set dev {DEVICE} addrgenmode none",
            f"link set dev {DEVICE} up",
            f"address replace {host.address}/24 dev {DEVICE}",
            f"route replace default via {layout.gateway}",
        ],
        inside=pid,
    )
    shape(layout, host, pid, rate)
    return found


def shape(layout: Layout, host: Host, pid: int, rate: str) -> None:
    """Both directions of a host's link. Raises TestbedError."""
    bits(rate)
    _limit(layout.link(host), rate)
    _limit(DEVICE, rate, inside=pid)


def _limit(device: str, rate: str, inside: int | None = None) -> None:
    value = bits(rate)
    burst = max(BURST_LEAST, round(value / 8 * BURST_US / 1e6))
    queue = max(QUEUE_LEAST, round(value / 8 * QUEUE_MS / 1e3))
    fresh = [f"qdisc replace dev {device} root handle 1: htb default 1"]
    batch(
        [
            *([] if rate_of(device, inside) else fresh),  # htb itself cannot be replaced by htb
            f"class replace dev {device} parent 1: classid 1:1 htb rate {round(value)}bit ceil {round(value)}bit "
            f"burst {burst} cburst {burst} quantum 60000",
            f"qdisc replace dev {device} parent 1:1 handle 10: bfifo limit {queue}",
        ],
        inside,
        "tc",
    )


def set_plugged(layout: Layout, host: Host, up: bool) -> None:
    """Pulls the cable out at the switch, or puts it in again. Raises TestbedError."""
    if not exists(layout.link(host)):
        raise TestbedError(f"{host.name} has no link; run `python -m scripts.testbed up`, which makes what is missing")
    call([tool("ip"), "link", "set", "dev", layout.link(host), "up" if up else "down"])


def plugged(device: str) -> bool:
    return bool(int(Path("/sys/class/net", device, "flags").read_text(), 16) & 1)


def master(device: str) -> str:
    path = Path("/sys/class/net", device, "master")
    return path.resolve().name if path.exists() else ""


def rate_of(device: str, inside: int | None = None) -> float:
    """Bits a second that the device may send; 0 if it has no limit."""
    shown = call([*_enter(inside), tool("tc"), "class", "show", "dev", device])  # its -json is not JSON in iproute2 6.1
    found = re.search(r"class htb 1:1 .*?rate (\d+(?:\.\d+)?)([KMG]?)bit", shown)
    return float(found[1]) * {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}[found[2]] if found else 0.0


def counters(device: str) -> tuple[int, int]:
    """Bytes that the host at this link has received and sent, headers included."""
    folder = Path("/sys/class/net", device, "statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


def of_cluster(layout: Layout) -> list[str]:
    """All interfaces of the testbed on this machine, the bridge last."""
    return sorted(devices(layout.bridge), key=lambda name: name == layout.bridge)


def remove(device: str) -> None:
    """Raises TestbedError if it is still there afterwards."""
    try:
        call([tool("ip"), "link", "delete", "dev", device])
    except TestbedError:
        if exists(device):  # it may have gone with its host meanwhile
            raise
