"""From a pass's beginning to its gates, exact decisions: forecasts, their order, and what prefill loads when."""

from __future__ import annotations

from typing import Any

from scheduler import types as t
from scheduler.policies.predictors.base import Forecast, PredictorBase
from support.scheduling.core_driver import Driver, P, compute


class Tells(PredictorBase):
    """What `said` has for a visit whose gate fires, and for one that a pass begins with."""

    def __init__(self, said: dict[t.Visit, list[Forecast]], begins: list[Forecast] | None = None) -> None:
        super().__init__(t.ModelShape((0, 1, 2), 8, 2))
        self.said, self.begins = said, begins or []
        self.heard: list[Any] = []

    def on_pass_begun(self, visit: t.Visit, rows: int, prefill: bool) -> list[Forecast]:
        self.heard.append(("begun", visit, rows, prefill))
        return self.begins

    def on_gate_fired(self, visit: t.Visit, named: Any, scores: Any, prefill: bool) -> list[Forecast]:
        self.heard.append(("fired", visit, dict(named), prefill))
        return self.said.get(visit, [])

    def on_request_closed(self, request: int) -> None:
        self.heard.append(("closed", request))


def at(layer: int, position: int = P, request: int = 1) -> t.Visit:
    return t.Visit(request, position, layer)


def test_a_forecast_made_at_a_gate_comes_after_what_the_gate_itself_needs() -> None:
    tells = Tells({at(0): [Forecast(at(1), (1, 2)), Forecast(at(0, P + 1), (5,))]})
    d = Driver(workers=1, slots=6, group=1, layers=3, predictor=tells, shadow=False)
    d.open()
    assert d.gate(0, 3) == ["load 0.0 0/3", *compute("0.0 0/3"), "load 0.1 1/1"]
    assert d.loaded(0) == ["load 0.2 1/2"]
    assert d.loaded(0, slot=1) == ["load 0.3 0/5"]  # the next token's, in the same layer
    d.loaded(0, slot=2)
    d.loaded(0, slot=3)
    assert d.computed(0) == [f"resume 1@{P} layer 0"]
    assert d.gate(1, 1, 2) == compute("0.1 1/1", "0.2 1/2")
    d.do(t.RequestClosed(1))
    assert tells.heard == [
        ("begun", at(0), 1, False),
        ("fired", at(0), {3: 1}, False),
        ("fired", at(1), {1: 1, 2: 1}, False),
        ("closed", 1),
    ]
    assert d.in_slots == {}


def test_a_forecast_about_the_visit_itself_or_an_earlier_one_is_late() -> None:
    tells = Tells({at(1): [Forecast(at(1), (1, 2)), Forecast(at(0), (5,)), Forecast(at(2), (7,))]})
    d = Driver(workers=1, slots=4, group=1, layers=3, predictor=tells, shadow=False)
    d.open()
    d.gate(0, 3)
    d.loaded(0)
    d.computed(0)
    assert d.gate(1) == [f"resume 1@{P} layer 1", "load 0.0 2/7"]
    assert d.stats().late == 2


def test_a_later_forecast_replaces_an_earlier_one_and_what_both_bring_stays() -> None:
    begins = [Forecast(at(1), (1, 2), (1, 2))]
    tells = Tells({at(0): [Forecast(at(1), (2, 3), (3, 2))]}, begins)
    d = Driver(workers=1, slots=4, group=1, layers=3, predictor=tells, shadow=False)
    assert d.open() == ["load 0.0 1/1", "load 0.1 1/2"]
    d.loaded(0)
    d.loaded(0, slot=1)
    assert d.gate(0, 7) == ["evict 0.0 1/1", "load 0.0 0/7", *compute("0.0 0/7"), "load 0.2 1/3"]
    d.loaded(0)
    d.loaded(0, slot=2)
    d.computed(0)
    assert d.gate(1, 2, 3) == compute("0.1 1/2", "0.2 1/3")
    assert (d.stats().overall.recall, d.stats().unused) == (1.0, 0)


def test_predicted_and_not_brought_counts_for_recall_and_is_loaded_late() -> None:
    tells = Tells({}, [Forecast(at(0), (1, 2), ())])
    d = Driver(workers=1, slots=4, group=1, layers=3, predictor=tells, shadow=False)
    assert d.open() == []
    assert d.gate(0, 1) == ["load 0.0 0/1", *compute("0.0 0/1")]
    assert (d.stats().overall.recall, d.stats().reloads, d.stats().in_time) == (1.0, 1, 0)


def test_pipelined_prefill_loads_after_the_gate_most_rows_first_and_computes_as_loads_end() -> None:
    d = Driver(workers=1, slots=3, group=1, layers=1, experts=4, prefill="pipelined", shadow=False)
    assert d.prefill() == []
    assert d.gate(0, at=0, rows={0: 1, 1: 9, 2: 6}) == [
        "load 0.0 0/1",
        *compute("0.0 0/1", at="1@0", rows="0:9"),
        "load 0.1 0/2",
        *compute("0.1 0/2", at="1@0", rows="0:6"),
        "load 0.2 0/0",
        *compute("0.2 0/0", at="1@0", rows="0:1"),
    ]
    assert (d.stats().reloads, d.stats().loads) == (0, 3)


def test_pipelined_prefill_gives_each_expert_its_worker() -> None:
    """As prefill that loads ahead shares them out, so that what stays is found where it is."""
    d = Driver(workers=3, layers=2, experts=4, prefill="pipelined", shadow=False)
    d.prefill()
    loads = [x for x in d.gate(0, at=0, rows=dict.fromkeys(range(4), 1)) if x.startswith("load")]
    assert loads == ["load 0.0 0/0", "load 1.0 0/1", "load 2.0 0/2"]  # 0/3 is worker 0's, too


def test_pipelined_prefill_can_be_foreseen() -> None:
    """Fate: the next layer's most popular experts are loaded before its gate."""
    tells = Tells({at(0, 0): [Forecast(at(1, 0), (2, 0), (2, 0))]})
    d = Driver(workers=1, slots=4, group=1, layers=2, experts=4, prefill="pipelined", shadow=False, predictor=tells)
    d.prefill()
    assert d.gate(0, at=0, rows={1: 16}) == ["load 0.0 0/1", *compute("0.0 0/1", at="1@0", rows="0:16"), "load 0.1 1/2"]
    assert d.loaded(0) == ["load 0.2 1/0"]
    d.computed(0)
    d.loaded(0, slot=1)
    assert d.gate(1, at=0, rows={2: 9, 3: 7}) == [
        "evict 0.2 1/0",
        *compute("0.1 1/2", at="1@0", rows="0:9"),
        "load 0.0 1/3",
        *compute("0.0 1/3", at="1@0", rows="0:7"),
    ]
    assert (d.stats().unused, d.stats().overall.activated) == (1, 0)  # recall is decoding's


def test_in_decoding_whom_the_gate_likes_best_is_loaded_first() -> None:
    d = Driver(workers=1, slots=4, group=1, layers=1, experts=4, prefill="pipelined", shadow=False)
    d.open()
    out = d.gate(0, chosen=((3, 1),), scores=((0.1, 0.3, 0.0, 0.6),))
    assert [x for x in out if x.startswith("load")] == ["load 0.0 0/3", "load 0.1 0/1"]
