"""The nodes' own code in simulated worlds: every seed's promises hold, and a seed replays itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from main_node.engine.deadlines import Deadlines
from odmoe.settings.settings import Settings
from support.simulated.baton import Violation
from support.simulated.defects import DEFECTS, planted
from support.simulated.hosts import Host
from support.simulated.plan import FAULTS, Fault, draw
from support.simulated.referee import BOUND_S
from support.simulated.run import Stage
from support.simulated.world import ANSWER_S, WORKER_S


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_what_is_promised_holds_whatever_fails(stage: Stage, first: int) -> None:
    """`test_more_worlds.py` plays the next hundred, `make world` any number."""
    for seed in range(first, first + 20):
        stage.play(seed)


def test_a_seed_is_played_the_same_way_each_time(stage: Stage) -> None:
    for seed in (3, 58, 111):
        first, second = stage.play(seed), stage.play(seed)
        assert first == second
        assert first.switches > 100


def test_seeds_differ_and_faults_of_every_kind_are_drawn() -> None:
    plans = [draw(seed) for seed in range(1000)]
    assert len({str(plan) for plan in plans}) == 1000
    assert {fault.kind for plan in plans for fault in plan.faults} == set(FAULTS)
    assert sum(not plan.faults for plan in plans) > 50


def test_flaps_end_with_the_healing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    kills: list[float] = []
    kill = Host.kill

    def note(host: Host) -> None:
        kills.append(host.baton.now)
        kill(host)

    monkeypatch.setattr(Host, "kill", note)
    flaps = Fault(at_s=0.01, kind="flaps", host=0, for_s=8.0, count=50)
    played = stage.play_plan(replace(draw(49), faults=(flaps,), heals_s=1.0))
    assert len(kills) > 1
    assert max(kills) < min(kills) + 1.5 < 1000.0 + played.seconds - 1.0, "requests outlast the healing"


def test_the_bound_is_that_of_the_nodes() -> None:
    deadlines = object.__new__(Deadlines)
    deadlines.worker_wait_s, deadlines.answer_s = WORKER_S, ANSWER_S
    assert deadlines.stall_s < BOUND_S < deadlines.stall_s + 4
    assert Settings(model="x").worker_wait == 60


FOUND_SOON = {
    "A1: a call that kills its worker never ends": 42,
    "A4: enormous outputs are taken": 5,
    "A5: a worker that never answers is waited for": 0,
    "C5: an error without its cause": 37,
    "damaged loads are computed with": 6,
    "a short read is taken for a whole one": 9,
    "a cancelled load keeps its slot": 0,
    "a message overtakes those that wait": 9,
    "two locks are taken in either order": 3,
    "messages of one bundle are turned round": 0,
    "an idle stream does not beat": 4,
    "nobody is told of a free place": 36,
    "a cancelled request is not forgotten": 0,
    "a late or repeated answer is an error": 30,
    "prompts are kept by their lengths": 5,
    "a lost worker's debts are not forgiven": 0,
    "a dropped pass is not ended": 0,
}
"""A defect, and a seed that finds it."""


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_that_is_put_back_is_found_and_replayed(stage: Stage, defect: str) -> None:
    told = []
    for _ in range(2):
        with planted(defect), pytest.raises(Violation) as violation:
            stage.play(FOUND_SOON[defect])
        told.append((str(violation.value), violation.value.trace))
    assert told[0] == told[1]
    stage.play(FOUND_SOON[defect])
