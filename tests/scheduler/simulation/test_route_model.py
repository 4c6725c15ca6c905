"""Route models: probabilities beside those enumerated by hand, and caches that they tell apart."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from scheduler.errors import ConfigError
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.route_model import LIKE_TEXT, ROUTE_MODELS, UNIFORM, RouteModel, find_route_model
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.workload import KEPT, RandomWorkload
from scheduler.timing.profile import find_profile


def enumerated(weights: list[float], count: int) -> dict[tuple[int, ...], float]:
    """The probability of each sequence of draws without replacement."""
    found = {}
    for order in itertools.permutations(range(len(weights)), count):
        left, chance = sum(weights), 1.0
        for one in order:
            chance *= weights[one] / left
            left -= weights[one]
        found[order] = chance
    return found


def test_experts_are_drawn_by_their_weights() -> None:
    model, weights, draws = RouteModel(1.0, 3.0), [4.0, 1.0, 2.0, 1.0], 40_000
    draw = random.Random(5).random
    found = Counter(model.choose(draw, weights, 2, before=(1,)) for _ in range(draws))
    wanted = enumerated([4.0, 3.0, 2.0, 1.0], 2)
    assert set(found) == set(wanted)
    for order, chance in wanted.items():
        assert found[order] / draws == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / draws))


def test_weights_fall_by_the_same_factor_and_ranks_are_those_of_the_seed() -> None:
    weights = RouteModel(2.0).weights(8, "layer 1")
    assert sorted(weights, reverse=True) == pytest.approx([math.exp(-2 * rank / 8) for rank in range(8)])
    assert weights == RouteModel(2.0).weights(8, "layer 1") != RouteModel(2.0).weights(8, "layer 2")
    assert UNIFORM.weights(4, "any") == [1.0] * 4


def test_a_workload_is_the_same_however_it_is_read() -> None:
    def made() -> RandomWorkload:
        return RandomWorkload((2, 8, 2), 0.9, 3, model=RouteModel(2.0, 2.0))

    forward = [made_one.routes(at, 1) for made_one in [made()] for at in range(KEPT + 5)]
    late = made()
    assert late.routes(KEPT + 4, 1) == forward[-1]
    assert late.routes(0, 1) == forward[0], "long after it was dropped"
    assert late.routes(KEPT + 4, 1) == forward[-1]


def test_requests_share_what_is_popular() -> None:
    scenario = Scenario(find_profile("rtx3090-pcie3"), requests=2, route_model=RouteModel(400.0))
    first, second = (one.workload for one in random_arrivals(scenario))
    assert [first.routes(at, 0) for at in range(8)] == [second.routes(at, 0) for at in range(8)]
    assert first.routes(0, 0) != first.routes(0, 1)


@pytest.mark.parametrize(("skew", "repeat"), [(-1, 1), (math.nan, 1), (math.inf, 1), (1, 0), (1, math.inf)])
def test_impossible_models_are_refused(skew: float, repeat: float) -> None:
    with pytest.raises(ConfigError, match="a route model has skew"):
        RouteModel(skew, repeat)


def test_a_misspelt_one_is_named() -> None:
    with pytest.raises(ConfigError, match="no route model 'deepmoe'; did you mean deep-moe"):
        find_route_model("deepmoe")


def test_only_the_uniform_one_is_memoryless() -> None:
    assert [name for name, model in ROUTE_MODELS.items() if model.memoryless] == ["uniform"]
    assert not ROUTE_MODELS[LIKE_TEXT].memoryless
