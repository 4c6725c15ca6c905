"""How long a layer takes without its stalls, as the core tells a predictor: by hand."""

from __future__ import annotations

from scheduler import types as t
from scheduler.core.tempo import Tempo
from scheduler.policies.predictors.base import Silent
from support.scheduling.core_driver import Driver, P


def test_a_layer_is_from_gate_to_gate_without_the_stall_between() -> None:
    tempo = Tempo()
    assert tempo.layer_s == 0.0
    tempo.begin()
    tempo.gate(10.0, 0.0)
    assert tempo.layer_s == 0.0
    tempo.gate(14.0, 3.0)  # four seconds, three of them waited for
    assert tempo.layer_s == 1.0
    tempo.gate(17.0, 3.0)
    assert tempo.layer_s == 2.0
    tempo.begin()  # what is between passes is no layer
    tempo.gate(100.0, 5.0)
    assert tempo.layer_s == 2.0
    tempo.gate(105.0, 5.0)
    assert tempo.layer_s == 3.0


class Paced(Silent):
    def __init__(self) -> None:
        super().__init__(t.ModelShape((0, 1), 4, 2))
        self.told: list[tuple[float, float]] = []

    def paced(self, load_s: float, layer_s: float) -> None:
        self.told.append((load_s, layer_s))


def through(d: Driver, index: int, begins: float) -> None:
    """Two layers; each expert's load takes 5 s after its gate, its computation 1 s, attention 2 s."""
    d.now = begins
    d.token(index)
    for layer in range(2):
        d.now += 2
        d.gate(layer, layer, at=P + index)
        d.now += 5
        d.loaded(0)
        d.now += 1
        d.computed(0)


def test_a_predictor_is_told_at_each_pass_once_both_are_known() -> None:
    predictor = Paced()
    d = Driver(mixed=(), workers=1, layers=2, experts=4, group=1, shadow=False, predictor=predictor)
    d.do(t.WorkerLost(0, "to come again, as one that says how fast it loads"))
    d.do(t.WorkerJoined(0, 1, 0.5))
    d.do(t.RequestOpened(1, P))
    through(d, 0, 100.0)
    assert predictor.told == []
    through(d, 1, 200.0)
    assert predictor.told == [(0.5, 3.0)]  # 2 s attention and 1 s expert


def test_nothing_is_told_where_no_worker_says_how_fast_it_loads() -> None:
    predictor = Paced()
    d = Driver(workers=1, layers=2, experts=4, group=1, shadow=False, predictor=predictor)
    d.do(t.RequestOpened(1, P))
    through(d, 0, 100.0)
    through(d, 1, 200.0)
    assert predictor.told == []


def test_prefill_is_not_measured() -> None:
    predictor = Paced()
    d = Driver(workers=1, layers=2, experts=4, group=1, shadow=False, predictor=predictor, prefill="pipelined")
    d.do(t.WorkerJoined(1, 1, 0.5))
    d.do(t.RequestOpened(1, 4))
    d.do(t.StepStarted((t.Pass(1, 0, 4, prefill=True),)))
    for layer in range(2):
        d.gate(layer, 0, at=0)
        worker = next(place[0] for place, calls in d.calls.items() if calls)
        d.loaded(worker)
        d.computed(worker)
        d.now += 50
    d.token(0, prompt=4)
    assert predictor.told == []
