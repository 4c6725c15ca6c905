"""A router that decides otherwise than the gate, and what the main model is told: `Route`, exactly."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from scheduler import types as t
from scheduler.policies.predictors.base import Forecast, PredictorBase
from support.scheduling.core_driver import Driver, P
from support.scheduling.policies import LastUsed

SCORES = ((0.4, 0.3, 0.2, 0.1),)


class Says:
    """Always this."""

    exact, wants_scores = False, True

    def __init__(self, *rows: tuple[int, ...]) -> None:
        self.rows = rows
        self.asked: list[tuple[Any, Any, set[int]]] = []

    def route(self, chosen: Any, scores: Any, resident: Collection[int]) -> tuple[tuple[int, ...], ...]:
        self.asked.append((chosen, scores, set(resident)))
        return self.rows


class Attends(PredictorBase):
    """Wants attention's foresight, and forecasts just what the scores say."""

    foresight = "attention"

    def __init__(self, *forecasts: Forecast) -> None:
        super().__init__(t.ModelShape((0, 1), 4, 2))
        self.forecasts = forecasts
        self.asked: list[tuple[t.Visit, Any, set[int], bool]] = []

    def on_foreseen(self, visit: t.Visit, scores: Any, resident: Collection[int], prefill: bool) -> list[Forecast]:
        self.asked.append((visit, scores, set(resident), prefill))
        return list(self.forecasts)


def router(*rows: tuple[int, ...], **fields: Any) -> Driver:
    d = Driver(**({"workers": 2, "layers": 2, "experts": 4, "router": Says(*rows)} | fields))
    d.open()
    return d


def test_experts_in_place_of_the_gates_are_loaded_and_computed_and_told_first() -> None:
    d = router((0, 2))
    assert d.gate(0, chosen=((0, 1),), scores=SCORES) == [
        f"route 1@{P} layer 0: 0 2, here ",
        "load 0.0 0/0",
        f"compute 0.0 0/0 1@{P} 0:1 last",
        "load 1.0 0/2",
        f"compute 1.0 0/2 1@{P} 0:1 last",
    ]
    assert (d.stats().named, d.stats().present, d.stats().overall.activated) == (2, 0, 0)


def test_the_router_is_told_what_is_in_a_slot_and_not_what_is_on_its_way() -> None:
    d = router((0, 1))
    d.predict(0, 2, 3)
    d.loaded(0)
    d.gate(0, chosen=((0, 1),), scores=SCORES)
    assert d.core.strategy.router.asked == [(((0, 1),), SCORES, {2})]


def test_an_unchanged_choice_needs_no_word() -> None:
    d = router((0, 1))
    assert d.gate(0, chosen=((0, 1),), scores=SCORES)[0] == "load 0.0 0/0"


def test_rows_are_counted_anew_and_an_expert_that_nobody_computes_any_more_is_dropped() -> None:
    """Two tokens of one pass. Recall asks what the gate named, all the same."""
    d = router((0, 2), (2,))
    d.predict(0, 1)
    d.loaded(0)
    assert d.gate(0, chosen=((0, 1), (1, 2)), scores=SCORES * 2) == [
        f"route 1@{P} layer 0: 0 2 | 2, here ",
        "evict 0.0 0/1",
        "load 0.0 0/2",
        f"compute 0.0 0/2 1@{P} 0:2 last",
        "load 1.0 0/0",
        f"compute 1.0 0/0 1@{P} 0:1 last",
    ]
    assert (d.stats().unused, d.stats().in_time, d.stats().overall.correct) == (1, 1, 1)
    assert d.stats().overall.activated == 3


def test_prefill_is_routed_by_the_gate_alone() -> None:
    d = Driver(workers=2, layers=1, experts=4, router=Says((3,)), prefill="pipelined", shadow=False)
    d.open(1, 4, decode=False)
    d.do(t.StepStarted((t.Pass(1, 0, 4, prefill=True),)))
    assert d.gate(0, at=0, chosen=((0, 1),), scores=SCORES)[0] == "load 0.0 0/0"
    assert d.core.strategy.router.asked == []


def test_a_predictor_with_attention_is_helped_by_who_is_there_already() -> None:
    """The main model needs to know whose part it may compute by itself."""
    d = Driver(workers=2, layers=2, experts=4, predictor=Attends(), shadow=False)
    d.open()
    d.predict(0, 1, 3)
    d.loaded(0)
    assert d.gate(0, 1, 3)[0] == f"route 1@{P} layer 0: as chosen, here 1"
    d.loaded(1)
    d.computed(0, 1)
    assert d.gate(1, 2)[0] == f"route 1@{P} layer 1: as chosen, here "


def test_what_is_foreseen_becomes_loads_in_the_order_to_bring_and_recall_of_all() -> None:
    """Two are predicted, one of them is there: the other, and one more, are brought."""
    visit = t.Visit(1, P, 1)
    attends = Attends(Forecast(visit, (0, 1), (3, 0)))
    d = Driver(workers=1, slots=4, group=1, layers=2, experts=4, predictor=attends, shadow=False, residency=LastUsed())
    d.open(2)
    d.gate(1, 1, request=2)
    d.loaded(0)
    d.computed(0)
    d.open()
    assert d.foresee(1, *SCORES) == ["load 0.1 1/3", "load 0.2 1/0"]
    assert attends.asked == [(visit, SCORES, {1}, False)]
    assert d.gate(1, 0, 2) == [
        f"route 1@{P} layer 1: as chosen, here ",
        f"compute 0.2 1/0 1@{P} 0:1",
        "evict 0.1 1/3",
        "load 0.1 1/2",
        f"compute 0.1 1/2 1@{P} 0:1",
    ]
    assert (d.stats().overall.correct, d.stats().overall.activated) == (1, 2)
    assert (d.stats().reloads, d.stats().unused, d.stats().in_time) == (1, 1, 1)


def test_what_is_foreseen_too_late_or_for_nobody_is_nothing() -> None:
    d = Driver(workers=1, layers=2, experts=4, shadow=False, predictor=Attends(Forecast(t.Visit(1, P, 0), (0,))))
    assert d.foresee(0, *SCORES) == []
    assert d.core.strategy.predictor.asked == []
    d.open()
    d.gate(0, 2)
    assert d.foresee(0, *SCORES) == []
    assert d.stats().late == 1
