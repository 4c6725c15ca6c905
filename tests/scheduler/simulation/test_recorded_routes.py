"""Recordings with blocks: what each token's pass needed, which drafts were right, and the same times once more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler import types as t
from scheduler.alignment import LATE
from scheduler.build import make_core
from scheduler.eventlog.recording import Recording
from scheduler.eventlog.replay import replay
from scheduler.policies.system_config import CoreConfig, SystemConfig
from scheduler.simulation.recorded_routes import RecordedWorkload, recorded_groups, recorded_workloads
from scheduler.simulation.requests import Arrival, random_arrivals
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import Outcome, simulate_requests
from scheduler.simulation.world import World
from scheduler.timing.profile import find_profile

SMALL = replace(find_profile("rtx3090-1gbe"), layers=4)
LATELY = SystemConfig(departure=LATE)
LAYERS = (0, 1)
PROMPT = 5


def recorded(scenario: Scenario, acceptance: float) -> tuple[Recording, Outcome]:
    """A simulated run, and its recording."""
    core = make_core(scenario.core_config)
    recording = Recording({}, scenario.core_config, [], [])
    decide = core.handle

    def handle(event: t.Event, now: float) -> list[t.Command]:
        commands = decide(event, now)
        recording.events.append((now, event))
        recording.commands.append(list(commands))
        return commands

    core.handle = handle  # type: ignore[method-assign]
    arrivals = random_arrivals(scenario, 0.97, same_token=acceptance)
    world = World(core, scenario, arrivals)
    world.start()
    assert world.run(scenario.requests * scenario.tokens)
    world.drain()
    return recording, simulate_requests(scenario, arrivals)


def again(scenario: Scenario, group: list[RecordedWorkload]) -> Outcome:
    arrivals = [Arrival(one, one.prompt_tokens, one.tokens, step=one.step) for one in group]
    return simulate_requests(scenario, arrivals)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "acceptance", "said"),
    [
        (SystemConfig(), 1.0, {}),
        (LATELY, 0.5, {}),
        (SystemConfig(), 0.5, {"requests": 3}),
        (LATELY, 0.9, {"requests": 3}),
        (SystemConfig(), 0.9, {"requests": 3, "batch_dense": True}),
        (LATELY, 0.0, {"requests": 3, "batch_dense": True}),
    ],
)
def test_recorded_drafts_simulate_to_the_same_times(
    system: SystemConfig, acceptance: float, said: dict[str, Any]
) -> None:
    """The simulator's own recording, of blocks and refused rows."""
    scenario = Scenario(SMALL, tokens=40, draft=3, system=system, **said)
    recording, outcome = recorded(scenario, acceptance)
    assert replay(recording).difference is None
    [group] = recorded_groups(recorded_workloads(recording))
    once_more = again(scenario, group)
    assert [one.ends_s for one in once_more.answers] == [one.ends_s for one in outcome.answers]
    assert (once_more.drafted, once_more.where) == (outcome.drafted, outcome.where)


@pytest.mark.parametrize(("system", "acceptance"), [(SystemConfig(), 1.0), (LATELY, 0.8)])
def test_lengths_that_were_chosen_live_are_chosen_again(system: SystemConfig, acceptance: float) -> None:
    scenario = Scenario(SMALL, tokens=40, draft="auto", system=system)
    recording, outcome = recorded(scenario, acceptance)
    once_more = again(scenario, recorded_workloads(recording))
    assert (once_more.drafted, once_more.token_s) == (outcome.drafted, outcome.token_s)


def test_acceptance_that_is_recorded_is_that_of_the_run() -> None:
    recording, _ = recorded(Scenario(SMALL, tokens=250, draft=2), 0.7)
    [one] = recorded_workloads(recording)
    assert one.accepted_share == pytest.approx(0.7, abs=0.06)


def test_a_block_length_that_was_not_recorded_is_simulated() -> None:
    """Rows after a wrong draft that no block had read need something all the same."""
    recording, _ = recorded(Scenario(SMALL, tokens=60, draft=1), 0.7)
    workloads = recorded_workloads(recording)
    longer = again(Scenario(SMALL, tokens=60, draft=7), workloads)
    blocks, rows, gained = longer.drafted
    assert gained == 59
    assert rows > blocks + 59 * 0.7


# --- by hand ----------------------------------------------------------------------------------------------------------


def passes(position: int, rows: list[tuple[int, ...]], now: float) -> list[tuple[float, t.Event, list[t.Command]]]:
    """A pass of these rows, whose experts are the same in each layer."""
    found: list[tuple[float, t.Event, list[t.Command]]] = [
        (now, t.StepStarted((t.Pass(1, position, len(rows), position < PROMPT),)), [])
    ]
    experts = sorted({expert for row in rows for expert in row})
    for layer in LAYERS:
        visit = t.Visit(1, position, layer)
        fired = tuple((expert, sum(expert in row for row in rows)) for expert in experts)
        found.append((now, t.GateFired(visit, fired, tuple(rows) if len(rows) > 1 and position else ()), []))
        found.append((now + 0.5, t.ComputeEnded(0), [t.Resume(visit)]))
    return found


def predicted(index: int, experts: tuple[int, ...], now: float) -> list[tuple[float, t.Event, list[t.Command]]]:
    return [(now, t.Predicted(1, PROMPT + index, layer, experts), []) for layer in LAYERS]


def decoded(index: int, now: float, foretold: bool | None = None) -> list[tuple[float, t.Event, list[t.Command]]]:
    return [(now, t.TokenDecoded(1, index, 7, foretold), [])]


def of(*parts: list[tuple[float, t.Event, list[t.Command]]], **about: str) -> RecordedWorkload:
    facts = [(0.0, t.RequestOpened(1, PROMPT), []), *passes(0, [(0, 1)] * PROMPT, 1.0), *decoded(0, 2.0)]
    facts += [fact for part in parts for fact in part]
    facts.sort(key=lambda fact: fact[0])
    config = CoreConfig(t.ModelShape(LAYERS, 8, 2), 2)
    recording = Recording(about, config, [(now, event) for now, event, _ in facts], [said for _, _, said in facts])
    [one] = recorded_workloads(recording)
    return one


BLOCK = (
    predicted(0, (0, 1), 2.5),
    predicted(1, (1, 2), 2.6),
    predicted(2, (6, 7), 2.7),  # from the wrong draft
    predicted(3, (5, 6), 2.8),
    passes(PROMPT, [(0, 1), (1, 2), (7, 6), (6, 5)], 3.0),  # the second draft is wrong
    decoded(2, 4.0, foretold=False),
    predicted(2, (2, 3), 4.5),
    predicted(3, (3, 5), 4.6),
    passes(PROMPT + 2, [(2, 3)], 5.0),
    decoded(3, 6.0, foretold=True),
    predicted(3, (3, 4), 6.5),
    passes(PROMPT + 3, [(3, 4), (4, 5)], 7.0),
)


def test_passes_are_counted_by_token() -> None:
    one = of(*BLOCK, [(9.0, t.RequestClosed(1, 6), [])])
    assert (one.tokens, one.prompt_tokens) == (6, PROMPT)
    assert [one.routes(index, 1) for index in range(5)] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert one.decode_s == pytest.approx(7.5 - 3.0)


def test_drafts_are_right_or_wrong_as_they_were() -> None:
    one = of(*BLOCK)
    assert one.drafts == {1: True, 2: False, 3: True, 4: True}
    assert [one.same_token(index) for index in (1, 2, 3, 4)] == [True, False, True, True]
    assert one.accepted_share == 0.75


def test_rows_after_a_wrong_draft_need_what_they_needed() -> None:
    """And are predicted as they were; a row that was read again has its last prediction."""
    one = of(*BLOCK)
    assert (one.misled_routes(2, 0), one.misled_routes(3, 0)) == ((7, 6), (6, 5))
    assert (one.ahead(2, 0, False), one.ahead(3, 0, False)) == ((6, 7), (5, 6))
    assert [one.predict(index, 0) for index in range(5)] == [(0, 1), (1, 2), (2, 3), (3, 4), None]
    assert [one.ahead(index, 0, True) for index in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 5)]


def test_a_row_that_was_never_misled_takes_what_another_pass_needed() -> None:
    one = of(*BLOCK)
    others = [one.misled_routes(0, layer) for layer in LAYERS]
    assert others[0] == others[1]
    assert others[0] in [one.routes(index, 0) for index in range(1, 5)]
    assert one.ahead(0, 0, False) == others[0]


def test_the_last_block_ends_with_the_answer() -> None:
    """Its last token was found in the middle: the rows after it gave nothing."""
    one = of(*BLOCK, [(9.0, t.RequestClosed(1, 5), []), (9.1, t.RequestClosed(1), [])])
    assert one.tokens == 5
    assert 4 not in one.drafts


def test_a_block_without_its_rows_is_left_out() -> None:
    broken = [
        (now, replace(event, chosen=event.chosen[:1]) if isinstance(event, t.GateFired) else event, said)
        for now, event, said in BLOCK[4]
    ]
    assert of(*BLOCK[:4], broken).tokens == 1


def test_without_drafts_another_token_shows_in_predictions_only() -> None:
    one = of(passes(PROMPT, [(0, 1)], 3.0), decoded(1, 4.0), passes(PROMPT + 1, [(1, 2)], 5.0))
    assert (one.drafts, one.accepted_share) == ({}, None)
    assert all(one.same_token(index) for index in range(9))


def test_drafts_that_nobody_told_are_right_as_often_as_the_others() -> None:
    one = of(*BLOCK)
    one.drafts = dict.fromkeys(range(3), True) | {3: False}
    assert sum(one.same_token(index) for index in range(10, 2010)) / 2000 == pytest.approx(0.75, abs=0.05)
    one.likely = 0.0
    assert not any(one.same_token(index) for index in range(10, 50))


def test_acceptance_that_is_given_takes_the_place_of_recorded_drafts() -> None:
    one = of(*BLOCK)
    one.acceptance = 0.0
    assert not any(one.same_token(index) for index in range(9))
    one.acceptance = 1.0
    assert all(one.same_token(index) for index in range(9))


def test_recall_that_is_given_is_that_of_misled_passes_too() -> None:
    one = of(*BLOCK)
    one.recall = 1.0
    assert (one.predict(2, 0), one.ahead(2, 0, False)) == ((2, 3), (7, 6))


def test_drafts_from_the_prompt_say_nothing_about_a_shadows() -> None:
    assert of(*BLOCK, draft_from="prompt").accepted_share is None
