"""Where the time goes, worked out by hand for clusters of one layer: whole seconds, one cause for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.alignment import AT_ONCE, LATE, Alignment
from scheduler.simulation.simulate import Outcome, simulate
from scheduler.simulation.workload import random_workload
from scheduler.timing.profile import Profile
from support.scheduling.scenarios import scenario_of

TINY = Profile(
    name="tiny",
    layers=1,
    experts=1,
    top_k=1,
    hidden_bytes=1,
    kv_bytes=0,
    workers=1,
    group_size=1,
    main_layer_s=4.0,
    expert_s=2.0,
    expert_extra_s=0.0,
    load_s=10.0,
    hop_s=1.0,
    link_bits_per_s=1e12,
    shadow_layer_s=1.0,
)
TWO = replace(TINY, experts=2, top_k=2)
"""Every token needs both experts of its layer."""


def run(profile: Profile, recall: float | None = None, spans: bool = False, **said: Any) -> Outcome:
    scenario = scenario_of(profile, prompt_tokens=1, **({"tokens": 6, "departure": LATE} | said))
    return simulate(scenario, random_workload(scenario, recall, 0), spans)


def check(outcome: Outcome, bound: str, **seconds: float) -> None:
    """A steady decode token takes so long, for these causes; they are all of it."""
    expected = dict.fromkeys(("main", "network", "compute", "load", "shadow"), 0.0) | seconds
    assert outcome.where == pytest.approx(expected)
    assert outcome.token_s[-1] - outcome.token_s[-2] == pytest.approx(sum(expected.values()))
    assert outcome.bottleneck == bound


def test_nobody_predicts() -> None:
    """Gate at 4, load until 14 (the row came at 5), compute until 16, answer at 17."""
    check(run(TINY, predictor="none"), "load", main=4, network=2, compute=2, load=9)


def test_a_slow_shadow() -> None:
    """Aligned at 1, it has predicted at 4, which is heard at 5: after the gate, at 4. Load 4 to 14, answer at 17. The
    slot was free from 0 on: loaded at once the expert would have been there at 10, 5 after its row; 4 are the shadow's.
    """
    check(run(replace(TINY, shadow_layer_s=3.0), 1.0), "compute", main=4, network=2, compute=2, load=5, shadow=4)


def test_a_faster_shadow() -> None:
    """Heard at 3: load until 13, compute until 15, answer at 16."""
    check(run(TINY, 1.0), "compute", main=4, network=2, compute=2, load=5, shadow=3)


def test_a_prediction_long_before() -> None:
    """Never aligned, the shadow is passes ahead: the load begins when the slot is left, at 0."""
    p = replace(TINY, shadow_layer_s=0.1)
    outcome = run(p, 1.0)
    late = run(p, 1.0, alignment=Alignment(0, 0))
    assert late.where["shadow"] == pytest.approx(0.0)
    assert late.where["load"] == pytest.approx(5.0)
    assert outcome.where["shadow"] == pytest.approx(2.1)


def test_a_prediction_from_its_own_token() -> None:
    """At once, the shadow is a pass ahead, too; the first pass of decoding waits for prefill."""
    p = replace(TINY, shadow_layer_s=0.1)
    outcome = run(p, 1.0, departure=AT_ONCE, tokens=40)
    assert outcome.where["shadow"] == pytest.approx(2.1 / 39)
    assert outcome.where["load"] == pytest.approx(5.0)


def test_a_wrong_prediction() -> None:
    """Two experts, one needed, the other predicted: its load is given up at the gate, and the right one loads from 4
    on. Rightly and early predicted it would have been there at 10."""
    p = replace(TINY, experts=2, shadow_layer_s=0.5)
    outcome = run(p, 0.0)
    check(outcome, "compute", main=4, network=2, compute=2, load=5, shadow=4)
    assert outcome.stats.reloads == 5


def test_both_experts_on_one_worker() -> None:
    """The second loads when the first has left the only slot: 4 + 13 + 13. The first is the second's cause to wait."""
    check(run(TWO, predictor="none"), "load", main=4, network=4, compute=4, load=18)


def test_both_experts_cached_on_one_worker() -> None:
    """One processor: rows come at 5, the second waits for the first until 7; answer at 10."""
    outcome = run(TWO, predictor="none", residency="all", slots=2)
    check(outcome, "compute", main=4, network=2, compute=4)


def test_a_slow_link_is_shared() -> None:
    """A row takes 3 s of the main node's link: the second comes after 6, and its answer 3 after 8."""
    p = replace(TWO, workers=2, group_size=2, link_bits_per_s=8 / 3)
    check(run(p, predictor="none", residency="all"), "network", main=4, network=9, compute=2)


def test_two_slots_share_one_link() -> None:
    """Both loads are asked for at the gate; the second begins when the first has ended, at 14."""
    check(run(TWO, predictor="none", slots=2), "load", main=4, network=2, compute=2, load=19)


def test_predicted_loads_wait_for_their_link() -> None:
    """Two slots, early and right: the second load is asked for when its slot is left, at 0, and begins when the first
    has ended, at 7; it ends at 17, its row came at 5. No prediction could have helped."""
    never = Alignment(0, 0)
    outcome = run(replace(TWO, shadow_layer_s=0.1), 1.0, slots=2, alignment=never, tokens=40)
    steady = outcome.token_s[-1] - outcome.token_s[-2]
    assert steady == pytest.approx(2 * TWO.load_s)
    assert outcome.where["shadow"] == pytest.approx(0.0)
    assert outcome.where["load"] == pytest.approx(12.0, rel=0.05)  # but for the first few


def test_the_shadow_reads_the_prompt_first() -> None:
    """Eight layers of 3 s, beside a prefill that is long over: the first prediction leaves at 24 + 3."""
    quick = replace(TINY, layers=8, main_layer_s=0.1, expert_s=0.1, load_s=0.1, hop_s=0.1, shadow_layer_s=3.0)
    spans = run(quick, 1.0, tokens=2, spans=True).spans
    (told,) = (s for s in spans if s.label == "prediction 0 1.1")
    assert (told.start, told.end) == (pytest.approx(27.0), pytest.approx(27.1))


def test_the_causes_add_up_whatever_happens() -> None:
    """On an uneven cluster, at every recall and size."""
    base = replace(TINY, layers=5, experts=7, top_k=3, load_s=6.5, hop_s=0.75, shadow_layer_s=2.25)
    for workers, slots, group, recall in [(1, 1, 1, 0.5), (2, 3, 2, 0.8), (5, 1, 2, 0.9), (9, 2, 4, 1.0)]:
        outcome = run(base, recall, workers=workers, slots=slots, group_size=group)
        decode_s = outcome.token_s[-1] - outcome.ttft_s
        assert sum(outcome.where.values()) * len(outcome.token_s) == pytest.approx(decode_s)
        assert min(outcome.where.values()) >= 0.0
