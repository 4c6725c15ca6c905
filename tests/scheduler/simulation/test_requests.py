"""Several requests in a step, worked out by hand in whole seconds, and what holds whatever their number is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from scheduler import types as t
from scheduler.errors import ConfigError
from scheduler.simulation import simulate as module
from scheduler.simulation.requests import Arrival, random_arrivals
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import Outcome, simulate, simulate_requests
from scheduler.simulation.workload import Gate, Rows, random_workload
from scheduler.timing.profile import Profile, find_profile
from support.scheduling.scenarios import scenario_of

TINY = Profile(
    name="tiny",
    layers=2,
    experts=3,
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
PAPER = find_profile("rtx3090-1gbe")
Watch = Callable[[], list[tuple[float, t.Event, list[t.Command]]]]


@dataclass
class Fixed:
    """Every token chooses the same expert in every layer."""

    expert: int
    has_scores: bool = False
    foresight: str | None = None
    chunks: tuple[int, ...] = ()

    def prompt(self, layer: int, start: int, stop: int) -> Rows:
        return ((self.expert, stop - start),)

    def routes(self, index: int, layer: int) -> tuple[int, ...]:
        return (self.expert,)

    def predict(self, index: int, layer: int) -> tuple[int, ...] | None:
        return None

    def same_token(self, index: int) -> bool:
        return True

    def ahead(self, index: int, layer: int, same: bool) -> tuple[int, ...] | None:
        return None

    def gate(self, index: int, layer: int) -> Gate:
        raise AssertionError("no policy reads scores here")


def fixed(profile: Profile, experts: list[int], **said: Any) -> Outcome:
    """A request for each expert. Nobody predicts."""
    scenario = scenario_of(profile, **({"predictor": "none", "tokens": 6} | said))
    return simulate_requests(scenario, [Arrival(Fixed(one), 1, scenario.tokens) for one in experts])


def cached(profile: Profile, experts: list[int], **said: Any) -> Outcome:
    return fixed(profile, experts, residency="all", slots=6, **said)


def drawn(
    profile: Profile, requests: int, recall: float | None = 0.97, same_token: float = 1.0, **said: Any
) -> Outcome:
    scenario = scenario_of(profile, requests=requests, **({"tokens": 12} | said))
    return simulate_requests(scenario, random_arrivals(scenario, recall, same_token=same_token))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """The events and commands of the last simulation."""
    logs: list[list[tuple[float, t.Event, list[t.Command]]]] = []
    make = module.make_core

    def watched(config: Any) -> Any:
        core, log = make(config), []
        logs.append(log)
        handle = core.handle

        def tell(event: t.Event, now: float) -> list[t.Command]:
            log.append((now, event, handle(event, now)))
            return log[-1][2]

        core.handle = tell  # type: ignore[method-assign]
        return core

    monkeypatch.setattr(module, "make_core", watched)
    return lambda: logs[-1]


def steps_of(watch: Watch) -> list[tuple[t.Pass, ...]]:
    return [event.passes for _, event, _ in watch() if isinstance(event, t.StepStarted)]


def check(outcome: Outcome, **seconds: float) -> None:
    """A steady step takes so long, for these causes; they are all of it."""
    expected = dict.fromkeys(("main", "network", "compute", "load", "shadow"), 0.0) | seconds
    assert outcome.where == pytest.approx(expected)
    for answer in outcome.answers:
        assert answer.gaps_s[-1] == pytest.approx(sum(expected.values()))


# --- two and three requests, by hand ----------------------------------------------------------------------------------


def test_forwards_of_their_own_on_two_workers() -> None:
    """Layers from 0 to 4 and 4 to 8. Both gates count from 8 on: rows come at 9, answers at 12. So does the other
    layer."""
    check(cached(replace(TINY, workers=2), [0, 1]), main=16, network=4, compute=4)


def test_forwards_of_their_own_on_one_worker() -> None:
    """It computes from 9 to 11 and to 13. The first request goes on at 12, the second at 16, when the main node is
    free. The last answers come at 24 and 26: the second request's time to compute is both."""
    outcome = cached(TINY, [0, 0])
    check(outcome, main=16, network=4, compute=6)
    first, second = (answer.arrived_s + answer.token_s[-1] for answer in outcome.answers)
    assert second - first == pytest.approx(2.0)


def test_a_batched_dense_part() -> None:
    """Both layers from 0 to 4; rows come at 5, answers at 8 and 10. The next layer begins with the last of them."""
    outcome = cached(TINY, [0, 0], batch_dense=True)
    check(outcome, main=8, network=4, compute=8)
    first, second = (answer.token_s[-1] for answer in outcome.answers)
    assert first == second
    check(cached(replace(TINY, main_extra_s=1.0), [0, 0], batch_dense=True), main=10, network=4, compute=8)


def test_a_wait_counts_from_the_moment_at_which_the_main_node_is_idle() -> None:
    """Layers of 1 s: gates at 3, answers at 7, 9 and 11. The main node computes from 7 to 8, and waits until 9 for an
    answer that has been computed at 8: its way back. Likewise until 11. Then gates at 12, answers at 16, 18 and 20."""
    check(cached(replace(TINY, main_layer_s=1.0), [0, 0, 0]), main=6, network=6, compute=8)


def test_an_expert_that_two_requests_need_is_loaded_once() -> None:
    """One layer, one slot: gates at 8, load until 18, computed until 20 and 22, answers at 21 and 23."""
    outcome = fixed(replace(TINY, layers=1), [1, 1])
    check(outcome, main=8, network=2, compute=4, load=9)
    assert outcome.loads_a_token == 0.5
    assert outcome.union == 1.0


def test_two_experts_take_turns_in_one_slot() -> None:
    """The first is answered at 21. The second is loaded from then until 31, answered at 34."""
    outcome = fixed(replace(TINY, layers=1), [1, 2])
    check(outcome, main=8, network=4, compute=4, load=18)
    assert outcome.loads_a_token == 1.0
    assert outcome.union == 2.0


def test_the_first_that_is_resumed_goes_on_first() -> None:
    """Request 1's expert has been loaded for request 2 before: what is computed first decides, not the order."""
    outcome = fixed(replace(TINY, workers=2, layers=2), [0, 1, 0])
    ends = [answer.token_s[-1] for answer in outcome.answers]
    assert ends[0] < ends[2]


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_lone_request_is_the_same_whatever_its_place_in_steps(watch: Watch) -> None:
    scenario = Scenario(PAPER, tokens=6)
    found = []
    for changes in ({}, {"batch_dense": True}, {"prefill_chunk": 3}, {"parallel": 1}):
        simulate(replace(scenario, **changes), random_workload(scenario, 0.9))
        found.append(watch())
    assert found[0] == found[1] == found[2] == found[3]
    assert len(found[0]) > 1000


def test_a_step_has_a_pass_of_every_open_request(watch: Watch) -> None:
    drawn(PAPER, 3, tokens=3)
    prefill, first, second = steps_of(watch)
    assert prefill == tuple(t.Pass(request, 0, 16, True) for request in (1, 2, 3))
    assert first == tuple(t.Pass(request, 16, 1, False) for request in (1, 2, 3))
    assert second == tuple(t.Pass(request, 17, 1, False) for request in (1, 2, 3))


def test_no_more_than_parallel_are_open_at_once(watch: Watch) -> None:
    drawn(PAPER, 5, tokens=3, parallel=2)
    open_now, most, opened = set(), 0, []
    for _, event, _ in watch():
        if isinstance(event, t.RequestOpened):
            open_now.add(event.request)
            opened.append(event.request)
        elif isinstance(event, t.RequestClosed):
            open_now.discard(event.request)
        most = max(most, len(open_now))
    assert (most, opened) == (2, [1, 2, 3, 4, 5])
    assert max(map(len, steps_of(watch))) == 2


def test_one_at_a_time_is_as_fast_as_one_alone() -> None:
    alone, turns = drawn(PAPER, 1, None, predictor="none"), drawn(PAPER, 3, None, predictor="none", parallel=1)
    assert turns.answers[0].token_s == alone.token_s
    for answer in turns.answers:
        assert answer.gaps_s == pytest.approx(turns.answers[0].gaps_s, rel=0.05)


def test_who_arrives_joins_the_next_step(watch: Watch) -> None:
    outcome = drawn(PAPER, 2, arrivals=(0.0, 2.0), tokens=12)
    steps = steps_of(watch)
    joined = next(number for number, step in enumerate(steps) if len(step) == 2)
    assert steps[joined][1] == t.Pass(2, 0, 16, True)
    begun = [now for now, event, _ in watch() if isinstance(event, t.StepStarted)]
    assert begun[joined - 1] <= 2.0 <= begun[joined]
    assert outcome.answers[1].arrived_s == 2.0
    assert len(steps[-1]) == 1, "the first one is complete"


def test_who_arrives_when_nobody_is_there_begins_at_once(watch: Watch) -> None:
    outcome = drawn(PAPER, 2, None, arrivals=(0.0, 500.0), predictor="none", tokens=3)
    assert outcome.answers[1].ttft_s == pytest.approx(outcome.answers[0].ttft_s, rel=1e-3)
    assert [event.request for _, event, _ in watch() if isinstance(event, t.RequestClosed)] == [1]


def test_a_long_prompt_is_read_in_chunks_while_others_decode(watch: Watch) -> None:
    scenario = scenario_of(PAPER, predictor="none", tokens=8, prefill_chunk=40)
    short, long = (random_workload(scenario, None, seed) for seed in (1, 2))
    arrivals = [Arrival(short, 16, 8), Arrival(long, 100, 3, at=1.5)]
    outcome = simulate_requests(scenario, arrivals)
    of_long = [one for step in steps_of(watch) for one in step if one.request == 2]
    assert [(one.position, one.tokens) for one in of_long] == [(0, 40), (40, 40), (80, 20), (100, 1), (101, 1)]
    decoded = [event.index for _, event, _ in watch() if event.__class__ is t.TokenDecoded and event.request == 2]
    assert decoded == [0, 1], "a chunk that is not the last gives no token"
    whole = simulate_requests(replace(scenario, prefill_chunk=0), arrivals)
    assert max(outcome.answers[0].gaps_s) < max(whole.answers[0].gaps_s)


def test_rows_of_chunks_are_those_of_the_prompt() -> None:
    workload = random_workload(Scenario(PAPER), None, 3)
    for layer in range(3):
        parts = [dict(workload.prompt(layer, *part)) for part in ((0, 5), (5, 6), (6, 16))]
        whole = {e: sum(part.get(e, 0) for part in parts) for e in range(8) if any(e in part for part in parts)}
        assert tuple(sorted(whole.items())) == workload.prompt(layer, 0, 16)


def test_prompts_share_a_chunk(watch: Watch) -> None:
    """Of three that come while one decodes, those that fit join as a whole."""
    scenario = scenario_of(TINY, predictor="none", tokens=9, prefill_chunk=10)
    sizes = ((1, 0.0), (6, 1.0), (5, 1.0), (4, 1.0))
    simulate_requests(scenario, [Arrival(Fixed(0), prompt, 9, at=at) for prompt, at in sizes])
    _, second, third = steps_of(watch)[:3]
    assert [(one.request, one.tokens) for one in second] == [(1, 1), (2, 6), (4, 4)]
    assert [(one.request, one.tokens) for one in third] == [(1, 1), (2, 1), (3, 5), (4, 1)]


def test_a_request_is_closed_when_its_predictions_are_there(watch: Watch) -> None:
    drawn(PAPER, 3, arrivals=(0.0, 0.0, 3.0), tokens=4)
    closed = [event.request for _, event, _ in watch() if isinstance(event, t.RequestClosed)]
    assert closed[:2] == [1, 2]
    assert all(answer.stats.unpredicted == 0 for answer in drawn(PAPER, 3, tokens=4).answers)


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_a_block_of_right_drafts_gives_all_its_tokens(watch: Watch) -> None:
    scenario = scenario_of(PAPER, predictor="none", tokens=8, block=3)
    workload = random_workload(scenario, None, 4, same_token=1.0)
    outcome = simulate(scenario, workload)
    decoding = [step[0] for step in steps_of(watch)[1:]]
    assert [(one.position, one.tokens) for one in decoding] == [(16, 3), (19, 3), (22, 1)]
    assert (len(outcome.token_s), len(set(outcome.token_s))) == (7, 3)
    gates = [event for _, event, _ in watch() if isinstance(event, t.GateFired) and event.visit.position == 19]
    for gate in gates:
        assert gate.chosen == tuple(workload.routes(3 + row, gate.visit.layer) for row in range(3))
        assert sum(rows for _, rows in gate.rows) == 3 * PAPER.top_k
    assert [event.index for _, event, _ in watch() if isinstance(event, t.TokenDecoded)] == [0, 3, 6]
    one_by_one = simulate(replace(scenario, block=1), workload)
    assert (outcome.loads_a_token or 0) < (one_by_one.loads_a_token or 0)


def test_wrong_drafts_are_rows_for_nothing(watch: Watch) -> None:
    scenario = scenario_of(PAPER, predictor="none", tokens=5, block=3)
    outcome = simulate(scenario, random_workload(scenario, None, 4, same_token=0.0))
    assert [(step[0].position, step[0].tokens) for step in steps_of(watch)[1:]] == [(16, 3), (17, 3), (18, 2), (19, 1)]
    assert len(set(outcome.token_s)) == 4


def test_blocks_of_several_requests_with_a_shadow() -> None:
    outcome = drawn(PAPER, 3, block=4)
    assert all(len(answer.token_s) == 11 for answer in outcome.answers)
    assert (outcome.union or 0) > drawn(PAPER, 3).union  # type: ignore[operator]


# --- whatever their number is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_dense", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
def test_the_causes_add_up_to_the_steps(batch_dense: bool, slots: int) -> None:
    """On an uneven cluster, at every recall and number of requests. The first step has all the prompts."""
    base = replace(TINY, layers=5, experts=7, top_k=3, load_s=6.5, hop_s=0.75, shadow_layer_s=2.25)
    for requests, workers, recall in [(2, 1, 0.5), (3, 5, 0.8), (5, 9, 1.0)]:
        said = {"workers": workers, "group_size": min(2, workers), "slots": slots, "tokens": 6}
        outcome = drawn(base, requests, recall, batch_dense=batch_dense, **said)
        began, ended = (max(end(answer) for answer in outcome.answers) for end in (_first, _last))
        assert sum(outcome.where.values()) * outcome.steps == pytest.approx(ended - began)
        assert min(outcome.where.values()) >= -1e-9
        assert outcome.steps == 5


def _first(answer: Any) -> float:
    return float(answer.ttft_s)


def _last(answer: Any) -> float:
    return float(answer.token_s[-1])


def test_loads_a_token_fall_with_requests() -> None:
    """A load serves all that need it. Eight random tokens with 2 of 8 experts each need 8 x (1 - 0.75^8) = 7.2."""
    outcomes = {n: drawn(PAPER, n, 1.0, tokens=8) for n in (1, 2, 4, 8)}
    for requests, outcome in outcomes.items():
        assert outcome.union == pytest.approx(8 * (1 - 0.75**requests), rel=0.02)
        assert outcome.loads_a_token == pytest.approx(PAPER.layers * (outcome.union or 0) / requests, rel=0.02)


@pytest.mark.parametrize(("batch_dense", "most"), [(False, 1 / (32 * 3.6e-3)), (True, 8 * 320 / (32 * 7.2))])
def test_eight_requests_are_as_fast_as_their_bounds_allow(batch_dense: bool, most: float) -> None:
    """Own forwards: the main node's layers. Batched: the loads of eight workers, 40 a second each."""
    rate = drawn(PAPER, 8, slots=2, batch_dense=batch_dense).decode_tokens_per_s
    assert rate is not None
    assert rate < most
    assert rate > 0.6 * most


def test_each_worker_does_one_thing_at_a_time() -> None:
    scenario = Scenario(PAPER, tokens=5, requests=4)
    spans = simulate_requests(scenario, random_arrivals(scenario, 0.8), spans=True).spans
    rows = {span.row for span in spans if span.row.startswith("worker")}
    for row, kinds in [("main", ("layer",)), *((row, kinds) for row in rows for kinds in (("load",), ("compute",)))]:
        times = sorted((s.start, s.end) for s in spans if s.row == row and s.what in kinds)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(times))


def test_the_same_seed_gives_the_same_outcome() -> None:
    assert drawn(PAPER, 3).answers == drawn(PAPER, 3).answers
    assert drawn(PAPER, 3).answers[0] != drawn(PAPER, 3).answers[1]


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({"requests": 0}, "--requests is 0"),
        ({"parallel": 0}, "--parallel is 0"),
        ({"prefill_chunk": -1}, r"--prefill-chunk is -1; allowed: 0 \(no limit\)"),
        ({"requests": 2, "arrivals": (1.0,)}, "for 2 requests; give a time for each"),
        ({"requests": 2, "arrivals": (1.0, 0.5)}, "ascending"),
        ({"requests": 2, "arrivals": (0.0, 0.5), "prompt_s": 1.0}, "prompt_s is 1; allowed: at least 0, for requests"),
        ({"block": 0}, "--block is 0"),
    ],
)
def test_what_is_wrong_is_named(said: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        scenario_of(PAPER, **said)
