"""Plans of the paper's own shape, where tests/scheduler/planning takes fewer layers. About 35 seconds of one core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from scheduler.planning.plan import Plan, make_plan
from scheduler.planning.scaling import Change, Hardware, Policy, Setup, best, choose, compared_tokens, speed
from scheduler.timing.profile import find_profile
from support.scheduling.paper_setup import MIXTRAL, PAPER, PROFILE, on

pytestmark = pytest.mark.system


@pytest.fixture(scope="module", autouse=True)
def one_request() -> Iterator[None]:
    """Several, and drafts, take longest to simulate: tests/odmoe/commands/test_plan.py has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scheduler.planning.plan.TOGETHER", ())
        patch.setattr("scheduler.planning.plan.DRAFTED", ())
        patch.setattr("scheduler.planning.plan.fitted", lambda setup: ())
        yield


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 4, 6])
def test_no_other_groups_are_faster(workers: int, top_k: int) -> None:
    setup = Setup(replace(MIXTRAL, top_k=top_k, layers=12, depth=12), Hardware(PROFILE, workers, 3e9), Policy())
    (group, slots), found = next(iter(choose(setup).items()))
    tokens = compared_tokens(setup.model)
    every = {pair: speed(setup, *pair, tokens) for pair in product(range(1, workers + 1), (1, 2, 3, 4))}
    assert found == every[group, slots]
    assert found >= 0.97 * max(every.values()), every


def test_of_choices_as_fast_the_one_with_the_least_memory() -> None:
    found = choose(on(PAPER, device_bytes=24e9))
    assert next(iter(found))[1] == 2
    of_slots = {slots: rate for (_, slots), rate in found.items() if rate}
    assert of_slots[4] == pytest.approx(of_slots[2], rel=0.005)
    assert make_plan(on(PAPER, device_bytes=1e9)).slots == 1


def test_quick_loads_need_no_shadow_and_slow_ones_do() -> None:
    alone = {
        bps: next(c for c in make_plan(on(PAPER, load_bytes_per_s=bps)).changes if c.alone) for bps in (2e10, 1e14)
    }
    assert alone[2e10].factor < 0.5
    assert alone[1e14].factor == pytest.approx(1, abs=0.01)


def test_a_plan_without_a_shadow_says_what_one_would_bring() -> None:
    found = make_plan(replace(PAPER, policy=Policy("none")))
    assert found.memory["shadow"] == 0
    assert next(c for c in found.changes if c.what == "with an int8 shadow").factor > 3
    assert not any(c.alone for c in found.changes)


def first_word(setup: Setup) -> str:
    found = best(make_plan(setup).changes)
    return found.what if found else ""


def test_what_is_too_slow_is_what_would_help() -> None:
    half = Setup(replace(MIXTRAL, item_bytes=2, layers=8, depth=8), Hardware(PROFILE, 8), Policy())
    assert first_word(on(half, load_bytes_per_s=2e9)).startswith("loads twice as fast")
    assert first_word(on(half, link_bits_per_s=1e7)).startswith("links of 10 Gbit/s")
    assert first_word(on(half, load_bytes_per_s=1e12, main=0.1)).startswith("a main node")
    assert first_word(on(half, load_bytes_per_s=1e12, worker=0.02)).startswith("workers that compute")


def kept(plan: Plan) -> Change:
    return next(change for change in plan.changes if "--residency all" in change.what)


def test_what_the_workers_could_keep_is_only_offered_where_it_fits() -> None:
    found = {size: kept(make_plan(on(PAPER, device_bytes=size))) for size in (1e9, 24e9)}
    assert [found[1e9].real, found[24e9].real] == [False, True]
    assert found[24e9].price.startswith("32 slots, 22.57 GB")
    assert found[24e9].tokens_per_s == pytest.approx(5.3, rel=0.02)


def test_the_rtx3080s_workers_are_a_little_slower() -> None:
    other = make_plan(Setup(MIXTRAL, Hardware(find_profile("rtx3080-1gbe"), 8), PAPER.policy))
    assert 0.96 < other.tokens_per_s / make_plan(PAPER).tokens_per_s < 1
