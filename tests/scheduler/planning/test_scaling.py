"""Plans against the paper's printed numbers, hand arithmetic, and searches that leave nothing out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from scheduler.alignment import Alignment
from scheduler.errors import ConfigError, DoesNotFitError
from scheduler.planning.assumptions import list_assumptions
from scheduler.planning.plan import Plan, make_plan
from scheduler.planning.role_bytes import workspace_bytes
from scheduler.planning.scaling import (
    Change,
    Hardware,
    Policy,
    Run,
    Setup,
    as_measured,
    best,
    choose,
    compared_tokens,
    equation_1,
    first_token_s,
    memory,
    outcome,
    rates,
    scale_profile,
    scenario_of,
    speed,
    workers_needed,
)
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.simulate import simulate_requests
from scheduler.timing.load_budget import load_budget
from scheduler.timing.profile import Profile, find_profile
from support.scheduling.paper_setup import ATTENTION, EXPERT, MIXTRAL, PAPER, PROFILE, few_layers, on


@pytest.fixture(scope="module", autouse=True)
def one_request() -> Iterator[None]:
    """Several, drafts and fits take longest to simulate: tests/odmoe/commands/test_plan.py has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scheduler.planning.plan.TOGETHER", ())
        patch.setattr("scheduler.planning.plan.DRAFTED", ())
        patch.setattr("scheduler.planning.plan.other_fits", lambda setup: ())
        yield


@pytest.fixture(scope="module")
def paper() -> Plan:
    """The paper's testbed."""
    return make_plan(PAPER)


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what does not depend on a few per cent."""
    monkeypatch.setattr("scheduler.planning.scaling._MOST", 12)


# --- timings ----------------------------------------------------------------------------------------------------------


def test_the_profiles_own_model_gets_the_profiles_own_timings() -> None:
    """Nothing to scale: whatever was split into bytes and a rest comes together again."""
    found = scale_profile(PAPER)
    for name in (
        "layers",
        "experts",
        "top_k",
        "hidden_bytes",
        "kv_bytes",
        "workers",
        "group_size",
        "main_layer_s",
        "main_extra_s",
        "expert_s",
        "expert_extra_s",
        "load_s",
        "load_piece_s",
        "hop_s",
        "link_bits_per_s",
        "shadow_layer_s",
        "shadow_extra_s",
    ):
        assert getattr(found, name) == pytest.approx(getattr(PROFILE, name), rel=1e-6), name


def test_half_the_bytes_save_half_of_what_bytes_took_and_nothing_else() -> None:
    """704.6 MB at 936.2 GB/s are 0.753 of an expert's 1.4 ms; 16 KB at 1 Gbit/s 0.131 of a hop's 0.45."""
    found = scale_profile(replace(PAPER, model=replace(MIXTRAL, item_bytes=2)))
    assert found.load_s == pytest.approx(0.0125)
    assert found.load_piece_s == pytest.approx(PROFILE.load_piece_s)  # as many bytes as before
    assert found.expert_s == pytest.approx(1.4e-3 - 0.75266e-3 / 2, abs=1e-8)
    assert found.hop_s == pytest.approx(0.45e-3 - 0.131072e-3 / 2)
    assert found.main_layer_s == pytest.approx(3.6e-3 - 184_320_512 / 936.2e9 / 2)
    assert found.expert_extra_s == PROFILE.expert_extra_s  # arithmetic, not bytes
    assert found.shadow_layer_s == pytest.approx(PROFILE.shadow_layer_s)  # int8 as before
    assert found.shadow_extra_s == pytest.approx(PROFILE.shadow_extra_s)


def test_a_shadow_of_half_the_bytes_reads_further_experts_in_half_the_time() -> None:
    nf4 = scale_profile(replace(PAPER, policy=replace(PAPER.policy, shadow="nf4")))
    assert nf4.shadow_extra_s == pytest.approx(PROFILE.shadow_extra_s * (4 + 32 / 64) / 8)


def test_an_expert_of_less_than_a_piece_is_one_piece() -> None:
    small = scale_profile(replace(PAPER, model=replace(MIXTRAL, expert=MIXTRAL.expert // 1000)))
    assert small.load_piece_s == small.load_s


def test_dense_layers_are_carried_by_those_with_experts() -> None:
    found = scale_profile(replace(PAPER, model=replace(MIXTRAL, depth=64)))
    bytes_s = 184_320_512 / 936.2e9
    assert found.main_layer_s == pytest.approx(2 * (3.6e-3 - bytes_s) + bytes_s)


def test_what_is_said_of_the_hardware_holds() -> None:
    found = scale_profile(on(PAPER, load_bytes_per_s=7.04643072e9, link_bits_per_s=2.5e9, worker=2, main=3))
    assert found.load_s == pytest.approx(0.1)
    assert found.load_piece_s == pytest.approx(4 * PROFILE.load_piece_s)
    assert found.link_bits_per_s == 2.5e9
    assert found.hop_s == pytest.approx(0.45e-3 - 0.131072e-3 + 0.131072e-3 / 2.5)
    assert (found.expert_s, found.main_layer_s) == pytest.approx((0.7e-3, 1.2e-3))


def test_a_profile_that_does_not_say_what_it_was_taken_on_is_refused() -> None:
    bare = replace(PROFILE, name="bare", model_sizes=None)
    with pytest.raises(ConfigError, match=r"bare lacks the sizes and devices"):
        make_plan(Setup(MIXTRAL, Hardware(bare, 8), Policy()))


# --- equation (1) -----------------------------------------------------------------------------------------------------


def test_equation_1_of_the_papers_testbed_by_hand() -> None:
    """Four groups: 4 x (3.6 + 0.45) + 3 x (1.4 + 0.45) = 21.75 ms for a load of 25."""
    budget = equation_1(PROFILE, 2)
    assert budget.max_load_s == pytest.approx(0.02175)
    assert budget.slack_s == pytest.approx(-0.00325)
    assert budget.io_bound


def test_a_worker_with_two_experts_of_a_layer_loads_and_computes_both() -> None:
    budget = equation_1(PROFILE, 1)
    assert (budget.load_s, budget.worker_s) == pytest.approx((0.05, 2 * 1.4e-3 + 0.45e-3))


def test_embeddings_for_many_experts_queue_on_the_main_nodes_link() -> None:
    """Eight of 16 KB at 1 Gbit/s are 1.05 ms, more than a hop."""
    budget = equation_1(replace(PROFILE, top_k=8), 8)
    assert budget.main_s == pytest.approx(3.6e-3 + 8 * 16384 * 8e-9)


@pytest.mark.parametrize("load_ms", [0.0, 1.0, 4.04, 4.05, 21.75, 21.76, 25.0, 100.0])
def test_the_fewest_workers_with_which_it_holds(load_ms: float) -> None:
    profile = replace(PROFILE, load_s=load_ms / 1e3)
    groups = next(
        n for n in range(1, 100) if not load_budget(2 * n, 2, 4.05, 1.85, max(0, load_ms - 1e-9)).io_bound
    )  # counted up, from the equation itself
    assert workers_needed(equation_1(profile, 2)) == 2 * groups


# --- the paper's figures ----------------------------------------------------------------------------------------------


def test_memory_is_what_the_paper_says(paper: Plan) -> None:
    """Table 2 (ii): 180 GB with all experts; 7 main, 45 shadow, 1 each worker, 60 in all."""
    gb = {name: count / 1e9 for name, count in paper.memory.items()}
    assert MIXTRAL.expert_bytes == 704_643_072
    assert gb["worker"] < 1
    assert gb["main"] == pytest.approx(7, rel=0.1)
    assert gb["shadow"] == pytest.approx(45, rel=0.06)
    assert gb["together"] == pytest.approx(60, rel=0.03)
    assert gb["whole"] == pytest.approx(180, rel=0.05)
    assert paper.memory["together"] == paper.memory["main"] + paper.memory["shadow"] + 8 * paper.memory["worker"]


def test_speed_is_what_the_paper_measured(paper: Plan) -> None:
    """3.69 tokens/s; 4.89 with every expert in memory; four groups of two."""
    assert paper.tokens_per_s == pytest.approx(3.69, rel=0.05)
    assert paper.ideal_tokens_per_s == pytest.approx(4.89, rel=0.1)
    assert (paper.group_size, paper.slots) == (2, 1)
    assert paper.tried[2, 1] == paper.tokens_per_s
    assert sum(paper.where.values()) == pytest.approx(1 / paper.tokens_per_s, rel=0.01)


def test_the_first_token_comes_as_in_the_paper_where_one_thing_follows_the_other() -> None:
    """1.345 and 3.143 s; at most 0.95 and 1.6 with loads running ahead."""
    in_turn = replace(PAPER, policy=replace(PAPER.policy, chosen=SystemConfig(prefill="in-turn")))
    for tokens, printed, ahead in ((16, 1.345, 0.95), (128, 3.143, 1.6)):
        assert outcome(in_turn, 2, 1, 2, tokens).ttft_s == pytest.approx(printed, rel=0.2)
        assert outcome(PAPER, 2, 1, 2, tokens).ttft_s <= ahead


# --- what is not simulated --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shadow", "requests"), [("int8", 1), ("none", 1), ("int8", 4), ("none", 4)])
def test_tokens_are_as_fast_as_after_a_simulated_prompt(shadow: str, requests: int) -> None:
    setup = replace(few_layers(8), policy=Policy(shadow))
    without = replace(scenario_of(setup, 2, 1, 9 if requests == 1 else 33, None), requests=requests)
    found, simulated = (
        simulate_requests(one, random_arrivals(one, setup.policy.expected_recall, 1)).decode_tokens_per_s
        for one in (without, replace(without, prompt_s=None))
    )
    assert found == pytest.approx(simulated, rel=1e-6 if requests == 1 else 0.01)


@pytest.mark.parametrize("prefill", ["ahead", "pipelined", "in-turn"])
def test_the_first_token_of_many_layers(monkeypatch: pytest.MonkeyPatch, prefill: str) -> None:
    """Twelve of 32 layers say how long all take."""
    setup = replace(PAPER, policy=Policy(chosen=SystemConfig(prefill=prefill)))
    whole = outcome(setup, 2, 1, 1, 32).ttft_s
    assert first_token_s(setup, 2, 1, 32) == whole
    monkeypatch.setattr("scheduler.planning.scaling._VISITS", 12 * MIXTRAL.experts)
    assert first_token_s(setup, 2, 1, 32) == pytest.approx(whole, rel=0.03)


def test_equal_answers_are_simulated_once() -> None:
    simulated = []

    def each(function: Callable[[Run], Any], runs: Iterable[Run]) -> Iterator[Any]:
        simulated.extend(runs)
        yield from range(len(simulated))

    one, other = Run(PAPER, 2, 1, 3), Run(PAPER, 1, 1, 3)
    assert rates(each, lambda: None, [one, other, replace(one)]) == [0, 1, 0]
    assert simulated == [one, other]


# --- choosing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "top_k"), [(1, 2), (4, 3), (6, 1)])
@pytest.mark.usefixtures("few_tokens")
def test_no_other_groups_are_faster(workers: int, top_k: int) -> None:
    setup = Setup(replace(MIXTRAL, top_k=top_k, layers=4, depth=4), Hardware(PROFILE, workers, 3e9), Policy())
    (group, slots), found = next(iter(choose(setup).items()))
    tokens = compared_tokens(setup.model)
    every = {pair: speed(setup, *pair, tokens) for pair in product(range(1, workers + 1), (1, 2, 3, 4))}
    assert found == every[group, slots]
    assert found >= 0.97 * max(every.values()), every


def test_of_choices_as_fast_the_one_with_the_least_memory() -> None:
    """A second slot lets a load that a gate waits for begin at once; more bring next to nothing."""
    found = choose(on(few_layers(8), device_bytes=24e9))
    assert next(iter(found))[1] == 2
    of_slots = {slots: rate for (_, slots), rate in found.items() if rate}
    assert of_slots[4] == pytest.approx(of_slots[2], rel=0.005)


def test_where_loads_cannot_be_given_up_a_second_slot_gains_less() -> None:
    stuck = replace(PROFILE, cancellable=False)
    assert scale_profile(on(PAPER, base=stuck)).cancellable is False
    gain, of_stuck = (speed(one, 2, 2, 32) / speed(one, 2, 1, 32) for one in (PAPER, on(PAPER, base=stuck)))
    assert of_stuck < gain - 0.01
    policy = PAPER.policy
    assert any("cancellable: false" in line for line in list_assumptions(stuck, Hardware(stuck, 8), policy))
    assert not any("cancellable" in line for line in list_assumptions(PROFILE, Hardware(PROFILE, 8), policy))


def test_what_was_said_is_kept() -> None:
    said = replace(PAPER, policy=replace(PAPER.policy, group_size=4, slots=2))
    assert list(choose(said)) == [(4, 2)]


def test_memory_that_holds_no_expert_is_refused_with_what_it_takes() -> None:
    with pytest.raises(
        DoesNotFitError, match=r"--worker-memory is 500\.0 MB, but one expert of .* takes 728\.8 MB"
    ) as caught:
        make_plan(on(PAPER, device_bytes=500e6))
    assert "bfloat16" in str(caught.value)
    assert next(iter(choose(on(few_layers(8), device_bytes=1e9))))[1] == 1


def test_slots_leave_room_to_compute_a_mini_batch() -> None:
    """704.6 MB an expert and 24.1 MB of rows on their way through it."""
    needed = 2 * MIXTRAL.expert_bytes + workspace_bytes(MIXTRAL)
    assert needed == memory(PAPER, 2)["worker"]
    assert Hardware(PROFILE, 8, device_bytes=needed).slots(MIXTRAL) == 2
    assert Hardware(PROFILE, 8, device_bytes=needed - 1).slots(MIXTRAL) == 1
    with pytest.raises(DoesNotFitError):
        Hardware(PROFILE, 8, device_bytes=MIXTRAL.expert_bytes).slots(MIXTRAL)


def test_more_slots_than_there_is_room_for_are_refused() -> None:
    said = on(replace(PAPER, policy=replace(PAPER.policy, slots=2)), device_bytes=1e9)
    with pytest.raises(DoesNotFitError, match=r"--slots is 2, .* has room for 1 expert of"):
        make_plan(said)


MACHINES = {
    "link_bits_per_s": (1e8, 1e9, 1e10),
    "load_bytes_per_s": (0.5e9, 5e9, 50e9),
    "device_bytes": (1, 2, 4),
}
"""Each a way to be better; device memory in experts."""


@pytest.mark.slow
@pytest.mark.parametrize("way", MACHINES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("few_tokens")
def test_better_machines_never_make_a_plan_slower(way: str, seed: int) -> None:
    """Small models, with states of recurrent layers or without, on all pairs of machines that differ in one thing."""
    draw = random.Random(f"{way} {seed}")
    layers, hidden, inner = draw.choice((3, 6)), draw.choice((1024, 4096)), draw.choice((512, 8192))
    state = draw.choice((0, 10**6, 4 * 10**7))
    model = replace(
        few_layers(layers).model,
        experts=draw.choice((4, 16)),
        top_k=draw.choice((1, 2, 4)),
        hidden=hidden,
        expert=3 * hidden * inner,
        state=state,
        item_bytes=2,
    )
    given = {name: draw.choice(values) for name, values in MACHINES.items()}
    workers, shadow = draw.choice((1, 2, 3, 5)), draw.choice(("int8", "int8", "none"))

    def planned(**changed: float) -> float:
        link, load, slots = (given | changed).values()
        nbytes = workspace_bytes(model) + slots * model.expert_bytes
        setup = Setup(model, Hardware(PROFILE, workers, nbytes, load, link), Policy(shadow))
        return next(iter(choose(setup).values()))

    found = [planned(**{way: value}) for value in MACHINES[way]]
    assert all(later >= 0.995 * before for before, later in pairwise(found)), (found, given, model)


def test_an_alignment_bounds_the_speed() -> None:
    """States of 125 MB take a second at 1 Gbit/s, once an alignment of theirs and not once a token of the prompt."""
    heavy = replace(
        few_layers(4),
        model=replace(few_layers(4).model, state=125_000_000 // 4, cache_token=0),
        policy=Policy(alignment=Alignment(1, 1, state_period=1)),
    )
    assert speed(heavy, 2, 1) == pytest.approx(1)
    plan = make_plan(heavy)
    assert plan.bound == "network"
    assert sum(plan.where.values()) == pytest.approx(1, rel=0.01)
    assert speed(on(heavy, link_bits_per_s=1e12), 2, 1) > 10
    seldom = replace(heavy, policy=Policy())
    assert speed(seldom, 2, 1) > 10, "by themselves, states are sent as seldom as the link affords"
    alone = replace(heavy, policy=Policy("none"))
    assert speed(alone, 2, 1) > 2, "without a shadow nothing is aligned"


# --- what would help --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_changes_are_ranked_and_each_is_what_the_changed_setup_gives(paper: Plan) -> None:
    speeds = [change.tokens_per_s for change in paper.changes]
    assert speeds == sorted(speeds, reverse=True)
    by_name = {change.what: change for change in paper.changes}
    rate, tokens = 704_643_072 / 0.025, compared_tokens(MIXTRAL)
    unchanged, unchanged_long = speed(PAPER, 2, 1, tokens), speed(PAPER, 2, 1, 129)
    for start, other in (
        ("loads twice", on(PAPER, load_bytes_per_s=2 * rate)),
        ("links of 10", on(PAPER, link_bits_per_s=1e10)),
        ("10 workers", on(PAPER, workers=10)),
        ("bfloat16", replace(PAPER, model=replace(MIXTRAL, item_bytes=2))),
        ("nf4 shadow", replace(PAPER, policy=replace(PAPER.policy, shadow="nf4"))),
        ("no shadow", replace(PAPER, policy=replace(PAPER.policy, shadow="none"))),
    ):
        change = next(change for name, change in by_name.items() if name.startswith(start))
        assert change.factor == pytest.approx(speed(other, 2, 1, tokens) / unchanged)
        assert change.tokens_per_s == pytest.approx(change.factor * paper.tokens_per_s)
        long = speed(other, 2, 1, 129) / unchanged_long
        assert change.factor == pytest.approx(long, rel=0.04 if "nf4" in start else 0.01)
    assert any("equation (1) then holds" in name for name in by_name)


def first_word(setup: Setup) -> str:
    found = best(make_plan(setup).changes)
    return found.what if found else ""


@pytest.mark.slow
@pytest.mark.usefixtures("few_tokens")
def test_what_is_too_slow_is_what_would_help() -> None:
    """A cluster with one thing far too slow: that one is named. bfloat16 to begin with, so that it is no way out."""
    half = Setup(replace(MIXTRAL, item_bytes=2, layers=4, depth=4), Hardware(PROFILE, 8), Policy())
    assert first_word(on(half, load_bytes_per_s=2e9)).startswith("loads twice as fast")
    assert first_word(on(half, link_bits_per_s=1e7)).startswith("links of 10 Gbit/s")
    assert first_word(on(half, load_bytes_per_s=1e12, main=0.1)).startswith("a main node")
    assert first_word(on(half, load_bytes_per_s=1e12, worker=0.02)).startswith("workers that compute")


@pytest.mark.usefixtures("few_tokens")
def test_quick_loads_need_no_shadow_and_slow_ones_do() -> None:
    alone = {
        bps: next(c for c in make_plan(on(few_layers(4), load_bytes_per_s=bps)).changes if c.alone)
        for bps in (2e10, 1e14)
    }
    assert alone[2e10].factor < 0.5
    assert alone[1e14].factor == pytest.approx(1, abs=0.01)


@pytest.mark.usefixtures("few_tokens")
def test_a_plan_without_a_shadow_says_what_one_would_bring() -> None:
    found = make_plan(replace(few_layers(16), policy=replace(PAPER.policy, shadow="none")))
    assert found.memory["shadow"] == 0
    assert next(c for c in found.changes if c.what == "with an int8 shadow").factor > 3
    assert not any(c.alone for c in found.changes)


def kept(plan: Plan) -> Change:
    return next(change for change in plan.changes if "--residency all" in change.what)


@pytest.mark.usefixtures("few_tokens")
def test_what_the_workers_could_keep_is_only_offered_where_it_fits() -> None:
    found = {size: kept(make_plan(on(few_layers(4), device_bytes=size))) for size in (1e9, 24e9)}
    assert [found[1e9].real, found[24e9].real] == [False, True]
    assert found[24e9].price.startswith("4 slots, 2.84 GB")


def test_what_the_papers_workers_would_have_to_keep(paper: Plan) -> None:
    assert kept(paper).price.startswith("32 slots, 22.57 GB")
    assert kept(paper).tokens_per_s == pytest.approx(5.3, rel=0.02)


def test_no_change_is_named_where_none_helps(paper: Plan) -> None:
    assert best([change for change in paper.changes if change.factor < 1]) is None
    assert best([]) is None


def test_earlier_prompts_take_memory_where_the_caches_are() -> None:
    plain, kept = memory(PAPER, 1), memory(replace(PAPER, kept_bytes=10**9, shadow_kept_bytes=10**9), 1)
    grown = {name: kept[name] - plain[name] for name in plain if kept[name] != plain[name]}
    assert grown == dict.fromkeys(("main", "shadow", "whole", "whole_dequantised"), 10**9) | {"together": 2 * 10**9}


@pytest.mark.parametrize("scheme", ["fp16", "int8", "nf4"])
def test_a_shadow_takes_what_its_format_takes(scheme: str) -> None:
    """Linear layers and experts in the format; gates, norms, embeddings, head and cache at two bytes."""
    held = memory(replace(PAPER, policy=Policy(scheme)), 1)["shadow"]
    item = {"fp16": 2, "int8": 1, "nf4": 0.5625}[scheme]
    linear = ATTENTION + 32 * 8 * EXPERT
    rest = 32 * (8 * 4096 + 2 * 4096) + 4096 + 2 * 4096 * 32000 + 512 * 32 * 2048
    assert held == math.floor(linear * item) + 2 * rest


def test_the_rtx3080s_workers_are_a_little_slower(paper: Plan) -> None:
    other: Profile = find_profile("rtx3080-1gbe")
    _, rate = next(iter(choose(Setup(MIXTRAL, Hardware(other, 8), PAPER.policy)).items()))
    assert 0.96 < rate / paper.tokens_per_s < 1


@pytest.mark.parametrize("shadow", ["int8", "none"])
def test_times_as_if_measured_with_a_model_stay(shadow: str) -> None:
    """They are emulated as they are, whatever the model."""
    model = replace(MIXTRAL, expert=MIXTRAL.expert // 50, hidden=MIXTRAL.hidden // 8, layers=12, depth=12)
    base = PAPER.hardware.base
    policy = replace(PAPER.policy, shadow=shadow)
    hardware = replace(PAPER.hardware, base=as_measured(base, model, shadow))
    found = scale_profile(replace(PAPER, model=model, hardware=hardware, policy=policy))
    for name in ("main_layer_s", "expert_s", "load_s", "load_piece_s", "hop_s", "shadow_layer_s"):
        assert getattr(found, name) == pytest.approx(getattr(base, name)), name
