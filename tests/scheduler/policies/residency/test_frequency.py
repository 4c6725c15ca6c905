"""SMOE's cache against its rules."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.precision import FULL
from scheduler.policies.residency.frequency import Frequent
from scheduler.types import ExpertId, ModelShape, Visit
from support.scheduling.cache_driver import Device

SHAPE = ModelShape((0, 1), 8, 2)


def there(cache, layer: int) -> set[int]:
    return {expert.expert for expert, kept in cache.kept.items() if expert.layer == layer and kept}


def prefilled(slots: int) -> tuple[Frequent, Device]:
    policy = Frequent(SHAPE)
    cache = Device(policy, SHAPE, slots)
    cache.gate(0, {0: 1, 1: 4, 2: 2, 3: 3, 4: 1}, prefill=True)
    cache.gate(1, {0: 2, 5: 9, 6: 5, 7: 6}, prefill=True)
    return policy, cache


def test_filled_with_what_prefill_activated_most() -> None:
    policy, cache = prefilled(8)
    assert list(policy.share.values()) == [3, 3]
    assert list(policy.warm(8)) == [(1, 5), (1, 7), (1, 6), (0, 1), (0, 3), (0, 2)]
    assert cache.loads == 9
    cache.warm()
    assert (there(cache, 0), there(cache, 1)) == ({1, 2, 3}, {5, 6, 7})
    assert cache.loads == 9, "they stayed when prefill loaded them"


def test_what_prefill_loaded_before_its_gates_is_put_right() -> None:
    policy = Frequent(SHAPE)
    cache = Device(policy, SHAPE, 8)
    cache.predict(0, range(5))
    cache.gate(0, {0: 1, 1: 4, 2: 2, 3: 3, 4: 1}, prefill=True)
    assert there(cache, 0) == {0, 1, 2}
    cache.warm()
    assert there(cache, 0) == {1, 2, 3}
    assert cache.loads == 6


@settings(max_examples=30)
@given(
    st.integers(2, 15),
    st.lists(st.dictionaries(st.integers(0, 7), st.integers(1, 5), min_size=1), min_size=2, max_size=12),
)
def test_prefill_leaves_the_most_frequent_in_each_layer(slots: int, gates: list[dict[int, int]]) -> None:
    """Chunks of one prompt; what stays after warm() is a most frequent set, by counting."""
    policy = Frequent(SHAPE)
    cache = Device(policy, SHAPE, slots)
    counts: list[Counter[int]] = [Counter(), Counter()]
    for chunk, named in enumerate(gates):
        cache.gate(chunk % 2, named, prefill=True)
        counts[chunk % 2].update(named)
    cache.warm()
    for layer in (0, 1):
        share = policy.share[layer]
        stay = sorted((counts[layer][number] for number in there(cache, layer)), reverse=True)
        assert stay == sorted(counts[layer].values(), reverse=True)[:share]


def test_only_what_was_predicted_comes_in_for_the_least_frequent() -> None:
    policy, cache = prefilled(8)
    cache.warm()
    assert cache.gate(0, [0, 7]) == [False, False]
    assert there(cache, 0) == {1, 2, 3}, "loaded because the gate named them: they go again"
    cache.gate(1, [5, 6])
    cache.predict(0, [4, 5])
    assert there(cache, 0) == {1, 4, 5}, "in place of 2 (2 rows) and 3 (3)"
    assert cache.gate(0, [4, 5]) == [True, True]
    assert there(cache, 0) == {1, 4, 5}
    assert there(cache, 1) == {5, 6, 7}, "the other layer's are its own"
    assert (policy.row_count(ExpertId(0, 4)), policy.row_count(ExpertId(0, 5))) == (2, 1)
    cache.predict(0, [2])
    assert there(cache, 0) == {1, 2, 4}, "5 was activated once"


def test_a_named_expert_puts_out_nobody() -> None:
    policy, cache = prefilled(8)
    cache.warm()
    cache.gate(1, [5])
    wanted = ExpertId(0, 7)
    assert policy.full(wanted)
    policy.on_gate_fired(Visit(0, 9, 0), {7: 1}, (), False)
    assert not policy.full(wanted)
    assert policy.victim(0, wanted, tuple(cache.idle)) is None
    policy.on_used(0, wanted, False, FULL)
    assert policy.full(wanted), "for the next token it may be predicted"


def test_the_next_prompt_counts_anew() -> None:
    _, cache = prefilled(8)
    cache.warm()
    cache.gate(0, {0: 1, 4: 2, 7: 3}, prefill=True, request=1)
    cache.gate(1, {0: 1}, prefill=True, request=1)
    cache.warm()
    assert there(cache, 0) == {0, 4, 7}
    assert 0 in there(cache, 1)
