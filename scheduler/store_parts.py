"""Which host gets which experts of a store in parts: what each is short of, given what each has.

Nothing is taken away: a host that has more than its share keeps it. Experts are spread by bytes, and each layer evenly,
since a token asks for experts of one layer at a time. The holders of an expert are paired differently from expert to
expert, so that a lost host's work goes to all others (chained declustering has two that take it all).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import groupby

from scheduler.errors import ConfigError, DoesNotFitError
from scheduler.types import ExpertId

_LITTLE = 0.5
"""A host that has less than this part of its share is filled up to it. Others differ too little to move anything."""


def missing_parts(
    sizes: Mapping[ExpertId, int],
    rooms: Mapping[str, float],
    replicas: int,
    held: Mapping[str, Collection[ExpertId]],
) -> dict[str, frozenset[ExpertId]]:
    """The experts that each host is to be given, so that `replicas` hosts have each expert.

    `sizes`: bytes of each expert. `rooms`: bytes for experts that each host has, those that it holds among them.
    `held`: what hosts have; some may have no room, as they are gone. An expert is given only if it has too few holders,
    or to fill a host that has little of its share, as a new one. The answer depends on the arguments alone, in their
    order.

    Raises ConfigError if there are fewer hosts than `replicas`, DoesNotFitError if they have too little room.
    """
    if not 1 <= replicas <= len(rooms):
        raise ConfigError(f"replicas is {replicas}; allowed: 1 to {len(rooms)}, the number of workers")
    spread = _Spread(sizes, fair_shares(sum(sizes.values()), rooms, replicas), held)
    for expert in sizes:
        spread.complete(expert, replicas)
    for host in rooms:
        spread.fill(host)
    return {host: frozenset(experts) for host, experts in spread.given.items()}


def fair_shares(total: int, rooms: Mapping[str, float], replicas: int) -> dict[str, float]:
    """Each host's share of `replicas` times `total` bytes: the same for all that have room for it, the others' room for
    the others. No host needs two copies. Raises DoesNotFitError."""
    most = {host: max(0.0, min(float(total), room)) for host, room in rooms.items()}
    left, needed = float(replicas * total), replicas * total
    if sum(most.values()) < needed:
        raise DoesNotFitError(
            f"{replicas} copies of all experts are {needed / 1e9:.2f} GB, the hosts have room for "
            f"{sum(most.values()) / 1e9:.2f}; make room there, or give fewer replicas or more workers"
        )
    shares: dict[str, float] = {}
    for number, host in enumerate(sorted(most, key=most.__getitem__)):
        shares[host] = min(most[host], left / (len(most) - number))
        left -= shares[host]
    return {host: shares[host] for host in rooms}


class _Spread:
    """The hosts' experts while they are given out."""

    def __init__(
        self, sizes: Mapping[ExpertId, int], shares: Mapping[str, float], held: Mapping[str, Collection[ExpertId]]
    ) -> None:
        self._sizes, self._shares = sizes, shares
        self._order = {host: number for number, host in enumerate(shares)}
        self._bytes = dict.fromkeys(shares, 0)
        self._pairs: dict[tuple[str, str], int] = {}
        self._in_layer: dict[tuple[str, int], int] = {}
        self._holders: dict[ExpertId, list[str]] = {expert: [] for expert in sizes}
        self.given: dict[str, set[ExpertId]] = {host: set() for host in shares}
        for host in shares:
            for expert in sorted(sizes.keys() & set(held.get(host, ()))):
                self._note(host, expert)

    def complete(self, expert: ExpertId, replicas: int) -> None:
        """Give an expert to the hosts that have least of their shares, until `replicas` have it. Raises
        DoesNotFitError."""
        holders = self._holders[expert]
        while len(holders) < replicas:
            able = [host for host, share in self._shares.items() if share and host not in holders]
            if not able:
                raise DoesNotFitError(
                    f"{replicas} hosts are to hold each expert, {len(holders)} have room; make room on others"
                )
            self._give(min(able, key=self._rank(expert)), expert)

    def fill(self, host: str) -> None:
        """Give a host that has little of its share the experts of the fullest others, layer by layer."""
        share = self._shares[host]
        if self._bytes[host] >= share * _LITTLE:
            return
        relief = dict(self._bytes)
        rest = {expert for expert in self._sizes if host not in self._holders[expert]}
        for layer in _turns(rest):
            expert = max(layer, key=lambda one: (max(relief[holder] for holder in self._holders[one]), -one.expert))
            if self._bytes[host] + self._sizes[expert] > share:
                return
            relief[max(self._holders[expert], key=relief.__getitem__)] -= self._sizes[expert]
            layer.remove(expert)
            self._give(host, expert)

    def _rank(self, expert: ExpertId) -> Callable[[str], tuple[float, float, int, int]]:
        holders = self._holders[expert]

        def rank(host: str) -> tuple[float, float, int, int]:
            pairs = sum(self._pairs.get(_pair(host, other), 0) for other in holders)
            in_layer = self._in_layer.get((host, expert.layer), 0) / self._shares[host]
            return self._bytes[host] / self._shares[host], in_layer, pairs, self._order[host]

        return rank

    def _give(self, host: str, expert: ExpertId) -> None:
        self.given[host].add(expert)
        self._note(host, expert)

    def _note(self, host: str, expert: ExpertId) -> None:
        holders = self._holders[expert]
        for other in holders:
            self._pairs[_pair(host, other)] = self._pairs.get(_pair(host, other), 0) + 1
        holders.append(host)
        self._bytes[host] += self._sizes[expert]
        key = host, expert.layer
        self._in_layer[key] = self._in_layer.get(key, 0) + self._sizes[expert]


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)


def _turns(experts: Iterable[ExpertId]) -> Iterator[list[ExpertId]]:
    """A layer's experts that are left, the layers in turn. The caller removes one each time."""
    layers = [list(some) for _, some in groupby(sorted(experts), key=lambda expert: expert.layer)]
    while layers := [layer for layer in layers if layer]:
        yield from layers
