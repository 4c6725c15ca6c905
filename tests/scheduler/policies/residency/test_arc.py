"""ARC against the published algorithm, written once more as it is printed, and against a trace worked by hand."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.precision import FULL
from scheduler.policies.residency.arc import ARC, AdaptiveReplacement, ShallowARC
from scheduler.policies.residency.measured_shares import PERIOD
from scheduler.types import ExpertId, ModelShape, Visit
from support.scheduling.cache_driver import Device

ONE_LAYER = ModelShape((0,), 12, 2)


class Published:
    """Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003), Figure 4, line by line.
    Lists run from LRU to MRU."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def request(self, x: int) -> bool:
        c = self.c
        if x in self.t1 or x in self.t2:  # Case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return True
        if x in self.b1:  # Case II
            delta = 1 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + delta, c)
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:  # Case III
            delta = 1 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - delta, 0)
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:  # Case IV
            l1, l2 = len(self.t1) + len(self.b1), len(self.t2) + len(self.b2)
            if l1 == c:
                if len(self.t1) < c:
                    self.b1.pop(0)
                    self.replace(x)
                else:
                    self.t1.pop(0)
            elif l1 < c and l1 + l2 >= c:
                if l1 + l2 == 2 * c:
                    self.b2.pop(0)
                self.replace(x)
            self.t1.append(x)
        return False

    def replace(self, x: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    @property
    def state(self) -> tuple[float, list[int], list[int], list[int], list[int]]:
        return self.p, self.t1, self.t2, self.b1, self.b2


def state(lists: AdaptiveReplacement[ExpertId]) -> tuple[float, list[int], list[int], list[int], list[int]]:
    parts = [[expert.expert for expert in part] for part in (lists.t1, lists.t2, lists.b1, lists.b2)]
    return lists.p, parts[0], parts[1], parts[2], parts[3]


# c = 3, worked with pencil from the paper's figure: request, hit, p, T1, T2, B1, B2 (LRU first).
WORKED = [
    ("a", False, 0, "a", "", "", ""),
    ("b", False, 0, "ab", "", "", ""),
    ("a", True, 0, "b", "a", "", ""),
    ("c", False, 0, "bc", "a", "", ""),
    ("d", False, 0, "cd", "a", "b", ""),  # IV B: |T1| 2 > 0, b goes
    ("e", False, 0, "de", "a", "c", ""),  # IV A: b is forgotten, c goes
    ("c", False, 1, "e", "ac", "d", ""),  # II: p 0 + 1; d goes
    ("f", False, 1, "ef", "c", "d", "a"),  # IV B: |T1| 1 is not > 1, a goes
    ("a", False, 0, "f", "ca", "de", ""),  # III: p 1 - 1; e goes
    ("d", False, 1, "f", "ad", "e", "c"),  # II: p 0 + 1; c goes
    ("g", False, 1, "fg", "d", "e", "ca"),  # IV B: a goes
    ("e", False, 3, "fg", "e", "", "cad"),  # II: p 1 + 2/1; d goes
    ("h", False, 3, "fgh", "", "", "ade"),  # IV B at 2c: c is forgotten, e goes
    ("i", False, 3, "ghi", "", "", "ade"),  # IV A, |T1| = c: f is forgotten at once
    ("a", False, 2, "hi", "a", "g", "de"),  # III: p 3 - 1; g goes
    ("d", False, 1, "i", "ad", "gh", "e"),  # III: p 2 - 1; h goes
    ("e", False, 0, "", "ade", "ghi", ""),  # III: p 1 - 2/1, at least 0; i goes
    ("a", True, 0, "", "dea", "ghi", ""),
]


def numbers(letters: str) -> list[int]:
    return ["abcdefghi".index(letter) for letter in letters]


def test_a_trace_worked_by_hand() -> None:
    policy, reference = ARC(ONE_LAYER), Published(3)
    cache = Device(policy, ONE_LAYER, 3)
    for step, (asked, hit, p, *lists) in enumerate(WORKED):
        [number] = numbers(asked)
        expected = (p, *map(numbers, lists))
        assert cache.gate(0, [number]) == [hit], step
        assert state(policy.lists) == expected, step
        assert reference.request(number) == hit
        assert reference.state == expected, step


@settings(max_examples=60)
@given(st.integers(1, 6), st.lists(st.integers(0, 11), max_size=150))
def test_every_step_is_the_published_algorithms(slots: int, asked: list[int]) -> None:
    policy, reference = ARC(ONE_LAYER), Published(slots)
    cache = Device(policy, ONE_LAYER, slots)
    for number in asked:
        assert cache.gate(0, [number]) == [reference.request(number)]
        assert state(policy.lists) == reference.state
        lists = policy.lists
        assert set(cache.kept) == {*lists.t1, *lists.t2}
        assert len(lists.t1) + len(lists.b1) <= slots
        assert len(lists) + len(lists.b1) + len(lists.b2) <= 2 * slots
        assert 0 <= lists.p <= slots


def test_a_scan_does_not_wash_out_what_is_used_often() -> None:
    """What ARC is for: a loop over many experts passes by the two that every second access wants."""
    cache = Device(ARC(ONE_LAYER), ONE_LAYER, 4)
    for _ in range(2):
        cache.gate(0, [0])
        cache.gate(0, [1])
    scanned = [cache.gate(0, [number]) for number in range(2, 12)]
    assert not any(hit for [hit] in scanned)
    assert cache.gate(0, [0]) == cache.gate(0, [1]) == [True]


def test_what_is_in_use_is_passed_over() -> None:
    lists: AdaptiveReplacement[str] = AdaptiveReplacement(3)
    for key in "abc":
        lists.add(key)
    assert lists.choose("d", "abc") == "a"
    assert lists.choose("d", "cb") == "b"
    assert lists.choose("d", "xy") is None
    lists.use("b")
    assert lists.choose("d", "b") == "b", "from T2, since nobody of T1 may go"
    assert (list(lists.t1), list(lists.t2), lists.p) == (["a", "c"], ["b"], 0), "choosing changes nothing"


def test_a_prediction_is_no_use() -> None:
    lists: AdaptiveReplacement[str] = AdaptiveReplacement(2)
    lists.add("a", referenced=False)
    assert lists.is_fresh("a")
    lists.use("a")
    assert (list(lists.t1), list(lists.t2)) == (["a"], []), "its first use is what a miss would have been"
    lists.use("a")
    assert (list(lists.t1), list(lists.t2)) == ([], ["a"])
    lists.add("b", referenced=False)
    lists.remove("b")
    assert (list(lists.b1), list(lists.b2), "b" in lists) == ([], [], False), "never used: it is not remembered"
    lists.add("c")
    lists.remove("c")
    lists.add("c", referenced=False)
    assert (lists.p, list(lists.b1)) == (0, ["c"]), "a wrong prediction teaches nothing"
    lists.use("c")
    assert (lists.p, list(lists.t2), list(lists.b1)) == (1, ["a", "c"], []), "a right one is a miss that B1 remembered"


def test_a_predicted_expert_is_used_once_by_the_gate_that_it_was_loaded_for() -> None:
    policy = ARC(ONE_LAYER)
    cache = Device(policy, ONE_LAYER, 4)
    cache.predict(0, [5, 6])
    assert cache.gate(0, [5]) == [True]
    assert state(policy.lists)[1:3] == ([6, 5], [])
    cache.gate(0, [5])
    assert state(policy.lists)[1:3] == ([6], [5])


def test_fewer_slots() -> None:
    lists: AdaptiveReplacement[int] = AdaptiveReplacement(4)
    for key in range(4):
        lists.add(key)
    for key in (0, 1):
        lists.remove(key)
    lists.resize(2)
    assert (list(lists.t1), list(lists.b1), lists.capacity) == ([2, 3], [], 2)
    assert lists.choose(9, [2, 3]) == 2


TWELVE = ModelShape(tuple(range(12)), 4, 2)
QWEN = ModelShape(tuple(range(24)), 60, 4)


@pytest.mark.parametrize(
    ("shape", "slots", "boundary", "expected"),
    [
        (TWELVE, 2 + 28, 2, [4, 4] + [2] * 10),  # (28 - 2 x 4) / (12 - 2)
        (TWELVE, 2 + 30, 2, [4, 4, 3, 3] + [2] * 8),  # what does not divide
        (TWELVE, 4 + 7, 2, [4, 3] + [0] * 10),  # too little for the shallow ones: in their order
        (TWELVE, 48, 2, [4] * 12),  # all: no slot need be kept free
        (TWELVE, 2 + 24, 0, [2] * 12),
        (QWEN, 2 + 4 * 60 + 20 * 8, 4, [60] * 4 + [8] * 20),  # Fate's boundary, layers 0 to 3
        # Each layer holds a token's experts: two slots pass. One does not: four. At most half.
        (ModelShape(tuple(range(7)), 4, 2), 2 + 8 + 2 * 5, 2, [4, 4, 2, 2, 2, 2, 2]),
        (ModelShape(tuple(range(7)), 4, 2), 2 + 8 + 2 * 5 - 1, 2, [4, 4, 2, 2, 1, 1, 1]),
        (ModelShape(tuple(range(7)), 4, 2), 5, 2, [3, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_fates_shares(shape: ModelShape, slots: int, boundary: int, expected: list[int]) -> None:
    policy = ShallowARC(shape)
    policy.check(shape, slots)
    assert policy.bounded(boundary) == expected


def decode(policy: ShallowARC, predicted: Collection[int], passes: int) -> list[list[int]]:
    """Random experts for so many tokens, none in a slot; all loads of layers in `predicted` are prefetches. Returns
    each layer's choices."""
    draw, shape = Random(3), policy.shape
    chosen: list[list[int]] = [[] for _ in shape.layers]
    for position in range(passes):
        for layer in shape.layers:
            experts = draw.sample(range(shape.experts), shape.top_k)
            policy.on_gate_fired(Visit(0, position, layer), dict.fromkeys(experts, 1), (), False)
            chosen[layer] += experts
            for number in experts:
                expert = ExpertId(layer, number)
                policy.keeps(0, expert, layer in predicted)
                policy.on_used(0, expert, False, FULL)
                policy.on_left(0, expert)
    return chosen


def test_layers_0_to_3_of_24_are_shallow_where_the_others_are_predicted() -> None:
    """Fate 4.4: the boundary of Qwen1.5-MoE, from the accuracies of Fig. 7, drawn here as none and all."""
    policy = ShallowARC(QWEN)
    policy.check(QWEN, 2 + 4 * 60 + 20 * 8)
    assert set(policy.share.values()) == {16, 17}, "equal before anything was measured"
    decode(policy, range(4, 24), PERIOD)
    assert list(policy.share.values()) == [60] * 4 + [8] * 20


def test_no_layer_starves_for_a_whole_one_where_all_are_predicted_alike() -> None:
    policy = ShallowARC(QWEN)
    policy.check(QWEN, 2 + 4 * 60 + 20 * 8)
    decode(policy, (), PERIOD)
    assert min(policy.share.values()) >= QWEN.top_k
    assert max(policy.share.values()) < 60


@pytest.mark.parametrize("predicted", [(), range(1, 12), range(2, 12), range(3, 12), range(6)])
@pytest.mark.parametrize("slots", [8, 20, 30, 40])
def test_the_boundary_has_the_fewest_demand_loads_of_caches_that_were_run(
    predicted: Collection[int], slots: int
) -> None:
    shape = ModelShape(TWELVE.layers, TWELVE.experts, 1)
    policy = ShallowARC(shape)
    policy.check(shape, slots)
    chosen = decode(policy, predicted, PERIOD - 1)
    policy.on_gate_fired(Visit(0, PERIOD, 0), {}, (), False)
    misses = []
    for layer, uses in enumerate(chosen):
        loads = len(uses) if layer in predicted else 0
        weight = (len(uses) - loads + 1) / (len(uses) + 1)
        misses.append([weight * lru_misses(uses, size) for size in range(shape.experts + 1)])
    costs = []
    for boundary in range(len(shape.layers) + 1):
        shares = policy.bounded(boundary)
        costs.append(sum(of[size] for of, size in zip(misses, shares, strict=True)))
    assert list(policy.share.values()) == policy.bounded(costs.index(min(costs)))


def lru_misses(uses: list[int], size: int) -> int:
    """Of those that were used before."""
    return sum(
        number in (recent := list(dict.fromkeys(reversed(uses[:i])))) and number not in recent[:size]
        for i, number in enumerate(uses)
    )


@settings(max_examples=30)
@given(st.integers(2, 50), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3)), max_size=120))
def test_each_layer_is_an_arc_of_its_own(slots: int, asked: list[tuple[int, int]]) -> None:
    policy = ShallowARC(TWELVE)
    cache = Device(policy, TWELVE, slots)
    references = {layer: Published(share) for layer, share in policy.share.items() if share}
    for layer, number in asked:
        reference = references.get(layer)
        assert cache.gate(layer, [number]) == [reference is not None and reference.request(number)]
        if reference is not None:
            assert state(policy.lists[layer]) == reference.state
