"""Plans of the paper's own shape, where tests/scheduler/planning takes fewer layers. About 20 seconds of one core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from scheduler.planning.plan import Plan, make_plan
from scheduler.planning.scaling import Change, Hardware, Policy, Setup, choose, compared_tokens, speed
from support.scheduling.paper_setup import MIXTRAL, PAPER, PROFILE, on

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def one_request() -> Iterator[None]:
    """Several, and drafts, take longest to simulate: tests/odmoe/commands/test_plan.py has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scheduler.planning.plan.TOGETHER", ())
        patch.setattr("scheduler.planning.plan.DRAFTED", ())
        patch.setattr("scheduler.planning.plan.other_fits", lambda setup: ())
        yield


@pytest.mark.parametrize(("workers", "top_k"), [(1, 3), (4, 1), (6, 2)])
def test_no_other_groups_are_faster(workers: int, top_k: int) -> None:
    setup = Setup(replace(MIXTRAL, top_k=top_k, layers=12, depth=12), Hardware(PROFILE, workers, 3e9), Policy())
    (group, slots), found = next(iter(choose(setup).items()))
    tokens = compared_tokens(setup.model)
    every = {pair: speed(setup, *pair, tokens) for pair in product(range(1, workers + 1), (1, 2, 3, 4))}
    assert found == every[group, slots]
    assert found >= 0.97 * max(every.values()), every


def kept(plan: Plan) -> Change:
    return next(change for change in plan.changes if "--residency all" in change.what)


def test_more_memory_is_used_where_it_makes_answers_faster() -> None:
    """Of choices as fast, the one with the least memory; and all experts are kept only where they fit."""
    small, large = (make_plan(on(PAPER, device_bytes=size)) for size in (1e9, 24e9))
    assert [small.slots, large.slots] == [1, 2]
    of_slots = {slots: rate for (_, slots), rate in large.tried.items() if rate}
    assert of_slots[4] == pytest.approx(of_slots[2], rel=0.005)
    assert [kept(small).real, kept(large).real] == [False, True]
    assert kept(large).price.startswith("32 slots, 22.57 GB")
    assert kept(large).tokens_per_s == pytest.approx(5.3, rel=0.02)
