"""All checks, in the order of the report. A new check is a function and an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from odmoe.doctor import disks, hardware, network, secrets, software
from odmoe.doctor.machine import ALL, HERE, HOST, RUNS, Finding, Machine, NotKnownError, Place, Result, State


@dataclass(frozen=True, slots=True)
class Check:
    """`cure`: what to do if the finding does not say it itself."""

    name: str
    run: Callable[[Machine], Finding]
    cure: str
    places: frozenset[Place] = ALL


CHECKS = (
    Check("node", software.node, "odmoe up starts it; odmoe status shows all nodes", HOST),
    Check("Python", software.python, "install Python 3.11 or newer, as python3"),
    Check("packages", software.packages, "remove ~/odmoe/venv there, and odmoe up makes it again"),
    Check("our code", software.code, "odmoe up brings that of this machine", HOST),
    Check("commands", software.commands, "apt-get install openssh-client rsync make python3-venv"),
    Check("processor", hardware.processor, "use hosts with one kind of processor where every bit must be the same"),
    Check("cores", hardware.cores, ""),
    Check("GPU", hardware.gpu, "install a newer driver, and restart the machine", RUNS),
    Check("memory", hardware.memory, "close other programs", RUNS),
    Check("swap", hardware.swap, "memory was short, and what was swapped is slow: close other programs", RUNS),
    Check("container", hardware.container, "raise the limit of the container or service (--memory, MemoryMax)", RUNS),
    Check("folders", disks.folders, "make them belong to the user", HOST),
    Check("disk room", disks.room, "make room, or remove old stores: odmoe models, odmoe host-stores"),
    Check("disk speed", disks.speed, "put the store on a faster disk (an NVMe SSD), or keep more in memory", RUNS),
    Check("store", disks.store, "odmoe up copies it again", RUNS),
    Check("link", network.link, "use a cable of 1 Gbit/s, and look at the switch: ethtool eth0 shows the rate", HOST),
    Check("address", network.address, "give the address by which the hosts reach it", HOST),
    Check("clock", network.clock, "set it: timedatectl set-ntp true", frozenset((Place.LAUNCHER, Place.HOST))),
    Check("ports", network.ports, "end that program", RUNS),
    Check(
        "certificates",
        secrets.certificates,
        "set the clock if it is wrong; else odmoe certs --renew, and odmoe up copies them",
        frozenset((Place.LAUNCHER, Place.HOST)),
    ),
    Check("secrets", secrets.secret_files, "chmod 600", frozenset((Place.LAUNCHER, Place.HOST))),
    Check("open files", software.open_files, "raise the limit: ulimit -n, /etc/security/limits.conf, LimitNOFILE"),
    Check("kernel", software.kernel, "", HERE | HOST),
)


def run_checks(machine: Machine) -> list[Result]:
    """Every check that concerns the machine. One that lacks a fact says so; none raises."""
    return [_run(check, machine) for check in CHECKS if machine.place in check.places]


def _run(check: Check, machine: Machine) -> Result:
    try:
        found = check.run(machine)
    except NotKnownError as error:
        found = Finding(State.UNKNOWN, str(error), "")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:  # an answer of another shape
        found = Finding(State.UNKNOWN, f"its answer cannot be read ({error!r})", "")
    good = found.state in (State.OK, State.UNKNOWN)
    return Result(check.name, machine.name, found.state, found.value, "" if good else found.cure or check.cure)
