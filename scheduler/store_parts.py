"""Which host gets which experts of a store in parts: what each is short of, given what each has.

Nothing is taken away: a host that has more than its share keeps it. Experts are spread by bytes, and each layer evenly,
since a token asks for experts of one layer at a time. The holders of an expert are paired differently from expert to
expert, so that a lost host's work goes to all others (chained declustering has two that take it all).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import groupby

from scheduler.errors import ConfigError
from scheduler.types import ExpertId

_LITTLE = 0.5
"""A host that has less than this part of its share is filled up to it. Others differ too little to move anything."""


def missing_parts(
    sizes: Mapping[ExpertId, int],
    weights: Mapping[str, float],
    replicas: int,
    held: Mapping[str, Collection[ExpertId]],
) -> dict[str, frozenset[ExpertId]]:
    """The experts that each host is to be given, so that `replicas` hosts have each expert.

    `sizes`: bytes of each expert. `weights`: of each host's share, such as the bytes of its disk. `held`: what hosts
    have; none of them need be among `weights`. An expert is given only if it has too few holders, or to fill a host
    that has little of its share, as a new one. The answer depends on the arguments alone, in their order.

    Raises ConfigError if there are fewer hosts than `replicas`, or no share for one.
    """
    if not 1 <= replicas <= len(weights):
        raise ConfigError(f"replicas is {replicas}; allowed: 1 to {len(weights)}, the number of workers")
    shares = fair_shares(sum(sizes.values()), weights, replicas)
    spread = _Spread(sizes, shares, held)
    for expert in sizes:
        spread.complete(expert, replicas)
    for host in weights:
        spread.fill(host)
    return {host: frozenset(experts) for host, experts in spread.given.items()}


def fair_shares(total: int, weights: Mapping[str, float], replicas: int) -> dict[str, float]:
    """Each host's share of `replicas` times `total` bytes, by weight; `total` at most, since no host needs two copies.

    Raises ConfigError for a weight that is not positive.
    """
    for host, weight in weights.items():
        if not weight > 0:
            raise ConfigError(f"the weight of {host} is {weight}; allowed: more than 0")
    shares: dict[str, float] = {}
    left, rest = float(replicas * total), dict(weights)
    while rest:
        together = sum(rest.values())
        full = [host for host, weight in rest.items() if left * weight >= total * together]
        for host in full or rest:
            shares[host] = float(total) if full else left * rest[host] / together
        left -= total * len(full)
        rest = {host: weight for host, weight in rest.items() if full and host not in full}
    return shares


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
        """Give an expert to the hosts that have least of their shares, until `replicas` have it."""
        holders = self._holders[expert]
        while len(holders) < replicas:
            self._give(min((host for host in self._shares if host not in holders), key=self._rank(expert)), expert)

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
