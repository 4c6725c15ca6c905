"""What is switched off is there, and comes back; and how a cost is counted."""

from __future__ import annotations

import pytest

from scripts.measure.checks import ALL, CHECKS, NONE, Round, _found, costs, known, median_bounds, switched_off


def test_this_version_has_every_check() -> None:
    assert known() == CHECKS


def test_a_check_that_is_switched_off_comes_back() -> None:
    functions = [function for of in CHECKS.values() for function in of]
    before = [_found(module, name)[2] for module, name, _ in functions]
    with switched_off(functions):
        assert [_found(module, name)[2] for module, name, _ in functions] == [other for *_, other in functions]
    assert [_found(module, name)[2] for module, name, _ in functions] == before


def test_a_cost_is_the_median_of_the_rounds_ratios() -> None:
    rounds = [Round({ALL: both, NONE: 1.0}, {ALL: 2 * both, NONE: 1.0}) for both in (1.1, 1.5, 1.2)]
    found = costs(rounds, NONE, tokens=12)
    assert found["rate"] == pytest.approx(10)
    assert (found["cost"], found["low"], found["high"]) == pytest.approx((0.2, 0.1, 0.5))
    assert found["cpu"] == pytest.approx(1.4)


def test_bounds_of_a_median() -> None:
    """0.98 times the square root of 100 to both sides of place 49.5."""
    assert median_bounds([float(n) for n in range(100)]) == (39.0, 60.0)
