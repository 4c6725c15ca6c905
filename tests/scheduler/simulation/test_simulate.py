"""The core on a virtual clock, against the figures that the OD-MoE paper reports for its testbed, and arithmetic."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scheduler.alignment import AT_ONCE, LATE, Alignment
from scheduler.errors import ConfigError
from scheduler.policies.registry import PREDICTORS
from scheduler.simulation.simulate import Outcome, simulate
from scheduler.simulation.workload import random_workload
from scheduler.timing.load_budget import load_budget
from scheduler.timing.profile import Profile, load_profile
from scheduler.trace import read_trace, write_trace
from support.paths import PROFILES
from support.scheduling.scenarios import scenario_of

TESTBED = PROFILES / "rtx3090-1gbe.yaml"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile(TESTBED)


def run(
    profile: Profile,
    recall: float | None = None,
    seed: int = 0,
    spans: bool = False,
    same_token: float = 1.0,
    **said: Any,
) -> Outcome:
    """The shadow departs late, as the paper's does, unless the caller chooses."""
    scenario = scenario_of(profile, **({"tokens": 40, "departure": LATE} | said))
    return simulate(scenario, random_workload(scenario, recall, seed, same_token), spans)


def rate(profile: Profile, recall: float | None, tokens: int = 60, **said: Any) -> float:
    found = run(profile, recall, tokens=tokens, **said).decode_tokens_per_s
    assert found is not None
    return found


def test_the_papers_policy_decodes_at_the_speed_that_the_profile_was_fitted_to(profile: Profile) -> None:
    """Table 2: 3.69 tokens/s with an INT8 shadow (recall 97.34 %) aligned every token. No evidence for the profile."""
    assert rate(profile, 0.9734) == pytest.approx(3.69, rel=0.05)


def test_the_six_cases_of_figure_8_come_in_order(profile: Profile) -> None:
    """Both aligned (97 %), token only, KV only, neither (on average 45 %), random prefetch, load after routing. The
    paper gives no recall for the second and third; theirs lie between their neighbours' (Fig. 3)."""
    shadowed = [((1, 1), 0.9734), ((1, 0), 0.9), ((0, 1), 0.65), ((0, 0), 0.45)]
    speeds = [rate(profile, recall, 30, alignment=Alignment(*periods)) for periods, recall in shadowed]
    speeds += [rate(profile, None, 30, predictor="random"), rate(profile, None, 30, predictor="none")]
    assert speeds == sorted(speeds, reverse=True)
    assert len(set(speeds)) == 6


@pytest.mark.parametrize(("tokens", "paper_s"), [(16, 1.345), (128, 3.143)])
def test_prefill_one_after_the_other_is_the_papers(profile: Profile, tokens: int, paper_s: float) -> None:
    """Table 2's TTFT; the long one is bound by the link: 32 x (layer, load, all rows there and back)."""
    found = run(profile, tokens=1, prompt_tokens=tokens, prefill="in-turn").ttft_s
    assert found == pytest.approx(paper_s, rel=0.2)
    there_s = tokens * profile.top_k * profile.hidden_bytes * 8 / profile.link_bits_per_s
    least = profile.layers * (profile.main_s(tokens) + profile.load_s + 2 * there_s)
    assert least <= found * 1.0001
    if tokens == 128:
        assert found == pytest.approx(least, rel=0.01)


@pytest.mark.parametrize(("tokens", "most_s"), [(16, 0.95), (128, 1.6)])
def test_prefill_with_loads_ahead_and_both_directions_at_once(profile: Profile, tokens: int, most_s: float) -> None:
    """No faster than what one thing alone takes: the loads of a worker, or one direction of the link."""
    found = run(profile, tokens=1, prompt_tokens=tokens).ttft_s
    there_s = tokens * profile.top_k * profile.hidden_bytes * 8 / profile.link_bits_per_s
    assert profile.layers * max(profile.load_s, profile.main_s(tokens) + there_s) <= found <= most_s


def test_mini_batches_overlap_computation_with_the_link(profile: Profile) -> None:
    """One expert, 256 rows: as one batch it computes when all are there; in four, while they come and go."""
    one = replace(profile, layers=1, experts=1, top_k=1, workers=1, group_size=1, load_s=0.0)
    row_s = profile.hidden_bytes * 8 / profile.link_bits_per_s
    whole = run(one, tokens=1, prompt_tokens=256, mini_batch=256).ttft_s
    assert whole == pytest.approx(profile.main_s(256) + 512 * row_s + profile.compute_s(256))
    parts = run(one, tokens=1, prompt_tokens=256, mini_batch=64).ttft_s
    assert parts == pytest.approx(profile.main_s(256) + 256 * row_s + profile.compute_s(64) + 64 * row_s)


def test_load_after_routing_costs_exactly_what_the_profile_says(profile: Profile) -> None:
    """No prediction: every layer waits for its gate, a load, one expert and a hop."""
    p = profile
    layer_s = p.main_layer_s + max(p.load_s, p.hop_s) + p.expert_s + p.hop_s
    outcome = run(p, predictor="none", tokens=6)
    ends = [outcome.ttft_s + n * p.layers * layer_s for n in range(1, 6)]
    assert outcome.token_s == pytest.approx(ends)
    assert outcome.stats.reloads == outcome.stats.decode_loads == 5 * p.layers * p.top_k


def test_fully_cached_waits_for_no_load(profile: Profile) -> None:
    p = profile
    outcome = run(p, predictor="none", residency="all", slots=32, tokens=6)
    layer_s = p.main_layer_s + p.expert_s + 2 * p.hop_s
    in_order = p.main_layer_s + 2 * p.expert_s + 2 * p.hop_s  # both experts on one worker
    took = outcome.token_s[0] - outcome.ttft_s
    assert p.layers * layer_s <= took * 1.0001 <= p.layers * in_order
    assert outcome.stats.loads == p.layers * p.experts
    with pytest.raises(ConfigError, match=r"256 slots are needed, 8 are there"):
        run(p, predictor="none", residency="all")


@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize("over", [0.5, 0.999, 1.001, 1.5])
def test_perfect_foresight_stalls_just_where_equation_1_says(profile: Profile, groups: int, over: float) -> None:
    """Predictions that are always right and early: a token takes as long without loads, or what its loads allow."""
    p = replace(profile, workers=2 * groups, shadow_layer_s=1e-4)
    layer_s = p.main_layer_s + p.expert_s + 2 * p.hop_s
    budget = load_budget(p.workers, p.group_size, p.main_layer_s + p.hop_s, p.expert_s + p.hop_s, 0.0).max_load_s
    p = replace(p, load_s=over * budget)
    outcome = run(p, 1.0, alignment=Alignment(0, 0), tokens=12)
    steady = outcome.token_s[-1] - outcome.token_s[-2]
    bound_s = (p.load_s + p.expert_s + p.hop_s) / groups  # of a worker: it loads, computes, answers, and again
    assert steady == pytest.approx(p.layers * max(layer_s, bound_s))
    assert (bound_s > layer_s) == (over > 1)
    assert outcome.stats.overall.recall == 1.0


def test_late_departure_shows_in_the_first_layers_only(profile: Profile) -> None:
    """Fig 5: aligned every token, the first layers' predictions come after their gates."""
    outcome = run(profile, 1.0, tokens=20)
    assert 0 < outcome.stats.late <= 3 * 19 + profile.layers  # the first alignment brings the prompt's rows


def test_a_longer_prompt_holds_up_the_first_alignment(profile: Profile) -> None:
    """Its keys and values travel first: 8 KB a token a layer over the link."""
    short, long = (run(profile, 1.0, tokens=2, prompt_tokens=n) for n in (16, 512))
    assert long.token_s[0] - long.ttft_s > short.token_s[0] - short.ttft_s
    assert long.stats.late > short.stats.late


def test_recall_is_counted_as_it_was_drawn(profile: Profile) -> None:
    assert run(profile, 1.0).stats.overall.recall == 1.0
    assert run(profile, 0.8).stats.overall.recall == pytest.approx(0.8, abs=0.02)
    assert run(profile, 0.0).stats.overall.recall == 0.0
    assert run(profile, None, predictor="random").stats.overall.recall == pytest.approx(0.25, abs=0.02)


@pytest.mark.slow
def test_a_second_slot_needs_loads_that_can_be_given_up(profile: Profile) -> None:
    """Departing late: 4.7 % where a load ends within 8 MiB, 0.5 % where it goes on to its end, as in
    docs/measurements.md."""
    whole = replace(profile, cancellable=False)
    gain, stuck = (rate(p, 0.9734, slots=2, departure=LATE) / rate(p, 0.9734, departure=LATE) for p in (profile, whole))
    assert gain > 1.03
    assert stuck < 1.015


def test_same_seed_same_spans(profile: Profile, tmp_path: Path) -> None:
    """And they are those of a trace: written, read and the same."""
    first, again, other = (run(profile, 0.9, seed, True, tokens=3).spans for seed in (1, 1, 2))
    assert first == again != other
    write_trace(tmp_path / "t.json", first, {})
    read, _ = read_trace(tmp_path / "t.json")
    assert sorted((s.row, s.what, s.label) for s in read) == sorted((s.row, s.what, s.label) for s in first)


def test_spans_change_nothing(profile: Profile) -> None:
    assert run(profile, 0.9, spans=True).token_s == run(profile, 0.9).token_s


def test_spans_respect_slots_and_links(profile: Profile) -> None:
    """On each worker one load and one computation at a time, and no expert computes before it was loaded."""
    spans = run(profile, 0.8, 3, True, tokens=6).spans
    for row in (f"worker {n}" for n in range(profile.workers)):
        for kinds in (("load", "given up"), ("compute",)):
            times = sorted((s.start, s.end) for s in spans if s.row == row and s.what in kinds)
            assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(times))
        loads = [s for s in spans if s.row == row and s.what == "load"]
        for computed in (s for s in spans if s.row == row and s.what == "compute"):
            before = max(s.end for s in loads if s.label == computed.label and s.end <= computed.start + 1e-12)
            assert not any(s.label != computed.label and before < s.end <= computed.start for s in loads)


@pytest.mark.slow
def test_a_thousand_workers_and_deepseeks_shape(profile: Profile) -> None:
    """256 experts x 61 layers, top-8: enough groups that no load is waited for once predictions are early."""
    p = replace(profile, layers=61, experts=256, top_k=8)
    outcome = run(p, 1.0, workers=1000, group_size=8, tokens=4, alignment=Alignment(0, 0))
    assert outcome.stats.loads >= 61 * 100 + 3 * 61 * 8
    assert outcome.stats.overall.activated == 3 * 61 * 8
    assert outcome.where["load"] == outcome.where["shadow"] == 0.0


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({"tokens": 0}, "--tokens is 0"),
        ({"slots": 0}, "--slots is 0"),
        ({"predictor": "x"}, f"--predictor is 'x'; odmoe systems lists all {len(PREDICTORS)} names"),
        ({"group_size": 9}, r"--group-size is 9; allowed: 1 to --workers \(8\)"),
    ],
)
def test_a_wrong_scenario_is_named(profile: Profile, said: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        scenario_of(profile, **said)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: x\n", "lacks"),
        ("[1, 2", r"bad\.yaml cannot be read: line 1, column \d+ is not YAML"),
        ("3", "must be lines"),
        ("", r"profile .*bad\.yaml is empty; copy one of those in .*profiles"),
        ("# nothing\n", "is empty"),
        ("[" * 100_000, r"bad\.yaml is nested more than 32 deep in line 1"),
        ("name: x\nload_ms: 1\nload_ms: 2\n", r"bad\.yaml has load_ms twice, in lines 2 and 3; keep one"),
        ("name: x\nmodel: {}\ncluster: {}\nlod_ms: 1\n", r"lod_ms is not a key of a profile; did you mean load_ms"),
    ],
)
def test_a_bad_profile_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_profile(file)


def test_a_negative_duration_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text((PROFILES / "rtx3090-1gbe.yaml").read_text().replace("load_ms: 25.0", "load_ms: -1"))
    with pytest.raises(ConfigError, match="load_ms is -1"):
        load_profile(file)


# --- departures -------------------------------------------------------------------------------------------------------


def test_at_once_perfect_predictions_leave_the_loads_alone(profile: Profile) -> None:
    """Aligned every token or never: what remains is equation (1)'s excess."""
    never = run(profile, 1.0, alignment=Alignment(0, 0), tokens=20)
    at_once = run(profile, 1.0, departure=AT_ONCE, tokens=20)
    assert at_once.token_s[-1] - at_once.token_s[-2] == pytest.approx(never.token_s[-1] - never.token_s[-2])
    assert at_once.stats.late <= profile.layers  # of the first pass, which waits for prefill


def test_at_once_is_faster_than_late_though_tokens_may_be_wrong(profile: Profile) -> None:
    late = run(profile, 0.99)
    at_once = run(profile, 0.99, departure=AT_ONCE)
    assert at_once.token_s[-1] < late.token_s[-1]
    assert at_once.ttft_s == late.ttft_s
    assert at_once.stats.overall.recall == pytest.approx(late.stats.overall.recall, abs=0.005)


def test_wrong_tokens_cost_recall_only_where_gates_come_before_the_correction(profile: Profile) -> None:
    """Every token is wrong: the shadow goes back each time, and predicts as a late one does, a few layers too late."""
    late = run(profile, 1.0, tokens=30)
    wrong = run(profile, 1.0, departure=AT_ONCE, same_token=0.0, tokens=30)
    recalls = [counts.recall for counts in wrong.stats.by_index[1:]]
    assert 0.9 <= min(r for r in recalls if r is not None) < 1.0
    assert late.stats.overall.recall == 1.0


@pytest.mark.parametrize("departure", [AT_ONCE, LATE])
def test_a_lone_layer_of_the_shadow_lasts_as_in_the_profile(profile: Profile, departure: str) -> None:
    spans = run(profile, 1.0, departure=departure, tokens=5, spans=True).spans
    lasted = {round(s.end - s.start, 9) for s in spans if (s.row, s.what) == ("shadow", "shadow")}
    assert lasted == {profile.shadow_layer_s}
