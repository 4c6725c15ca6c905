"""Residencies that evict, exact decisions: quotas, warming, forms of lower precision, and what they cost others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from scheduler import types as t
from scheduler.policies.baselines.hobbit import Mixed
from scheduler.policies.precision import FULL, INT4, Importance, Popular, Uniform
from scheduler.policies.residency.base import NoCache, ResidencyBase
from scheduler.types import ExpertId
from support.scheduling.core_driver import Driver, P, in_place


class Keeps(ResidencyBase):
    """All stay. `fulls`: layers whose part is used up; `spares`: who never makes room; `warms`: see `warm`."""

    def __init__(self, fulls: Collection[int] = (), spares: Collection[int] = (), warms: Collection[Any] = ()) -> None:
        self.fulls, self.spares, self.warms = fulls, spares, [ExpertId(*pair) for pair in warms]
        self.asked: list[tuple[Any, ...]] = []

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        self.asked.append(("keeps", worker, tuple(expert), predicted))
        return True

    def on_gate_fired(self, visit: t.Visit, named: Any, scores: Any, prefill: bool) -> None:
        self.asked.append(("observed", visit.layer, dict(named), prefill))

    def on_left(self, worker: int, expert: ExpertId) -> None:
        self.asked.append(("left", worker, tuple(expert)))

    def full(self, wanted: ExpertId) -> bool:
        return wanted.layer in self.fulls

    def victim(self, worker: int, wanted: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        self.asked.append(("victim", worker, tuple(wanted), [tuple(e) for e in evictable]))
        return next((e for e in evictable if e.expert not in self.spares), None)

    def warm(self, slots: int) -> list[ExpertId]:
        self.asked.append(("warm", slots))
        return self.warms


def cached(policy: Any, **fields: Any) -> Driver:
    return Driver(**({"workers": 1, "slots": 3, "group": 1, "layers": 2, "residency": policy} | fields))


def fetch(d: Driver, layer: int, *experts: int, at: int = P) -> None:
    """They are named, loaded and computed."""
    d.gate(layer, *experts, at=at)
    for place in d.busy:
        d.do(t.LoadEnded(d.in_slots[place].load_id, 10))
        d.do(t.ComputeEnded(d.calls[place].pop().call_id))


# --- who makes room ---------------------------------------------------------------------------------------------------


def test_a_part_that_is_used_up_has_somebody_make_room_though_a_slot_is_free() -> None:
    policy = Keeps(fulls=[0])
    d = cached(policy)
    d.open()
    fetch(d, 0, 4)
    assert d.gate(0, 5, at=P + 1) == ["evict 0.0 0/4", "load 0.0 0/5", *in_place("0.0 0/5", at=f"1@{P + 1}")]
    assert policy.asked[-3:] == [("victim", 0, (0, 5), [(0, 4)]), ("left", 0, (0, 4)), ("keeps", 0, (0, 5), False)]
    assert d.gate(1, 6, at=P + 1)[0] == "load 0.1 1/6"


def test_where_nobody_of_a_full_part_will_go_a_free_slot_serves() -> None:
    d = cached(Keeps(fulls=[0], spares=[4]))
    d.open()
    fetch(d, 0, 4)
    assert d.gate(0, 5, at=P + 1)[0] == "load 0.1 0/5"


def test_evictable_are_those_that_nobody_needs_the_longest_first() -> None:
    policy = Keeps()
    d = cached(policy)
    d.open()
    fetch(d, 0, 4, 5, 6)
    fetch(d, 1, at=P)
    d.token(1)
    fetch(d, 0, 4, at=P + 1)
    d.predict(0, 6, at=P + 2)
    assert d.gate(1, 7, at=P + 1) == ["evict 0.1 0/5", "load 0.1 1/7", *in_place("0.1 1/7", at=f"1@{P + 1}")]
    assert ("victim", 0, (1, 7), [(0, 5), (0, 4)]) in policy.asked


def test_a_prediction_whom_nobody_makes_room_for_waits_and_a_gate_takes_the_first() -> None:
    d = cached(Keeps(spares=range(8)), slots=2)
    d.open()
    fetch(d, 0, 4, 5)
    assert d.predict(1, 7) == []
    assert d.gate(1, 7) == ["evict 0.0 0/4", "load 0.0 1/7", *in_place("0.0 1/7")]


def test_a_gate_waits_where_something_is_computed_that_will_leave() -> None:
    d = cached(Keeps(spares=range(8)), slots=2)
    d.open(1)
    d.open(2)
    fetch(d, 0, 4)
    assert d.gate(0, 5, request=2) == ["load 0.1 0/5", *in_place("0.1 0/5", at=f"2@{P}")]
    assert d.gate(1, 7) == []
    d.loaded(0, slot=1)
    assert d.computed(0, slot=1) == [f"resume 2@{P} layer 0", "evict 0.0 0/4", "load 0.0 1/7", *in_place("0.0 1/7")]


def test_a_policy_hears_of_gates_before_anything_is_decided() -> None:
    policy = Keeps()
    d = cached(policy)
    d.open()
    d.predict(0, 4)
    d.gate(0, rows={4: 1, 5: 2})
    assert policy.asked == [
        ("warm", 3),
        ("keeps", 0, (0, 4), True),
        ("observed", 0, {4: 1, 5: 2}, False),
        ("keeps", 0, (0, 5), False),
    ]


# --- hits -------------------------------------------------------------------------------------------------------------


def test_present_is_who_is_loaded_by_the_gate_and_a_hit_whose_load_was_begun_for_another() -> None:
    d = cached(Keeps())
    d.open()
    fetch(d, 0, 4)
    d.token(1)
    d.predict(0, 5, at=P + 1)  # on its way
    assert d.gate(0, 4, 5, 6, at=P + 1)[-2] == "load 0.2 0/6"
    stats = d.stats()
    assert (stats.named, stats.present) == (4, 1)
    for slot in (1, 2):
        d.loaded(0, slot=slot)
    for slot in (0, 1, 2):
        d.computed(0, slot=slot)
    assert (stats.reused, stats.decode_reused, stats.loads, stats.reloads) == (1, 1, 3, 2)


def test_one_that_waits_in_a_queue_is_a_hit_where_another_brought_it() -> None:
    """Its gate finds it loaded and waits for nothing: no stall."""
    d = cached(Keeps(), slots=3, layers=3)
    d.open()
    assert d.predict(0, 1) + d.predict(1, 2) + d.predict(2, 3) == ["load 0.0 0/1", "load 0.1 1/2"]
    d.open(2)
    assert d.gate(2, 3, request=2) == [
        "evict 0.0 0/1",
        "evict 0.1 1/2",
        "load 0.0 2/3",
        *in_place("0.0 2/3", at=f"2@{P}"),
        "load 0.1 0/1",
    ]
    assert d.loaded(0) == ["load 0.2 1/2"]
    d.computed(0)
    d.now = 5.0
    assert d.gate(2, 3) == in_place("0.0 2/3")
    d.now = 8.0
    assert d.computed(0) == [f"resume 1@{P} layer 2"]
    assert (d.stats().stall_s, d.stats().reused, d.stats().present) == (0.0, 1, 1)


# --- warming ----------------------------------------------------------------------------------------------------------


def test_when_prefill_is_over_slots_are_filled_with_whom_the_policy_wants() -> None:
    policy = Keeps(warms=[(0, 4), (1, 2), (0, 6)])
    d = cached(policy)
    d.open(decode=False)
    assert d.do(t.TokenDecoded(1, 0)) == [f"align 1 step 0 token kv 0:{P}", "load 0.0 0/4", "load 0.1 1/2"]
    assert d.loaded(0) == ["load 0.2 0/6"]
    assert d.loaded(0, slot=1) + d.loaded(0, slot=2) == []
    assert d.do(t.TokenDecoded(1, 1)) == [f"align 1 step 1 token kv {P}:{P + 1}"]  # once only
    assert d.gate(0, 4, 6) == in_place("0.0 0/4", "0.2 0/6")
    assert d.computed(0) + d.computed(0, slot=2) == [f"resume 1@{P} layer 0"]
    assert (d.stats().reused, d.stats().present, d.stats().decode_loads, d.stats().reloads) == (2, 2, 3, 0)


def test_whoever_is_there_already_is_not_loaded_again_to_warm() -> None:
    d = cached(Keeps(warms=[(0, 4), (0, 5)]))
    d.open(2)
    for slot in (0, 1):
        d.loaded(0, slot=slot)
    d.open(decode=False)
    assert d.do(t.TokenDecoded(1, 0)) == [f"align 1 step 0 token kv 0:{P}"]


def test_warming_is_given_up_for_what_a_gate_waits_for_and_taken_up_again() -> None:
    d = cached(Keeps(warms=[(0, 4), (1, 2)]), slots=4)
    d.open()
    assert d.where == {0: (0, 4)}
    assert d.gate(0, 7) == ["evict 0.0 0/4", "evict 0.1 1/2", "load 0.0 0/7", *in_place("0.0 0/7"), "load 0.1 0/4"]
    assert d.loaded(0) == ["load 0.2 1/2"]
    assert d.stats().preempted == 2


def test_predictions_come_before_warming() -> None:
    d = cached(Keeps(warms=[(0, 0), (0, 1), (0, 2), (0, 3)]), slots=6)
    d.open()
    assert d.predict(1, 7) == []  # two loads are on the link
    assert d.loaded(0) == ["load 0.2 1/7"]
    assert d.loaded(0, slot=1) == ["load 0.3 0/2"]


def test_whom_another_brings_meanwhile_need_not_be_warmed_and_is_free_to_go() -> None:
    """Else it would stand in its slot as if predicted, as long as the request lasts."""
    d = cached(Keeps(warms=[(0, 0), (0, 1), (1, 5)]), slots=3)
    d.open()
    assert d.gate(1, 5)[:3] == ["evict 0.0 0/0", "evict 0.1 0/1", "load 0.0 1/5"]
    for slot in (0, 1, 2):
        d.loaded(0, slot=slot)
    d.computed(0)
    assert d.core.snapshot().workers[0].kept == {(0, 0), (0, 1), (1, 5)}


def test_a_closed_request_stops_warming() -> None:
    d = cached(Keeps(warms=[(0, 0), (0, 1), (0, 2)]))
    d.open()
    assert d.do(t.RequestClosed(1)) == ["unfollow 1"]  # what is on its way stays
    assert d.loaded(0) == d.loaded(0, slot=1) == []
    assert not d.core.snapshot().visits


def test_several_workers_are_warmed_as_prefill_shares_them_out() -> None:
    d = cached(Keeps(warms=[(0, 0), (0, 1), (0, 2), (1, 0)]), workers=3, experts=4)
    d.open()
    assert {(place[0], tuple(load.expert)) for place, load in d.in_slots.items()} == {
        (0, (0, 0)),
        (1, (0, 1)),
        (2, (0, 2)),
        (1, (1, 0)),
    }


class Refuses(Keeps):
    """Odd experts may not stay."""

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        return super().keeps(worker, expert, predicted) and expert.expert % 2 == 0


def test_an_expert_that_may_not_stay_is_not_loaded_to_warm() -> None:
    d = cached(Refuses(warms=[(0, 1), (0, 4), (1, 3), (1, 2)]))
    d.open(decode=False)
    assert d.do(t.TokenDecoded(1, 0)) == [f"align 1 step 0 token kv 0:{P}", "load 0.0 0/4", "load 0.1 1/2"]
    assert d.loaded(0) + d.loaded(0, slot=1) == []
    assert not d.core.snapshot().workers[0].queued
    assert d.stats().loads == 2


def test_a_warming_load_serves_a_gate_that_waits_for_the_expert_at_another_worker() -> None:
    d = cached(Keeps(warms=[(1, 2)]), workers=2, slots=1)
    for request in (1, 2, 3):
        d.open(request)
    assert d.gate(0, 0) == ["load 1.0 0/0", *in_place("1.0 0/0")]
    assert d.gate(0, 1, request=2) == ["evict 0.0 1/2", "load 0.0 0/1", *in_place("0.0 0/1", at=f"2@{P}")]
    assert d.gate(1, 2, request=3) == []  # it waits at worker 1
    d.loaded(0)
    assert d.computed(0) == [
        f"resume 2@{P} layer 0",
        "evict 0.0 0/1",
        "load 0.0 1/2",
        *in_place("0.0 1/2", at=f"3@{P}"),
    ]
    d.loaded(0, 1)
    assert d.computed(0, 1) == [f"resume 3@{P} layer 1", f"resume 1@{P} layer 0"]
    assert [(d.stats(request).loads, d.stats(request).reused) for request in (1, 2, 3)] == [(3, 0), (1, 0), (0, 1)]


def test_one_load_warms_for_all_requests() -> None:
    """They would else evict each other's experts, and load them again."""
    d = cached(Keeps(warms=[(0, 0), (0, 1), (0, 2)]), slots=1)
    d.open()
    d.open(2)
    assert d.loaded(0) == ["evict 0.0 0/0", "load 0.0 0/1"]
    assert d.loaded(0) == ["evict 0.0 0/1", "load 0.0 0/2"]
    assert d.loaded(0) == []
    assert not d.core.snapshot().workers[0].queued


class Changes(Keeps):
    """The expert that is loaded first may not stay, and later may."""

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        first = not self.asked
        return super().keeps(worker, expert, predicted) and not first


def test_an_expert_that_is_there_and_may_not_stay_is_loaded_to_warm() -> None:
    """In the first layer as in the others."""
    for layer in (0, 1):
        d = cached(Changes(warms=[(layer, 4)]), shadow=False)
        d.open(decode=False)
        assert d.predict(layer, 4) == [f"load 0.0 {layer}/4"]
        assert d.do(t.TokenDecoded(1, 0)) == [f"load 0.1 {layer}/4"]
        d.loaded(0, slot=1)
        assert d.core.snapshot().workers[0].kept == {(layer, 4)}


# --- forms ------------------------------------------------------------------------------------------------------------


class ByRank:
    """A row's best expert whole, others as int4; whole always serves."""

    forms, exact, wants_scores = (FULL, INT4), False, True

    def form(self, wanted: Importance) -> str:
        return FULL if wanted.rank == 0 and not wanted.predicted else INT4

    def serves(self, held: str, wanted: Importance) -> bool:
        return held == FULL or self.form(wanted) == INT4


SCORES = ((0.4, 0.3, 0.2, 0.1),)


def formed(precision: Any, policy: Any = None, **fields: Any) -> Driver:
    d = cached(policy or NoCache(), **({"precision": precision, "experts": 4} | fields))
    d.open()
    return d


def test_loads_say_their_form() -> None:
    d = formed(Uniform("int4"))
    assert d.predict(0, 2) == ["load 0.0 0/2 int4"]
    assert d.raw[0] == t.Load(0, 0, ExpertId(0, 2), d.raw[0].load_id, "int4")
    assert d.gate(0, 1)[1] == "load 0.0 0/1 int4"
    assert formed(Uniform(FULL)).predict(0, 2) == ["load 0.0 0/2"]


def test_the_scores_of_a_gate_decide_the_form() -> None:
    d = formed(ByRank())
    out = d.gate(0, chosen=((0, 1),), scores=SCORES)
    assert [x for x in out if x.startswith("load")] == ["load 0.0 0/0", "load 0.1 0/1 int4"]


def test_a_form_that_does_not_serve_is_loaded_again_once_the_gate_says_so() -> None:
    """Predicted, it came as int4; it turns out to be the row's best."""
    d = formed(ByRank())
    assert d.predict(0, 0, 1) == ["load 0.0 0/0 int4", "load 0.1 0/1 int4"]
    d.loaded(0)
    d.loaded(0, slot=1)
    assert d.gate(0, chosen=((0, 1),), scores=SCORES) == [
        "evict 0.0 0/0",
        *(f"{x} last" for x in in_place("0.1 0/1")),
        "load 0.0 0/0",
        f"{in_place('0.0 0/0')[0]} last",
    ]
    assert (d.stats().loads, d.stats().reloads, d.stats().unused) == (3, 0, 0)


def test_one_that_stays_in_a_form_that_does_not_serve_makes_way_for_itself() -> None:
    policy = Keeps()
    d = formed(ByRank(), policy)
    d.gate(0, chosen=((0, 1),), scores=SCORES)
    for slot in (0, 1):
        d.loaded(0, slot=slot)
        d.computed(0, slot=slot)
    d.token(1)
    out = d.gate(0, chosen=((1, 0),), scores=((0.3, 0.4, 0.2, 0.1),), at=P + 1)
    assert out == [
        "evict 0.1 0/1",
        *in_place("0.0 0/0", at=f"1@{P + 1}"),
        "load 0.1 0/1",
        *in_place("0.1 0/1", at=f"1@{P + 1}"),
    ]
    assert ("left", 0, (0, 1)) in policy.asked
    assert (d.stats().named, d.stats().present) == (4, 1)  # int4 in place of whole is no hit
    assert d.stats().reused == 0
    d.computed(0)
    assert d.stats().reused == 1


def test_of_two_passes_each_counts_the_form_that_it_needs() -> None:
    """Expert 0 is there whole and 1 in int4. The first pass needs 0 whole and 1 in int4, the second the other way."""
    d = formed(ByRank(), Keeps(), shadow=False)
    d.gate(0, chosen=((0, 1),), scores=SCORES)
    for slot in (0, 1):
        d.loaded(0, slot=slot)
        d.computed(0, slot=slot)
    d.open(2)
    d.begin((1, P + 1), (2, P + 1))
    d.gate(0, at=P + 1, chosen=((0, 1),), scores=SCORES)
    d.gate(0, at=P + 1, request=2, chosen=((1, 0),), scores=((0.3, 0.4, 0.2, 0.1),))
    assert [(d.stats(request).named, d.stats(request).present) for request in (1, 2)] == [(4, 2), (2, 1)]


def test_int2_left_from_prefill_is_no_hit_in_decoding() -> None:
    """Fate's forms: decoding asks for int4."""
    d = formed(Popular(1.0), Keeps(), workers=1, slots=4, prefill="pipelined", shadow=False)
    d.prefill(8, request=2)
    d.do(t.GateFired(t.Visit(2, 0, 0), ((1, 8), (3, 8))))
    for slot in (0, 1):
        d.loaded(0, slot=slot)
        d.computed(0, slot=slot)
    assert [load.form for load in d.in_slots.values()] == ["int2", "int2"]
    d.begin((1, P))
    d.gate(0, 1, 3)
    assert (d.stats().named, d.stats().present) == (2, 0)
    for slot in (0, 1):
        d.loaded(0, slot=slot)
        d.computed(0, slot=slot)
    d.token(1)
    d.gate(0, 1, 2, at=P + 1)
    assert (d.stats().named, d.stats().present) == (4, 1)


def test_one_that_is_computed_just_now_serves_in_whatever_form() -> None:
    d = formed(ByRank(), Keeps())
    d.gate(0, chosen=((0, 1),), scores=SCORES)
    d.open(2)
    out = d.gate(0, chosen=((1, 0),), scores=((0.3, 0.4, 0.2, 0.1),), request=2)
    assert sorted(out) == in_place("0.0 0/0", "0.1 0/1", at=f"2@{P}")


def test_fates_choice_in_prefill_and_in_decoding() -> None:
    """The least popular part of the rows in int2; loads begin with the most wanted."""
    d = cached(Keeps(), slots=4, experts=4, precision=Popular(0.25), prefill="pipelined", shadow=False)
    d.open(1, 8, decode=False)
    d.do(t.StepStarted((t.Pass(1, 0, 8, prefill=True),)))
    rows = {0: 1, 1: 8, 2: 5, 3: 2}  # of 16: 1, then 2, 3, 0 whose share begins at 8/16, 13/16, 15/16
    out = d.do(t.GateFired(t.Visit(1, 0, 0), tuple(rows.items()), scores=((0.1, 0.5, 0.3, 0.2),)))
    loads = [x for x in out if x.startswith("load")]
    assert loads == ["load 0.0 0/1 int4", "load 0.1 0/2 int4", "load 0.2 0/3 int2", "load 0.3 0/0 int2"]
    for slot in range(4):
        d.loaded(0, slot=slot)
        d.computed(0, slot=slot)
    d.token(0, prompt=8)
    assert d.gate(0, at=8, chosen=((1, 3),), scores=((0.1, 0.5, 0.3, 0.4),)) == [
        *in_place("0.0 0/1", at="1@8"),
        "evict 0.2 0/3",
        "load 0.2 0/3 int4",
        *in_place("0.2 0/3", at="1@8"),
    ]


def costly(*costs: tuple[str, float, float]) -> tuple[t.FormCost, ...]:
    return tuple(t.FormCost(form, load_s, restore_s, True) for form, load_s, restore_s in costs)


def test_a_worker_where_a_form_does_not_pay_loads_the_full_one() -> None:
    """Of two workers with the same slots only the first restores too slowly."""
    d = Driver(workers=0, slots=2, layers=2, experts=4, residency=Keeps(), precision=ByRank(), group=1)
    slow, fast = costly(("", 5, 0), ("int4", 2, 4)), costly(("", 5, 0), ("int4", 2, 1))
    for worker, forms in enumerate((slow, fast)):
        d.do(t.WorkerJoined(worker, 2, forms=forms))
    d.open()
    assert d.predict(0, 2, 1) == ["load 0.0 0/2", "load 0.1 0/1"]
    assert d.predict(1, 2, 1) == ["load 1.0 1/2 int4", "load 1.1 1/1 int4"]
    assert d.core.forms == {"", "int4"}
    assert d.core.form_costs == {"": (5, 0), "int4": (2, 4)}
    assert not d.core.exact


def test_answers_are_exact_while_no_smaller_form_was_taken() -> None:
    d = Driver(workers=0, layers=1, experts=4, precision=Uniform("int4"), group=1)
    d.do(t.WorkerJoined(0, 2, forms=costly(("", 5, 0), ("int4", 2, 4))))
    d.open()
    assert d.gate(0, 1)[0] == "load 0.0 0/1"
    assert (d.core.exact, d.core.forms) == (True, {""})
    d.do(t.WorkerJoined(1, 2, forms=costly(("int4", 2, 1))))
    d.do(t.WorkerLost(0, "gone"))
    assert (d.core.exact, d.core.forms) == (False, {"", "int4"})


def test_an_unpopular_expert_is_loaded_in_the_form_that_is_ready_first() -> None:
    """int2 takes longer to restore than int4 here."""
    d = Driver(workers=0, slots=2, layers=2, experts=4, precision=Popular(1.0), prefill="pipelined", shadow=False)
    d.do(t.WorkerJoined(0, 4, forms=costly(("int4", 2, 1), ("int2", 1, 3))))
    d.open(1, 8, decode=False)
    d.do(t.StepStarted((t.Pass(1, 0, 8, prefill=True),)))
    out = d.do(t.GateFired(t.Visit(1, 0, 0), ((0, 8), (1, 8))))
    assert [x for x in out if x.startswith("load")] == ["load 0.0 0/0 int4", "load 0.1 0/1 int4"]


def test_hobbits_choice_by_what_the_better_ones_weigh() -> None:
    d = formed(Mixed())
    out = d.gate(0, chosen=((0, 1),), scores=((0.7, 0.2, 0.1, 0.0),))
    assert [x for x in out if x.startswith("load")] == ["load 0.0 0/0", "load 0.1 0/1 int4"]
    d = formed(Mixed())
    out = d.gate(0, chosen=((0, 1),), scores=((0.5, 0.4, 0.1, 0.0),))
    assert [x for x in out if x.startswith("load")] == ["load 0.0 0/0", "load 0.1 0/1"]
