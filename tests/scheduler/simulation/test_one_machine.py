"""One machine with two places, simulated: worked out by hand in whole seconds, and against the papers' own figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from scheduler import types as t
from scheduler.errors import ConfigError
from scheduler.eventlog.recording import Recording
from scheduler.simulation.recorded_routes import RecordedWorkload, recorded_workloads
from scheduler.simulation.simulate import Outcome, simulate
from scheduler.simulation.workload import Gate, random_workload
from scheduler.timing.profile import Profile, find_profile
from support.scheduling.one_layer import ONE_LAYER
from support.scheduling.scenarios import core_config_of, scenario_of

ONE = replace(ONE_LAYER, host_s=3.0, host_extra_s=2.0)
PC = find_profile("rtx3090-pcie3")


def run(profile: Profile, spans: bool = False, **said: Any) -> Outcome:
    fields = {"tokens": 6, "prompt_tokens": 1, "slots": 3, "predictor": "none", "prefill": "pipelined"} | said
    scenario = scenario_of(profile, **fields)
    return simulate(scenario, random_workload(scenario), spans)


def token_s(outcome: Outcome) -> float:
    """A steady one."""
    return outcome.token_s[-1] - outcome.token_s[-2]


# --- two places -------------------------------------------------------------------------------------------------------


def test_all_on_the_device() -> None:
    """One load after the other, each expert computed while the next one loads: 4 + 3 x 10 + 1."""
    outcome = run(ONE)
    assert token_s(outcome) == pytest.approx(35.0)
    assert outcome.stats.decode_host_calls == 0
    assert outcome.where == pytest.approx({"main": 4, "network": 0, "compute": 1, "load": 30, "shadow": 0})


def test_on_one_machine_no_rows_are_cut_into_parts() -> None:
    """Forty rows of each expert: 4 + 3 x 10 + 1. A row more than sixteen takes another call over a network alone."""
    assert run(ONE, tokens=1, prompt_tokens=40).ttft_s == pytest.approx(35.0)
    far = replace(ONE, hop_s=1e-9)
    assert run(far, tokens=1, prompt_tokens=40).ttft_s == pytest.approx(4 + 3 * 10 + 3)


def test_all_on_the_host() -> None:
    """One after the other, without a load: 4 + 3 x 3."""
    outcome = run(ONE, placement="host", host=True)
    assert token_s(outcome) == pytest.approx(13.0)
    assert (outcome.stats.decode_loads, outcome.stats.decode_host_calls) == (0, 5 * 3)
    assert outcome.where == pytest.approx({"main": 4, "network": 0, "compute": 9, "load": 0, "shadow": 0})


def test_the_host_takes_longer_for_more_rows() -> None:
    """Three experts with five rows each: 4 + 3 x (3 + 4 x 2). With forty: their weights are still read once."""
    assert run(ONE, tokens=1, prompt_tokens=5, placement="host", host=True).ttft_s == pytest.approx(4 + 33)
    assert run(ONE, tokens=1, prompt_tokens=40, placement="host", host=True).ttft_s == pytest.approx(4 + 3 * 81)


def test_both_beside_each_other() -> None:
    """Three experts: with one load and two on the host, 4 + max(10 + 1, 2 x 3); all on the host end at 4 + 3 x 3, which
    is the least. Algorithm 2 as printed begins with a load."""
    printed = run(ONE, placement="balance-printed", host=True)
    assert token_s(printed) == pytest.approx(15.0)
    assert (printed.stats.decode_loads, printed.stats.decode_host_calls) == (5, 10)
    least = run(ONE, placement="balance", host=True)
    assert token_s(least) == pytest.approx(13.0)
    assert (least.stats.decode_loads, least.stats.decode_host_calls) == (0, 15)
    slow = run(replace(ONE, host_s=9.0), placement="balance", host=True)
    assert token_s(slow) == pytest.approx(4 + 18), "one load, 18 on the host: two loads would take 20"


def test_algorithm_1_of_smoe_takes_each_expert_by_itself() -> None:
    """1 + 2n on the host against a load of 10 and 1 on the device: five rows are as dear, and stay; six are loaded, all
    of them, however long the host then has nothing to do."""
    fields = {"tokens": 1, "placement": "split", "host": True}
    assert run(ONE, prompt_tokens=5, **fields).ttft_s == pytest.approx(4 + 33)
    loaded = run(ONE, prompt_tokens=6, **fields)
    assert loaded.ttft_s == pytest.approx(4 + 3 * 10 + 1)
    assert (loaded.stats.loads, loaded.stats.host_calls) == (3, 0)


def test_hybrimoes_schedule_leaves_neither_place_idle() -> None:
    """Six rows each: 13 on the host, the first two loads end at 10 and 20 and their experts at 11 and 21."""
    fields = {"tokens": 1, "host": True}
    outcome = run(ONE, prompt_tokens=6, placement="hybrid", **fields)
    assert outcome.ttft_s == pytest.approx(4 + 21)
    assert (outcome.stats.loads, outcome.stats.host_calls) == (2, 1)


def test_without_a_host_everything_is_on_the_device() -> None:
    assert token_s(run(ONE, placement="balance")) == token_s(run(ONE))


def test_what_stays_is_computed_on_the_device_while_the_host_has_the_rest() -> None:
    """One slot, one layer: one expert stays, the host computes the other two."""
    outcome = run(ONE, residency="static", placement="resident", slots=1, host=True, tokens=9)
    assert token_s(outcome) == pytest.approx(4 + 2 * 3)
    assert outcome.stats.decode_loads <= 1, "the hot one, once the prompt has shown who that is"


def test_a_host_place_does_one_thing_at_a_time() -> None:
    spans = run(replace(ONE, layers=3), True, placement="host", host=True).spans
    times = sorted((s.start, s.end) for s in spans if s.row == "worker 1" and s.what == "compute")
    assert len(times) == 6 * 3 * 3
    assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(times))
    assert not [s for s in spans if s.row == "worker 1" and s.what in ("load", "evict", "given up")]


def test_a_profile_without_a_host_has_none() -> None:
    with pytest.raises(ConfigError, match="profile rtx3090-1gbe has no times for experts computed in host memory"):
        run(find_profile("rtx3090-1gbe"), placement="host", host=True)


# --- smaller forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "bits"), [("int4", 4.5), ("int2", 2.5)])
def test_a_smaller_form_loads_faster(form: str, bits: float) -> None:
    assert token_s(run(ONE, precision=form)) == pytest.approx(4 + 30 * bits / 16 + 1)


def test_a_smaller_form_is_waited_for_as_long_as_it_loads() -> None:
    """The causes add up, and nobody predicted: what is not the main node's or a computation's is the loads'."""
    outcome = run(ONE, precision="int4")
    assert outcome.where == pytest.approx({"main": 4, "network": 0, "compute": 1, "load": 30 * 4.5 / 16, "shadow": 0})


def test_a_smaller_form_loads_in_the_share_that_its_store_has() -> None:
    assert token_s(run(replace(ONE, form_shares=(("int4", 0.4),)), precision="int4")) == pytest.approx(4 + 30 * 0.4 + 1)


def test_the_scheduler_goes_by_the_loads_of_the_form_that_it_loads() -> None:
    """Algorithm 2 loads two of three where a load takes 10 x 4.5 / 16 = 2.8125 beside 3 on the host, and one where it
    takes 10: 4 + 2 x 2.8125 + 1."""
    outcome = run(ONE, placement="balance", host=True, precision="int4")
    assert (outcome.stats.decode_loads, outcome.stats.decode_host_calls) == (10, 5)
    assert token_s(outcome) == pytest.approx(10.625)


def test_an_expert_of_a_smaller_form_is_restored_by_the_processor_that_computes_it() -> None:
    """Loads end at 2.8125, 5.625 and 8.4375; each expert is restored in 2 and computed in 1, one after the other. What
    the last answer waits for after its load is computation."""
    outcome = run(replace(ONE, restore_s=2.0), precision="int4")
    assert token_s(outcome) == pytest.approx(4 + 2.8125 + 3 * 3)
    assert outcome.where == pytest.approx({"main": 4, "network": 0, "compute": 3.375, "load": 8.4375, "shadow": 0})


def test_an_expert_is_restored_once_for_computations_in_a_row() -> None:
    """Five rows of one expert, each a computation: 4 + 2.8125 + 2 + 5 x 1."""
    one = replace(ONE, experts=1, top_k=1, restore_s=2.0)
    assert run(one, precision="int4", tokens=1, prompt_tokens=5, mini_batch=1).ttft_s == pytest.approx(13.8125)


@pytest.mark.parametrize(("experts", "token"), [(1, 4 + 1), (2, 4 + 2 * (2 + 1))])
def test_an_expert_that_stays_is_restored_again_after_another(experts: int, token: float) -> None:
    """There is memory for one restored expert."""
    one = replace(ONE, experts=experts, top_k=experts, restore_s=2.0)
    outcome = run(one, precision="int4", residency="lru", slots=experts)
    assert outcome.stats.decode_loads == 0
    assert token_s(outcome) == pytest.approx(token)


def test_nothing_is_restored_that_was_loaded_in_full() -> None:
    assert token_s(run(replace(ONE, restore_s=2.0))) == token_s(run(ONE))


@pytest.mark.parametrize(("restore_s", "token"), [(7.1, 4 + 2.8125 + 3 * 8.1), (7.2, 4 + 30 + 1)])
def test_a_smaller_form_that_saves_no_time_is_not_loaded(restore_s: float, token: float) -> None:
    """A load in full takes 10, one in int4 2.8125 and what restoring takes."""
    assert token_s(run(replace(ONE, restore_s=restore_s), precision="int4")) == pytest.approx(token)


# --- the Fate paper's PC ----------------------------------------------------------------------------------------------


def test_load_on_demand_is_as_slow_as_the_profile_was_fitted_to() -> None:
    """14 tokens/s, and Load on Demand 4.1 times as slow (Fate, sections 1 and 5.2.2); no cache, no prediction. No
    evidence for the profile."""
    assert run(PC, slots=4).decode_tokens_per_s == pytest.approx(14 / 4.1, rel=0.005)


def test_with_all_experts_there_it_is_as_fast_as_the_profile_was_fitted_to() -> None:
    one = replace(PC, experts=4)  # the first token brings all of them
    outcome = run(one, residency="all", slots=96, tokens=4)
    assert 1 / token_s(outcome) == pytest.approx(14.0, rel=0.001)
    assert outcome.stats.decode_loads == 0


def test_the_papers_order_of_sections_3_and_6() -> None:
    """Of one token's four missing experts: a load takes longer than the CPU, both far longer than the GPU; so both
    places together beat either alone (importance, section 5.4)."""
    device, cpu = run(PC, slots=4), run(PC, placement="host", host=True)
    both = run(PC, slots=4, placement="balance", host=True)
    assert token_s(both) < token_s(cpu) < token_s(device)
    assert token_s(cpu) == pytest.approx(24 * (2.576e-3 + 4 * 1e-3))


# --- scores -----------------------------------------------------------------------------------------------------------

SHAPE = replace(ONE, layers=4, experts=6, top_k=2)


def scored(passes: int = 5, foresight: str | None = "gate", right: bool = True) -> RecordedWorkload:
    """Routes of four layers in turn. Each gate foresees the next layer's, rightly or not at all."""
    routes = [[((n + layer) % 6, (n + layer + 2) % 6) for layer in range(4)] for n in range(passes)]
    gates = {}
    for index in range(-1, passes):
        for layer in range(4):
            named = routes[max(index, 0)][layer]
            ahead = [] if layer == 3 else [routes[max(index, 0)][layer + 1]]
            told = [(index, layer + 1, (_scores(one, right),)) for one in ahead]
            gates[index, layer] = Gate((named,), (_scores(named),), tuple(told))
    prefill = [tuple((expert, 1) for expert in sorted(route)) for route in routes[0]]
    return RecordedWorkload(1, 1, 6, [prefill], routes, foresight=foresight, gates=gates)


def _scores(named: tuple[int, ...], right: bool = True) -> tuple[float, ...]:
    return tuple(0.4 if (expert in named) == right else 0.05 for expert in range(6))


def gated(workload: RecordedWorkload, **said: Any) -> Outcome:
    fields = {"tokens": 6, "prompt_tokens": 1, "slots": 6, "prefill": "pipelined"} | said
    return simulate(scenario_of(SHAPE, **fields), workload)


def test_a_gate_that_foresees_the_next_one() -> None:
    """Always right, of three layers in four, nothing being said of the first; always wrong."""
    stats = gated(scored(), predictor="next-gate").stats
    assert (stats.overall.activated, stats.overall.recall, stats.unpredicted) == (5 * 3 * 2, 1.0, 5 * 2)
    wrong = gated(scored(right=False), predictor="next-gate").stats.overall
    assert wrong.recall == 0.0


def test_what_is_foreseen_is_loaded_while_the_layer_before_is_computed() -> None:
    """The first layer waits for both loads, 4 + 20 + 1. From its gate on the link is busy with them, then with what was
    foreseen: two loads a layer, back to back."""
    ahead, after = gated(scored(), predictor="next-gate"), gated(scored(), predictor="none")
    assert token_s(after) == pytest.approx(4 * (4 + 20 + 1))
    loads_s = 4 * 2 * SHAPE.load_s
    assert 4 + loads_s + 1 == pytest.approx(token_s(ahead))


def test_a_layer_ahead_is_known_a_layer_later_than_a_gate() -> None:
    """Loads of 1 s. A layer that waits for its two takes 4 + 1 + 2, one that was foreseen in time 4 + 2. With nothing
    resident the next layer's attention is over 4 after the gate: in time. With both experts resident it is over 4 after
    their answers: when the next gate fires, too late for its loads. So every other layer waits."""
    quick = replace(SHAPE, load_s=1.0)
    fields = {"tokens": 6, "prompt_tokens": 1, "slots": 6, "prefill": "pipelined"}
    gate, attention = (
        simulate(scenario_of(quick, predictor=name, **fields), scored(foresight=kind))
        for kind, name in (("gate", "next-gate"), ("attention", "next-layer"))
    )
    assert gate.stats.overall.recall == attention.stats.overall.recall == 1.0
    assert token_s(gate) == pytest.approx(7 + 6 + 6 + 6)
    assert token_s(attention) == pytest.approx(7 + 6 + 7 + 6)


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({"predictor": "next-gate"}, r"--predictor next-gate reads what the main model foresees \(gate\)"),
        ({"residency": "score"}, "--residency score reads the scores"),
        ({"router": "expert-cache", "alpha": 0.3}, "--router expert-cache reads the scores"),
        ({"precision": "mixed"}, "--precision mixed reads the scores"),
    ],
)
def test_routes_by_chance_have_no_scores(said: dict[str, Any], names: str) -> None:
    scenario = scenario_of(SHAPE, prompt_tokens=1, **({"predictor": "none", "slots": 6} | said))
    with pytest.raises(ConfigError, match=names):
        simulate(scenario, random_workload(scenario))


def test_scores_that_are_there_serve_whoever_reads_them() -> None:
    for said in ({"residency": "score"}, {"router": "expert-cache", "alpha": 0.3}, {"precision": "mixed"}):
        assert len(gated(scored(), predictor="none", **said).token_s) == 5


def test_another_foresight_than_the_recorded_one() -> None:
    with pytest.raises(ConfigError, match=r"reads what the main model foresees \(token\).*come with gate"):
        gated(scored(), predictor="token-wise")
    with pytest.raises(ConfigError, match="come with none of it"):
        gated(scored(foresight=None), predictor="next-gate")


def test_a_recording_keeps_what_gates_said() -> None:
    """Prompt of three tokens, two decode passes of two layers, 5 and 8 of the model; each gate tells of the next."""
    choices = core_config_of(t.ModelShape((5, 8), 3, 1), 1, predictor="next-gate")
    events: list[tuple[float, t.Event]] = [(0.0, t.RequestOpened(1, 3))]
    commands: list[list[t.Command]] = [[]]
    for position, tokens in ((0, 3), (3, 1), (4, 1)):
        events.append((0.0, t.StepStarted((t.Pass(1, position, tokens, position == 0),))))
        commands.append([])
        for layer in (5, 8):
            visit = t.Visit(1, position, layer)
            scores = tuple((0.1 * position, 0.2, 0.01 * layer) for _ in range(tokens))
            events.append((1.0, t.GateFired(visit, ((1, tokens),), ((1,),) * tokens, scores)))
            events.append((1.0, t.Foreseen(1, position, 8, scores)) if layer == 5 else (1.0, t.ShadowJoined()))
            commands += [[t.Resume(visit)], []]
    [workload] = recorded_workloads(Recording({}, choices, events, commands))
    assert (workload.has_scores, workload.foresight, workload.tokens) == (True, "gate", 3)
    assert set(workload.gates) == {(index, layer) for index in (-1, 0, 1) for layer in (0, 1)}
    prefill, second = workload.gate(-1, 0), workload.gate(1, 0)
    assert prefill.chosen == ((1,),) * 3
    assert prefill.foreseen == ((-1, 1, prefill.scores),)
    assert second.scores == ((0.4, 0.2, 0.05),)
    assert second.foreseen == ((1, 1, second.scores),)
    assert workload.gate(1, 1).foreseen == ()
    bare = [(now, replace(e, scores=()) if isinstance(e, t.GateFired) else e) for now, e in events]
    [without] = recorded_workloads(Recording({}, choices, bare, commands))
    assert (without.has_scores, without.gate(1, 0).foreseen) == (False, second.foreseen), (
        "nobody read its gates' scores"
    )
