"""Checks of links, addresses, ports and clocks."""

from __future__ import annotations

import statistics

from odmoe.doctor.disks import LAG
from odmoe.doctor.machine import Finding, Machine, Place, State
from odmoe.doctor.software import first_of
from odmoe.machines.owners.ownership import same_machine
from odmoe.machines.preflight import SKEW_S, address_faults, clock_faults, port_faults

SLOW = 300e6
"""Bits a second: a network of 100 Mbit/s, or most wireless ones, has less."""
FAR_S = 0.002
"""A round trip longer than this is no cable's and one switch's."""
DRIFT_S = 5.0
HTTP = 8000
"""The port of `odmoe serve`."""


def link(machine: Machine) -> Finding:
    """From the main host, both ways."""
    found = machine.known("link")
    if "blocked" in found:
        cure = "let the hosts' ports through the firewall: docs/lan.md, step 5; see its cable"
        return Finding(State.FAILURE, f"not reached from the main host: {found['blocked']}", cure)
    least = min(found["to"], found["from"])
    text = f"{_rate(found['to'])} from the main host, {_rate(found['from'])} to it"
    text = f"{text}, {1e3 * found['trip_s']:.2f} ms there and back"
    others = [min(one["to"], one["from"]) for one in machine.elsewhere("link") if "to" in one]
    if least < SLOW or (others and least < LAG * statistics.median(others)):
        usual = f"; other hosts reach {_rate(statistics.median(others))}" if others else ""
        return Finding(State.WARNING, f"{text}: slow{usual}")
    if found["trip_s"] > FAR_S:
        return Finding(State.WARNING, f"{text}: far; two messages a layer wait for it")
    return Finding(State.OK, text)


def _rate(bits: float) -> str:
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def address(machine: Machine) -> Finding:
    """Whether it is the host's own, and no other host of the file is the same machine."""
    machine.known("addresses")
    if machine.host is None or machine.wanted.cluster is None:
        return Finding(State.OK, "")
    names = {host.address: host.name for host in machine.wanted.cluster.hosts}
    for first, second in same_machine(machine.others):
        if second == machine.host.address:
            cure = "every node needs a host of its own: remove one of the two"
            return Finding(State.FAILURE, f"it is the same machine as {names[first]} ({first})", cure)
    return first_of(list(address_faults(machine.host, machine.facts)), machine.host.address)


def ports(machine: Machine) -> Finding:
    """Those of the cluster on a host; that of HTTP here."""
    listening = {int(port): who for port, who in machine.known("listening").items()}
    if machine.host is None:
        if HTTP in listening:
            cure = f"end that program, or start the service elsewhere: odmoe serve --bind 127.0.0.1:{HTTP + 1}"
            return Finding(State.WARNING, f"{HTTP} (HTTP) is taken by {listening[HTTP]}", cure)
        return Finding(State.OK, f"{HTTP} (HTTP) is free")
    faults = list(port_faults(machine.host, machine.facts, machine.wanted.required))
    if faults:
        return first_of(faults, "")
    wanted = machine.wanted.required.ports.get(machine.host.role, ())
    taken = [port for port in machine.wanted.worker_ports if port in listening]
    if taken:
        named = ", ".join(f"{port} by {listening[port]}" for port in taken[:3])
        return Finding(State.WARNING, f"of Ray's ports some are taken: {named}")
    if not wanted:
        return Finding(State.UNKNOWN, "the cluster file has no start commands, which name them")
    return Finding(State.OK, f"{', '.join(map(str, wanted))} are free, or the cluster's own")


def clock(machine: Machine) -> Finding:
    """Beside this machine's; here, beside the middle of all hosts'."""
    if machine.place is Place.LAUNCHER:
        skews = [found["skew_s"] for found in machine.others.values() if "skew_s" in found]
        middle = statistics.median(skews) if skews else 0.0
        if len(skews) > 1 and abs(middle) > SKEW_S:
            way = "behind" if middle > 0 else "ahead of"
            return Finding(State.FAILURE, f"{abs(middle):.0f} s {way} most hosts' clocks")
        return Finding(State.OK, "as most hosts' clocks")
    skew = machine.known("skew_s")
    faults = list(clock_faults(machine.facts))
    if not faults and abs(skew) > DRIFT_S:
        return Finding(State.WARNING, f"{skew:+.0f} s beside this machine's")
    return first_of(faults, f"within {max(1.0, abs(skew)):.0f} s of this machine's")
