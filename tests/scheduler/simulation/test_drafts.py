"""A simulated shadow that drafts: what blocks gain, what text that drafts badly loses, and that none is as before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler import types as t
from scheduler.alignment import LATE
from scheduler.core.machine import Core
from scheduler.errors import ConfigError
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.own_tokens import OwnTokens
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import Outcome, simulate_requests
from scheduler.simulation.workload import random_workload
from scheduler.timing.profile import find_profile

PAPER = find_profile("rtx3090-1gbe")
SMALL = replace(PAPER, layers=4)


def drawn(draft: int | str, acceptance: float, **given: object) -> Outcome:
    scenario = Scenario(given.pop("profile", SMALL), draft=draft, **given)  # type: ignore[arg-type]
    return simulate_requests(scenario, random_arrivals(scenario, 0.97, same_token=acceptance))


def accepted(outcome: Outcome) -> float:
    blocks, rows, gained = outcome.drafted
    return (gained - blocks) / (rows - blocks)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("requests", [1, 3])
def test_right_drafts_are_all_accepted(late: bool, requests: int) -> None:
    system = SystemConfig(departure=LATE) if late else SystemConfig()
    outcome = drawn(3, 1.0, tokens=40, requests=requests, system=system)
    assert [len(answer.ends_s) for answer in outcome.answers] == [40] * requests
    assert accepted(outcome) == 1
    assert outcome.steps < outcome.decoded_tokens / requests / 2


def test_wrong_drafts_gain_nothing() -> None:
    outcome = drawn(3, 0.0, tokens=40)
    blocks, _, gained = outcome.drafted
    assert blocks == gained == outcome.steps == 39


@pytest.mark.slow
def test_the_share_of_accepted_drafts_follows_the_acceptance() -> None:
    """A block's drafts after a wrong one are wrong too."""
    assert accepted(drawn(1, 0.6, tokens=200)) == pytest.approx(0.6, abs=0.1)
    assert accepted(drawn(7, 0.6, tokens=200)) < 0.5


@pytest.mark.parametrize("requests", [1, 3])
def test_no_more_is_verified_than_is_asked_for(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, before = [], Core.handle

    def handle(self: Core, event: t.Event, now: float) -> list[t.Command]:
        if isinstance(event, t.StepStarted):
            rows.extend(one.tokens for one in event.passes if not one.prefill)
        return before(self, event, now)

    monkeypatch.setattr(Core, "handle", handle)
    drawn(4, 0.9, tokens=50, requests=requests)
    assert max(rows) == 5


@pytest.mark.slow
@pytest.mark.parametrize("requests", [1, 4])
def test_text_that_drafts_badly_is_hardly_slower_than_without_drafts(requests: int) -> None:
    without, auto = (drawn(draft, 0.1, tokens=300, requests=requests) for draft in (0, "auto"))
    assert auto.decode_tokens_per_s >= 0.98 * without.decode_tokens_per_s


def test_good_drafts_are_twice_as_fast_on_the_papers_testbed() -> None:
    without, auto = (drawn(draft, 0.98, tokens=80, profile=PAPER) for draft in (0, "auto"))
    assert auto.decode_tokens_per_s >= 2 * without.decode_tokens_per_s


def test_a_block_that_follows_a_single_row_is_as_fast_as_one_that_follows_a_block() -> None:
    """What was predicted row by row is spread over all workers when the block begins."""
    outcome = drawn(7, 1.0, tokens=40, profile=PAPER)
    steps = sorted({round(gap, 3) for gap in outcome.gaps_s if gap > 0})
    union_s = PAPER.layers * PAPER.experts * PAPER.load_s / PAPER.workers
    assert steps[-1] < 1.25 * union_s


def test_the_shadow_sends_no_drafts_unless_they_are_asked_for() -> None:
    outcome = drawn(0, 0.9, tokens=20)
    assert outcome.drafted == (0, 0, 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"draft": 64}, "--draft is 64"),
        ({"draft": 2, "system": SystemConfig(predictor="none")}, "drafts come from a shadow"),
        ({"draft": 2, "block": 2}, "give one of the two"),
    ],
)
def test_bad_drafts_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Scenario(SMALL, **given)  # type: ignore[arg-type]


# --- the shadow's own tokens ------------------------------------------------------------------------------------------


def test_own_tokens_stay_others_until_the_main_models_comes() -> None:
    of = OwnTokens(random_workload(Scenario(SMALL), 0.97, same_token=0.0), first=0)
    of.on_told(range(1))
    assert [of.right(step) for step in range(3)] == [True, False, False]
    wrong = of.draft(0)
    assert wrong is not None
    assert of.draft(0) is None
    of.back(1)
    of.on_told(range(1, 2))
    assert [of.right(1), of.right(2)] == [True, False]
    again = of.draft(1)
    assert again is not None
    assert again[1] != wrong[1]
