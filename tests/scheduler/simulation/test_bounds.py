"""Belady's eviction against every choice of victims there is, and what the simulator says of misses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import ConfigError
from scheduler.policies.future import Future, KnownRequest
from scheduler.policies.registry import RESIDENCIES
from scheduler.policies.residency.belady import Belady
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.bounds import Access, AccessLog, optimal_misses
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.route_model import find_route_model
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import Outcome, simulate_requests
from scheduler.timing.profile import find_profile
from scheduler.types import ModelShape, Visit
from support.scheduling.cache_driver import Device

GATES = st.lists(st.frozensets(st.integers(0, 4), min_size=1, max_size=2), max_size=9)
PC = replace(find_profile("rtx3090-pcie3"), layers=4, experts=8, top_k=2)
SCENARIO = Scenario(
    PC,
    prompt_tokens=6,
    tokens=24,
    slots=10,
    workers=1,
    route_model=find_route_model("fine-moe"),
    system=SystemConfig("none", "lru", prefill="pipelined"),
)
EXACT_CACHES = [name for name in RESIDENCIES if name not in ("none", "all", "score", "mrs", "multidimensional")]


def fewest_misses(gates: tuple[frozenset[int], ...], slots: int) -> int:
    """Over all orders of a gate's missing experts, and all victims for each."""

    @cache
    def search(number: int, resident: frozenset[int]) -> int:
        if number == len(gates):
            return 0
        missing = gates[number] - resident
        return len(missing) + min(
            search(number + 1, after)
            for order in itertools.permutations(sorted(missing))
            for after in brought(order, resident)
        )

    def brought(order: tuple[int, ...], resident: frozenset[int]) -> set[frozenset[int]]:
        found = {resident}
        for expert in order:
            found = {
                kept | {expert}
                for one in found
                for kept in ([one] if len(one) < slots else [one - {victim} for victim in one])
            }
        return found

    return search(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), GATES)
def test_no_choice_of_victims_has_fewer_misses(slots: int, gates: list[frozenset[int]]) -> None:
    accesses = [Access(0, set(gate), counts=True) for gate in gates]
    assert optimal_misses(accesses, slots) == fewest_misses(tuple(gates), slots)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=10))
def test_the_residency_is_optimal_too(slots: int, asked: list[int]) -> None:
    shape = ModelShape((0,), 5, 1)
    policy = Belady(shape)
    policy.future = Future({0: KnownRequest(1, [(asked[0],)], [[(one,)] for one in asked[1:]])})
    driver = Device(policy, shape, slots)
    misses = 0
    for position, number in enumerate(asked):
        driver.position = position
        misses += driver.gate(0, [number]).count(False)
    assert misses == fewest_misses(tuple(frozenset([one]) for one in asked), slots)


def test_counts_are_of_decoding_and_of_different_experts() -> None:
    log = AccessLog()
    log.add(Visit(1, 0, 0), [0, 1], counts=False)
    for request in (1, 2):
        log.add(Visit(request, 1, 0), [0, 2], counts=True)
    assert len(log.accesses) == 2
    assert optimal_misses(log.accesses, 2) == 1


@pytest.mark.parametrize("name", ["lru", "belady"])
def test_no_residency_has_fewer_misses_than_the_bound_for_several_requests(name: str) -> None:
    scenario = replace(SCENARIO, requests=4, system=replace(SCENARIO.system, residency=name))
    found = simulate_requests(scenario, random_arrivals(scenario), count_misses=True).misses
    assert found is not None
    assert found.total >= found.optimal > 0


def test_beside_a_host_there_is_no_split() -> None:
    scenario = replace(SCENARIO, host=True, system=replace(SCENARIO.system, placement="balance"))
    assert simulate_requests(scenario, random_arrivals(scenario), count_misses=True).misses is None


def run(**system: str) -> Outcome:
    scenario = replace(SCENARIO, system=replace(SCENARIO.system, **system))
    return simulate_requests(scenario, random_arrivals(scenario), count_misses=True)


@pytest.mark.parametrize("name", EXACT_CACHES)
def test_no_residency_has_fewer_misses_without_prefetch(name: str) -> None:
    found = run(residency=name).misses
    assert found is not None
    assert found.total >= found.optimal > 0
    assert found.total >= run(residency="belady").misses.total  # type: ignore[union-attr]


def test_the_simulated_residency_comes_near_the_bound() -> None:
    """What is loaded together has its slots together, which the bound does not ask for."""
    found = run(residency="belady").misses
    assert found is not None
    assert found.optimal <= found.total <= 1.15 * found.optimal


def test_perfect_prefetch_is_faster_than_any_prediction() -> None:
    best = run(residency="belady", predictor="perfect")
    rates = [run(residency="belady").decode_tokens_per_s, run(predictor="random").decode_tokens_per_s]
    assert best.decode_tokens_per_s is not None
    assert all(rate is not None and best.decode_tokens_per_s > rate for rate in rates)
    assert best.stats.overall.recall == 1


def test_with_a_slot_for_each_expert_nothing_is_missed_for_good() -> None:
    scenario = replace(SCENARIO, slots=32)
    outcome = simulate_requests(scenario, random_arrivals(scenario), count_misses=True)
    assert outcome.misses is not None
    assert outcome.misses.total == outcome.misses.optimal


def test_rows_of_drafts_are_not_foreseen() -> None:
    scenario = replace(SCENARIO, block=2, system=SystemConfig("none", "belady"))
    with pytest.raises(ConfigError, match=r"--residency belady knows .* leave --draft out"):
        simulate_requests(scenario, random_arrivals(scenario), count_misses=True)
