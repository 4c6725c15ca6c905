"""Which experts are copied to whom after losses, with the times of the loss said."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from scheduler.part_copies import Copy, Holdings
from scheduler.store_parts import missing_parts
from scheduler.types import ExpertId

WAIT_S, FIRST = 60.0, 100.0


def spread(experts: list[ExpertId], workers: int, replicas: int) -> dict[int, frozenset[ExpertId]]:
    parts = missing_parts(dict.fromkeys(experts, 1), {f"{n:02}": 1e9 for n in range(workers)}, replicas, {})
    return {int(name): part for name, part in parts.items()}


def holdings(parts: dict[int, frozenset[ExpertId]], experts: list[ExpertId], replicas: int) -> Holdings:
    made = Holdings(experts, replicas, WAIT_S, FIRST)
    for worker, part in parts.items():
        made.on_held(worker, part)
    return made


@pytest.mark.parametrize("seed", range(30))
def test_copies_restore_the_count_with_as_few_as_can_be_and_evenly(seed: int) -> None:
    rng = random.Random(seed)
    workers, replicas = rng.randint(3, 9), rng.randint(1, 3)
    experts = [ExpertId(layer, e) for layer in range(rng.randint(1, 6)) for e in range(8)]
    parts = spread(experts, workers, min(replicas, workers))
    found, now = holdings(parts, experts, replicas), 1000.0
    full = {workers - 1} if workers > 4 else set()
    for lost in rng.sample(range(workers - 1), rng.randint(1, workers - 2)):
        found.on_lost(lost, now)
        del parts[lost]
    now += WAIT_S
    sizes = dict.fromkeys(experts, 7)
    wanted, moved = min(replicas, len(parts)), 0
    before = Counter(one for part in parts.values() for one in part)
    while (copy := found.next_copy(now, sizes, full)) is not None:
        counts = Counter(one for part in parts.values() for one in part)
        able = {n for n in parts if n not in full and copy.expert not in parts[n]}
        assert len(parts[copy.worker]) == min(len(parts[n]) for n in able)
        assert copy.worker in able
        assert counts[copy.expert] < wanted
        lacking = [e for e in experts if counts[e] < counts[copy.expert]]
        assert not [e for e in lacking if any(n not in full and e not in parts[n] for n in parts)], "rarer ones first"
        parts[copy.worker] |= {copy.expert}
        found.on_held(copy.worker, parts[copy.worker])
        moved += 1
    assert moved <= sum(max(0, wanted - before[e]) for e in experts)
    after = Counter(one for part in parts.values() for one in part)
    assert all(after[e] >= min(wanted, before[e]) for e in experts)
    short = {e: after[e] for e in experts if after[e] < wanted}
    assert found.shortage(now) == short
    assert not full or set(short) <= {e for e in experts if all(n in full or e in parts[n] for n in parts)}
    assert full or not short


ONE, TWO = ExpertId(0, 1), ExpertId(0, 2)
PARTS = {0: frozenset({ONE}), 1: frozenset({ONE, TWO}), 2: frozenset({TWO})}
SIZES = {ONE: 10, TWO: 30}


def test_a_lost_worker_counts_until_its_time_is_over_or_it_is_back() -> None:
    found = holdings(PARTS, [ONE, TWO], 2)
    found.on_lost(1, 200.0)
    assert found.next_copy(200.0 + WAIT_S - 1, SIZES, ()) is None
    assert found.next_copy(200.0 + WAIT_S, SIZES, ()) == Copy(ONE, 2)
    assert found.next_copy(200.0 + WAIT_S, SIZES, (2,)) == Copy(TWO, 0)
    found.on_held(1, PARTS[1])
    assert found.next_copy(1000.0, SIZES, ()) is None


def test_nothing_is_copied_while_workers_may_still_start() -> None:
    found = holdings({0: PARTS[0], 2: PARTS[2]}, [ONE, TWO], 2)
    assert found.next_copy(FIRST - 1, SIZES, ()) is None
    assert found.next_copy(FIRST, SIZES, ()) == Copy(ONE, 2)
    assert Holdings([ONE], 2, WAIT_S, FIRST).next_copy(FIRST, SIZES, ()) is None, "nobody is there"


def test_a_worker_with_all_holds_each_and_gets_none_and_what_cannot_be_read_is_left() -> None:
    found = holdings({0: PARTS[0]}, [ONE, TWO], 2)
    found.on_held(7, None)
    assert found.shortage(FIRST) == {TWO: 1}
    assert found.next_copy(FIRST, SIZES, ()) == Copy(TWO, 0)
    assert found.next_copy(FIRST, SIZES, (), [TWO]) is None
    assert found.seen().shortage(FIRST) == {TWO: 1}
