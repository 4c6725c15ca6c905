"""HOBBIT: which layer's loads begin, in which form, and what is evicted."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

from scheduler.policies.baselines.hobbit import Mixed, Multidimensional, Stacked, Weights
from scheduler.policies.precision import FULL, INT4, Importance
from scheduler.policies.predictors.base import Forecast
from scheduler.types import ExpertId, ModelShape, Visit
from support.scheduling.cache_driver import Device
from support.scheduling.forecasts import ROW, SHAPE, fire, forecast_of


def test_stacked_loads_for_the_nearest_layer_that_lacks_something() -> None:
    hobbit = Stacked(SHAPE)
    fire(hobbit, 0, 5, 6)
    assert forecast_of(hobbit, (ROW,), {1, 4}, visit=Visit(1, 9, 1)).bring is None  # all there: look further
    assert forecast_of(hobbit, (ROW,), {1}, visit=Visit(1, 9, 2)).bring is None  # lacks 4
    assert forecast_of(hobbit, (ROW,), (), visit=Visit(1, 9, 3)) == Forecast(Visit(1, 9, 3), (1, 4), ())
    assert forecast_of(hobbit, (ROW,), {4}, visit=Visit(1, 9, 3)).bring == (4,)  # perhaps brought at an earlier gate
    assert forecast_of(hobbit, (ROW,), (), visit=Visit(2, 9, 3)).bring is None  # another request's gate
    fire(hobbit, 1, 1, 4)
    assert forecast_of(hobbit, (ROW,), (), visit=Visit(1, 9, 3)).bring is None
    one = Stacked(SHAPE, prefetch=1)
    assert forecast_of(one, (ROW,), {1}, visit=Visit(1, 9, 1)).bring == (1,)  # 4 would not be brought: not lacking
    assert forecast_of(one, (ROW,), (), visit=Visit(1, 9, 2)).bring == (1,)


def test_nothing_of_a_closed_request_is_kept() -> None:
    predictor = Stacked(SHAPE)
    empty = {name: str(value) for name, value in vars(predictor).items()}
    for request in range(5):
        fire(predictor, 0, 5, request=request)
        forecast_of(predictor, (ROW,), (), visit=Visit(request, 9, 1))
        predictor.on_request_closed(request)
    assert {name: str(value) for name, value in vars(predictor).items()} == empty


def importance(rows: int = 1, rank: int = 0, better: float | None = None) -> Importance:
    return Importance(False, rows == 0, rows, 0.0, None, rank, better)


def test_hobbits_rule() -> None:
    """T1 = 0.6: of two with weights 0.7 and 0.3, the second is unimportant; of 0.55 and 0.45 it is not."""
    hobbit = Mixed()
    assert [hobbit.form(importance(better=b)) for b in (0.0, 0.55, 0.6, 0.7)] == [FULL, FULL, FULL, INT4]
    assert [hobbit.form(importance(0, rank=r)) for r in (0, 1, 5)] == [FULL, INT4, INT4]  # only predicted
    assert not hobbit.serves(INT4, importance(better=0.1))
    assert hobbit.serves(INT4, importance(better=0.9))
    assert hobbit.serves(FULL, importance(better=0.9))


# --- the cache --------------------------------------------------------------------------------------------------------

WORLD = ModelShape((0, 2, 5, 6), 4, 2)
TRACE: tuple[tuple[dict[int, int], tuple[int, ...]], ...] = (
    ({0: 1, 1: 1}, (1,)),
    ({0: 1, 2: 1}, (0, 2)),
    ({0: 1, 1: 1}, (0,)),
    ({1: 1, 3: 1}, ()),
)
"""Gates of the first layer in four tokens: rows of experts, and those for which int4 will do. Used last at token 3, 4,
2, 4; in all 3, 3, 1, 1 times; in full 1, 2, 0, 1 times."""


def after_trace(**weights: float) -> Multidimensional:
    policy = Multidimensional(WORLD, Weights(**dict.fromkeys(("lru", "lfu", "lhu", "fld"), 0.0) | weights))
    cache = Device(policy, WORLD, 16)
    for rows, smaller in TRACE:
        cache.gate(0, rows, smaller=smaller)
    return policy


def priorities(policy: Multidimensional, incoming: int) -> list[float]:
    return [policy.priority(ExpertId(0, expert), ExpertId(incoming, 0)) for expert in range(4)]


def test_each_of_the_four_policies_by_hand() -> None:
    assert priorities(after_trace(lru=1), 2) == [3 / 4, 4 / 4, 2 / 4, 4 / 4]
    assert priorities(after_trace(lfu=1), 2) == [3 / 4, 3 / 4, 1 / 4, 1 / 4]
    assert priorities(after_trace(lhu=1), 2) == [1 / 4, 2 / 4, 0, 1 / 4]
    nearest_first = [after_trace(fld=1).priority(ExpertId(layer, 3), ExpertId(5, 0)) for layer in (5, 6, 0, 2)]
    assert nearest_first == [1, 3 / 4, 2 / 4, 1 / 4]
    mixed = after_trace(lru=0.5, lfu=0.25, lhu=0.125, fld=0.125)
    assert priorities(mixed, 2)[1] == 0.5 * 4 / 4 + 0.25 * 3 / 4 + 0.125 * 2 / 4 + 0.125 * (1 - 3 / 4)


def test_the_one_of_the_lowest_priority_goes_and_of_equals_the_longest_unneeded() -> None:
    experts = [ExpertId(0, expert) for expert in (3, 1, 0, 2)]
    assert after_trace(lhu=1).victim(0, ExpertId(2, 0), experts) == ExpertId(0, 2)
    assert after_trace(lhu=1).victim(0, ExpertId(2, 0), experts[:3]) == ExpertId(0, 3)
    assert after_trace(lhu=1).victim(0, ExpertId(2, 0), [experts[2], experts[0]]) == ExpertId(0, 0)
    assert after_trace(lfu=1).victim(0, ExpertId(2, 0), experts) == ExpertId(0, 3)


def test_what_needs_the_full_form_stays_longer_than_what_is_used_more() -> None:
    """As experts 6 and 4 of the paper's Fig 11."""
    shape = ModelShape((0,), 3, 1)
    for weights, gone in ((Weights(0, 1, 0, 0), 1), (Weights(0, 0, 1, 0), 0)):
        cache = Device(Multidimensional(shape, weights), shape, 2)
        for number, smaller in ((0, (0,)), (1, ()), (0, (0,)), (1, ()), (0, (0,))):
            cache.gate(0, (number,), smaller=smaller)
        cache.gate(0, (2,))
        assert ExpertId(0, gone) not in cache.kept


def test_a_prompt_begins_the_counts_anew_and_its_later_chunks_do_not() -> None:
    policy = after_trace(lru=0.5, lfu=0.5)
    policy.on_gate_fired(Visit(1, 8, 0), {0: 1}, (), True)
    assert priorities(policy, 0)[1] == 0.5 * 4 / 5 + 0.5 * 3 / 5
    policy.on_gate_fired(Visit(2, 0, 0), {0: 1}, (), True)
    assert priorities(policy, 0) == [0, 0, 0, 0]


class Checked(Multidimensional):
    """Each victim is the one that sums over all that has happened since the last prompt began say."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(WORLD, weights)
        self.token = self.evictions = 0
        self.history: list[tuple[int, ExpertId, bool]] = []

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        super().on_used(worker, expert, hit, form)
        self.history.append((self.token, expert, form == FULL))

    def wanted(self, expert: ExpertId, incoming: ExpertId) -> float:
        uses = [(token, whole) for token, used, whole in self.history if used == expert]
        records = max((token for token, _ in uses), default=0), len(uses), sum(whole for _, whole in uses)
        later = (*WORLD.layers, *WORLD.layers)[WORLD.layers.index(incoming.layer) :].index(expert.layer)
        terms = [record / self.token for record in records] + [1 - later / len(WORLD.layers)]
        return sum(weight * term for weight, term in zip(self.weights, terms, strict=True))

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        self.evictions += 1
        found = super().victim(worker, incoming, evictable)
        assert found is not None
        least = min(self.wanted(expert, incoming) for expert in evictable)
        assert self.wanted(found, incoming) <= least + 1e-9
        return found


def test_every_victim_is_the_one_that_the_whole_history_says() -> None:
    evictions = 0
    for seed in range(20):
        draw, policy = Random(seed), Checked(Weights(0.31, 0.23, 0.29, 0.17))
        cache = Device(policy, WORLD, 5)
        for position in (0, *range(4, 30)) * 2:
            if position == 0:
                policy.token, policy.history = 0, []
            policy.token += 1
            for layer in WORLD.layers:
                chosen = draw.sample(range(4), 2)
                cache.gate(layer, chosen, prefill=position == 0, smaller=[e for e in chosen if draw.random() < 0.5])
        evictions += policy.evictions
    assert evictions > 1000
