"""A strategy's five objects, and what follows from them for all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from scheduler.policies.baselines.hobbit import Mixed
from scheduler.policies.precision import Full, Uniform
from scheduler.policies.predictors.base import RandomPredictor
from scheduler.policies.residency.base import Everything, NoCache, ResidencyBase
from scheduler.policies.routers import ExpertCache, TopK
from scheduler.policies.strategy import Strategy, od_moe

SHAPE = t.ModelShape((0, 1), 4, 2)


class Scored(ResidencyBase):
    wants_scores = True


def test_od_moe_is_exact_and_keeps_nobody() -> None:
    strategy = od_moe(SHAPE)
    assert (strategy.exact, strategy.wants_scores, strategy.predicts) == (True, False, False)
    assert isinstance(strategy.residency, NoCache)
    assert isinstance(Core(SHAPE, RoundRobin(2), Alignment()).strategy.residency, NoCache)


@pytest.mark.parametrize(
    ("change", "exact", "scores"),
    [
        ({"router": ExpertCache(0.3)}, False, True),
        ({"router": ExpertCache(0.0)}, True, True),
        ({"precision": Uniform("int4")}, False, False),
        ({"precision": Mixed()}, False, True),
        ({"residency": Scored()}, True, True),
        ({"residency": Everything(), "router": TopK(), "precision": Full()}, True, False),
        ({"predictor": RandomPredictor(SHAPE), "predicts": True}, True, False),
    ],
)
def test_one_part_is_enough_to_want_scores_or_to_be_approximate(
    change: dict[str, object], exact: bool, scores: bool
) -> None:
    strategy: Strategy = replace(od_moe(SHAPE), **change)  # type: ignore[arg-type]
    assert (strategy.exact, strategy.wants_scores) == (exact, scores)
