"""Plans of random worlds as Hypothesis draws them: any cluster, model, choices and faults."""

from __future__ import annotations

from hypothesis import strategies as st

from support.worlds.plan import BLIP, FAULTS, POLICIES, PREDICTORS, PREFILLS, Plan

ANY_FAULT = st.tuples(st.integers(0, 400), st.sampled_from((*FAULTS, BLIP)), st.integers(0, 11))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    experts = draw(st.integers(1, 8))
    return Plan(
        seed=draw(st.integers(0, 10_000)),
        slots=(draw(st.integers(1, 3)), *draw(st.lists(st.integers(0, 3), max_size=11))),
        group=draw(st.integers(1, 4)),
        layers=draw(st.integers(1, 6)),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        mini_batch=draw(st.sampled_from([1, 2, 4, 128])),
        periods=(draw(st.integers(0, 3)), draw(st.integers(0, 3))),
        requests=draw(st.sampled_from([1, 1, 2, 3, 3, 8])),
        prompt=draw(st.integers(1, 9)),
        answer=draw(st.integers(1, 5)),
        main=draw(st.integers(0, 30)),
        load=draw(st.integers(0, 60)),
        compute=draw(st.integers(0, 20)),
        latency=draw(st.integers(0, 10)),
        shadow=draw(st.booleans()),
        predict=draw(st.integers(0, 60)),
        accuracy=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        failing=draw(st.sampled_from([0.0, 0.0, 0.03, 0.3])),
        faults=tuple(draw(st.lists(ANY_FAULT, max_size=6))),
        policy=draw(st.sampled_from(["none", *POLICIES])),
        predictor=draw(st.sampled_from(PREDICTORS)),
        prefill=draw(st.sampled_from(PREFILLS)),
        router=draw(st.booleans()),
        placement=draw(st.booleans()),
        forms=draw(st.sampled_from([False, False, False, True])),
        chunk=draw(st.integers(0, 4)),
        block=draw(st.integers(1, 4)),
        pausing=draw(st.sampled_from([0.0, 0.0, 0.3])),
        arrive=draw(st.sampled_from([0, 20, 100])),
        returning=draw(st.sampled_from([0.0, 0.5, 1.0])),
        patience=draw(st.sampled_from([0, 30, 60, 200])),
        auditing=draw(st.sampled_from([0.0, 0.0, 0.05, 0.3])),
    )
