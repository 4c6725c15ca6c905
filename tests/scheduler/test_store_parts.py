"""Random clusters that lose and get hosts: how many copies there are, on whom, and what moves."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from itertools import combinations

import pytest

from scheduler.errors import ConfigError, DoesNotFitError
from scheduler.store_parts import fair_shares, missing_parts
from scheduler.types import ExpertId

Held = dict[str, frozenset[ExpertId]]
ROOM = math.inf


def model(layers: int, experts: int, *nbytes: int) -> dict[ExpertId, int]:
    """Sizes: of each layer the next of `nbytes`, again from the first."""
    return {ExpertId(n, e): nbytes[n % len(nbytes)] for n in range(layers) for e in range(experts)}


def after(held: Mapping[str, frozenset[ExpertId]], given: Held) -> Held:
    return {host: held.get(host, frozenset()) | experts for host, experts in given.items()}


def placed(sizes: Mapping[ExpertId, int], hosts: int, replicas: int) -> Held:
    return missing_parts(sizes, {f"h{n}": ROOM for n in range(hosts)}, replicas, {})


def nbytes(sizes: Mapping[ExpertId, int], experts: frozenset[ExpertId]) -> int:
    return sum(sizes[expert] for expert in experts)


def copies(held: Held) -> Counter[ExpertId]:
    return Counter(expert for experts in held.values() for expert in experts)


@pytest.mark.parametrize(("layers", "experts"), [(8, 8), (32, 8), (58, 256)])
def test_eight_hosts_with_two_replicas_hold_a_quarter_each(layers: int, experts: int) -> None:
    sizes = model(layers, experts, 1)
    held = placed(sizes, 8, 2)
    assert max(len(part) for part in held.values()) / len(sizes) <= 0.26
    assert copies(held) == dict.fromkeys(sizes, 2)
    per_layer = Counter((host, expert.layer) for host, part in held.items() for expert in part)
    assert max(per_layer.values()) - min(per_layer.values()) <= 1


def test_a_lost_hosts_experts_are_with_all_others() -> None:
    held = placed(model(32, 8, 1), 8, 2)
    together = [len(held[one] & held[other]) for one, other in combinations(held, 2)]
    assert min(together) >= 256 / 28 - 2
    assert max(together) <= 256 / 28 + 2


@pytest.mark.parametrize("seed", range(40))
def test_what_moves_when_hosts_go_and_come(seed: int) -> None:
    choose = random.Random(seed)
    sizes = model(choose.randint(1, 12), choose.choice([4, 8, 16, 60]), *choose.choices([3, 4, 5], k=3))
    count = choose.randint(3, 12)
    replicas = choose.randint(1, min(4, count - 1))
    held, largest = placed(sizes, count, replicas), max(sizes.values())
    assert copies(held) == dict.fromkeys(sizes, replicas)
    share = replicas * sum(sizes.values()) / count
    assert all(abs(nbytes(sizes, part) - share) <= 2 * largest for part in held.values())
    assert not any(missing_parts(sizes, dict.fromkeys(held, ROOM), replicas, held).values())

    lost = choose.choice(sorted(held))
    left = {host: part for host, part in held.items() if host != lost}
    given = missing_parts(sizes, dict.fromkeys(left, ROOM), replicas, held)
    assert copies(given) == dict.fromkeys(held[lost], 1)  # a copy of each, and nothing else
    assert given.keys() == left.keys()
    left = after(left, given)
    share = replicas * sum(sizes.values()) / len(left)
    assert max(nbytes(sizes, part) for part in left.values()) <= share * 1.1 + 2 * largest

    hosts = dict.fromkeys([*held, "new"], ROOM)
    given = missing_parts(sizes, hosts, replicas, held)
    assert {host for host, part in given.items() if part} <= {"new"}
    share = replicas * sum(sizes.values()) / len(hosts)
    assert nbytes(sizes, given["new"]) <= share
    assert nbytes(sizes, given["new"]) > share - largest
    assert not any(missing_parts(sizes, hosts, replicas, after(held, given)).values())


def test_an_interrupted_copy_is_taken_up_where_it_stopped() -> None:
    sizes = model(6, 8, 1)
    wanted = placed(sizes, 4, 2)
    begun = {host: frozenset(sorted(part)[:7]) for host, part in wanted.items()}
    given = missing_parts(sizes, dict.fromkeys(wanted, ROOM), 2, begun)
    assert all(not given[host] & begun[host] for host in wanted)
    assert copies(after(begun, given)) == dict.fromkeys(sizes, 2)


def test_a_host_that_has_everything_keeps_it_and_counts() -> None:
    sizes = model(4, 8, 1)
    given = missing_parts(sizes, {"whole": ROOM, "a": ROOM, "b": ROOM}, 2, {"whole": frozenset(sizes)})
    assert not given["whole"]
    assert copies(given) == dict.fromkeys(sizes, 1)


def test_hosts_with_little_room_get_what_they_have_room_for() -> None:
    assert fair_shares(100, {"a": 150, "b": 80, "c": 20}, 2) == {"a": 100, "b": 80, "c": 20}
    assert fair_shares(100, {"a": 90, "b": 10, "c": 90}, 1) == {"a": 45, "b": 10, "c": 45}
    sizes = model(10, 10, 1)
    held = missing_parts(sizes, {"a": ROOM, "b": 40, "c": 15, "d": ROOM}, 2, {})
    assert [len(held[host]) for host in "abcd"] == pytest.approx([72, 40, 15, 72], abs=2)


@pytest.mark.parametrize(
    ("rooms", "replicas", "words"),
    [
        ({"a": ROOM}, 2, "replicas is 2; allowed: 1 to 1"),
        ({"a": 9.0, "b": 10.0}, 2, "are 0.00 GB, the hosts have room for 0.00; make room there"),
    ],
)
def test_what_cannot_be_is_named(rooms: dict[str, float], replicas: int, words: str) -> None:
    with pytest.raises((ConfigError, DoesNotFitError), match=words):
        missing_parts(model(5, 2, 1), rooms, replicas, {})
