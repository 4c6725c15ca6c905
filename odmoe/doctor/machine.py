"""What is known of a machine, what is wanted of it, and what a check finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, NamedTuple

from odmoe.doctor.needs import Needs
from odmoe.machines.cluster_file import ClusterFile, Host
from odmoe.machines.preflight import Requirements

Facts = dict[str, Any]


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    UNKNOWN = "not checked"


class Place(Enum):
    """What a machine is for."""

    ALONE = "alone"
    """It runs all nodes: no cluster file was given."""
    LAUNCHER = "launcher"
    """It starts a cluster of other machines."""
    HOST = "host"
    """It runs a node."""


ALL = frozenset(Place)
HERE = frozenset((Place.ALONE, Place.LAUNCHER))
RUNS = frozenset((Place.ALONE, Place.HOST))
HOST = frozenset((Place.HOST,))


class Finding(NamedTuple):
    """What a check found. `cure`: what to do about it; None for that of the check."""

    state: State
    value: str
    cure: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the report. `host`: `this machine`, or the host's name in the cluster file. `cure` is empty if
    nothing is to be done."""

    name: str
    host: str
    state: State
    value: str
    cure: str = ""


class NotKnownError(Exception):
    """A fact is not known; the message says why. No user sees it: the check then is one that cannot run."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of all machines of one examination."""

    required: Requirements
    needs: Needs | None = None
    """Of the model, if one was given."""
    cluster: ClusterFile | None = None
    code: str = ""
    """Digest of the code here."""
    packages: dict[str, str] = field(default_factory=dict)
    """Those of `required.versions` that are here."""
    worker_ports: range = range(0)
    """Of Ray's processes on every host."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that has answered. `others`: the facts of every host that did, by address, its own included."""

    name: str
    place: Place
    wanted: Wanted
    facts: Facts
    host: Host | None = None
    others: dict[str, Facts] = field(default_factory=dict)

    def known(self, name: str) -> Any:
        """A fact. Raises NotKnownError."""
        found = self.facts.get(name)
        if isinstance(found, dict) and "fault" in found and len(found) == 1:
            raise NotKnownError(str(found["fault"]))
        if name not in self.facts:
            why = self.facts.get("unknown") or f"it did not say ({name})"
            raise NotKnownError(str(why))
        return found

    @property
    def main(self) -> Facts | None:
        """The main host's facts, if it has answered."""
        cluster = self.wanted.cluster
        return None if cluster is None else self.others.get(cluster.main.address)

    def elsewhere(self, name: str, role: str | None = None) -> list[Any]:
        """A fact of each other host that has it, of one role if that is given."""
        cluster = self.wanted.cluster
        own = self.host.address if self.host else None
        wanted = {host.address for host in cluster.hosts if role in (None, host.role)} if cluster else set()
        return [
            found[name]
            for address, found in self.others.items()
            if address in wanted - {own} and name in found and "fault" not in (found[name] or {})
        ]
