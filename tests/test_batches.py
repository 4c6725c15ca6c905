"""Three requests at once, as in importance's main figure: its sets and batch sizes span the rows of all of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scheduler import types as t
from scheduler.eventlog.recording import Recording, read_recording
from scheduler.eventlog.replay import replay
from scheduler.files import write_whole
from scheduler.policies.placement import Balance, Costs
from scheduler.policies.residency.scores import WINDOW
from scheduler.policies.routers import ExpertCache
from scheduler.simulation.recorded_forms import recorded_profile
from scheduler.simulation.recorded_routes import recorded_groups, recorded_workloads
from scheduler.simulation.requests import Arrival
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import simulate_requests
from scheduler.timing.profile import find_profile
from support.cases import slow_except
from support.nodes.exact import WHOLE, answers_together, check_together

PROFILE, ALPHA, TOKENS = "rtx3090-pcie3", 0.6, 12
Rows = Sequence[Sequence[int]]


class Routing(NamedTuple):
    """What the router was asked, and what it said."""

    chosen: Rows
    scores: Sequence[Sequence[float]]
    resident: frozenset[int]
    routed: Rows


class Heard:
    """Every decision of the router and of the balancer in decoding."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.routings: list[Routing] = []
        self.placements: list[tuple[dict[int, int], Costs, set[int]]] = []
        route, host = ExpertCache.route, Balance.host

        def routed(router: Any, chosen: Any, scores: Any, resident: Any) -> Any:
            found = route(router, chosen, scores, resident)
            self.routings.append(Routing(chosen, scores, frozenset(resident), found))
            return found

        def hosted(balance: Any, missing: Any, resident: Any, costs: Costs, prefill: bool) -> Any:
            found = host(balance, missing, resident, costs, prefill)
            if not prefill:
                self.placements.append((dict(missing), costs, set(found)))
            return found

        monkeypatch.setattr(ExpertCache, "route", routed)
        monkeypatch.setattr(Balance, "host", hosted)


# --- the paper's words, once more -------------------------------------------------------------------------------------


def beta_of(chosen: Sequence[int], scores: Sequence[float]) -> float:
    return max(score for expert, score in enumerate(scores) if expert not in chosen)


def algorithm_1(asked: Routing, shared: bool = True, batch_aware: bool = True) -> list[set[int]]:
    """The experts of each row. `shared`: the top-score experts of all rows are the set C, not only a row's own.
    `batch_aware`: with the replacements of 5.4."""
    rows = list(zip(asked.chosen, asked.scores, strict=True))
    top = [{e for e in chosen if s[e] > (1 + ALPHA) * beta_of(chosen, s)} for chosen, s in rows]
    near = [
        [e for e in range(len(s)) if e not in chosen and s[e] >= (1 - ALPHA) * beta_of(chosen, s)] for chosen, s in rows
    ]
    found: list[set[int]] = []
    there = [asked.resident | (set().union(*top) if shared else top[row]) for row in range(len(rows))]
    for row, (chosen, s) in enumerate(rows):
        absent = sorted({*chosen} - top[row] - there[row], key=lambda e: s[e])
        instead = sorted(there[row].intersection(near[row]), key=lambda e: -s[e])[: len(absent)]
        found.append({*chosen}.difference(absent[: len(instead)]).union(instead))
    if batch_aware and len(rows) > 1:
        for row, (chosen, s) in enumerate(rows):
            needed = Counter(e for experts in found for e in experts)
            left = [e for e in found[row] if e in chosen and e not in top[row] and e not in there[row]]
            for low in sorted(left, key=lambda e: (needed[e], s[e])):
                others = [e for e in near[row] if e not in found[row]]
                if others:
                    other = max(others, key=lambda e: (needed[e], s[e]))
                    if needed[other] + 1 > needed[low]:
                        found[row] = found[row] - {low} | {other}
                        needed.update({other: 1, low: -1})
    return found


def ends_after(batch: dict[int, int], hosted: Collection[int], costs: Costs) -> float:
    loads = costs.load_s * (len(batch) - len(hosted))
    return max(loads, sum(costs.host_call_s + batch[e] * costs.host_row_s for e in hosted))


def check(heard: Heard) -> None:
    """Decisions over three rows are the paper's; and they are not those that each row alone would have had."""
    three = [asked for asked in heard.routings if len(asked.chosen) == 3]
    for asked in heard.routings:
        assert [set(row) for row in asked.routed] == algorithm_1(asked)
    assert len(three) > 4 * TOKENS
    assert any(algorithm_1(asked) != algorithm_1(asked, shared=False) for asked in three)
    assert any(algorithm_1(asked) != algorithm_1(asked, batch_aware=False) for asked in three)
    for batch, costs, hosted in heard.placements:
        every = itertools.chain.from_iterable(itertools.combinations(batch, n) for n in range(len(batch) + 1))
        best = min(ends_after(batch, some, costs) for some in every)
        assert hosted <= batch.keys()
        assert ends_after(batch, hosted, costs) == pytest.approx(best, rel=1e-9)
    assert any(len({*batch.values()}) > 1 for batch, _, _ in heard.placements), "all batch sizes were alike"
    assert any(hosted and max(batch.values()) > 1 for batch, _, hosted in heard.placements)


# --- the engine, and the simulator ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_importance_decides_over_the_rows_of_three_requests(
    embedded: Any, reference: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heard = Heard(monkeypatch)
    log = tmp_path / "log"
    cluster = embedded(system="importance", alpha=ALPHA, device_memory="15%", profile=PROFILE, record=str(log), **WHOLE)
    prompts = [reference("float32", number, 2).prompt for number in (0, 4, 8)]
    got = answers_together(cluster.main, prompts, [TOKENS] * 3)
    check(heard)
    assert all(one.report.requests_per_step > 2 and one.report.recall > 0.5 for one in got)
    write_whole(log, cluster.recording())
    recording = read_recording(log)
    check_recorded(recording, heard)
    check_window(recording, cluster.main.engine.core.strategy.residency.value)
    engine = len(heard.routings)
    assert replay(recording).difference is None
    del heard.routings[:], heard.placements[:]
    simulate_again(recording)
    assert len(heard.routings) > engine / 2
    check(heard)


def check_recorded(recording: Recording, heard: Heard) -> None:
    """What the router said reached the main model, and what a later gate is expected to say came for each request."""
    told = {command.experts for commands in recording.commands for command in commands if isinstance(command, t.Route)}
    for asked in heard.routings:
        for chosen, routed in zip(asked.chosen, asked.routed, strict=True):
            assert tuple(chosen) == tuple(routed) or (tuple(routed),) in told
    foreseen = Counter(event.request for _, event in recording.events if isinstance(event, t.Foreseen))
    assert len(foreseen) == 3
    assert min(foreseen.values()) > TOKENS


def check_window(recording: Recording, values: dict[int, Sequence[float]]) -> None:
    """An expert's value is the mean of its shares over the last gates of its layer, whichever request's."""
    seen: dict[int, list[tuple[int, int, list[float]]]] = {layer: [] for layer in values}
    order: list[int] = []
    steps = 0
    for _, event in recording.events:
        if isinstance(event, t.StepStarted):
            order, steps = [one.request for one in event.passes], steps + 1
        elif isinstance(event, t.GateFired):
            shares = [[score / sum(row) for score in row] for row in event.scores]
            mean = [sum(column) / len(shares) for column in zip(*shares, strict=True)]
            seen[event.visit.layer].append((steps, order.index(event.visit.request), mean))
    for layer, of in seen.items():
        assert len(of) > WINDOW
        latest = [mean for *_, mean in sorted(of)[-WINDOW:]]
        wanted = [sum(column) / WINDOW for column in zip(*latest, strict=True)]
        assert values[layer] == pytest.approx(wanted)


def simulate_again(recording: Recording) -> None:
    [group] = recorded_groups(recorded_workloads(recording))
    [slots] = [event.slots for _, event in recording.events if isinstance(event, t.WorkerJoined) and event.slots]
    system = recording.core_config.system
    profile = recorded_profile(find_profile(PROFILE), recording)
    scenario = Scenario(profile, workers=1, slots=slots, host=True, system=system, requests=len(group))
    arrivals = [Arrival(one, one.prompt_tokens, one.tokens, step=one.step) for one in group]
    simulate_requests(scenario, arrivals)


EXACT: dict[str, dict[str, Any]] = {
    "importance, nothing replaced": {"system": "importance", "alpha": 0.0, "device_memory": "25%"},
    "the same beside a host": {"system": "importance", "alpha": 0.0, "device_memory": "25%", "profile": PROFILE},
    "all on the host": {"system": "ktransformers", "profile": PROFILE},
    "HOBBIT's cache, in full": {"system": "hobbit", "precision": "full", "device_memory": "25%"},
    "static": {"system": "static", "device_memory": "25%"},
}


@pytest.mark.parametrize("name", slow_except([*EXACT][:2], EXACT))
def test_three_answers_at_once_are_those_alone(name: str, embedded: Any, reference: Any) -> None:
    got = check_together(embedded(**EXACT[name], **WHOLE).main, [reference("float32", n, 6) for n in (0, 4, 8)])
    assert any(one.report.requests_per_step > 1 for one in got)
