"""Comparisons: each point is a simulation of its own, and a system's points differ only in what it reads."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from odmoe.api.simulating import run_simulation
from odmoe.api.simulation import sweep
from odmoe.settings.simulate_settings import SimulateSettings
from odmoe.settings.sweep_settings import SweepSettings
from scheduler.errors import ConfigError
from support.machines.cli import CommandLine

GIVEN = {"tokens": 5, "prompt_tokens": 4, "layers": 4, "experts": 8, "top_k": 2, "route_model": "fine-moe"}
FLAGS = ("--tokens", "5", "--prompt-tokens", "4", "--layers", "4", "--experts", "8", "--top-k", "2")
HOSTED = "ktransformers"


def points(**asked: Any) -> list[sweep.Point]:
    return sweep.sweep(SimulateSettings(**GIVEN), SweepSettings(**asked))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("lru", {"system": "on-demand", "residency": "lru"}),
        ("static", {"system": "static"}),
        ("moe-infinity+residency=lfu", {"system": "moe-infinity", "residency": "lfu"}),
        ("perfect", {"system": "on-demand", "predictor": "perfect", "residency": "belady"}),
    ],
)
def test_a_point_is_what_a_simulation_of_its_own_gives(name: str, settings: dict[str, str]) -> None:
    (found,) = points(compare=name, device_memory="25%")
    alone = run_simulation(SimulateSettings(profile="rtx3090-pcie3", workers=1, slots=8, **settings, **GIVEN))
    assert found.slots == 8
    assert found.tokens_per_s == alone.decode_tokens_per_s
    assert found.loads_a_token == alone.loads_a_token
    assert (alone.misses_a_token or (None, None, None)) == (
        found.misses_a_token,
        found.working_set_misses_a_token,
        found.policy_misses_a_token,
    )
    assert found.bound == (name == "perfect")


def test_every_axis_is_varied_in_order() -> None:
    found = points(compare="lru,lfu", device_memory=["25%", "50%"], load_ms="1,2", host_ms="1", batch="1,2")
    assert len(found) == 16
    assert [one.system for one in found] == ["lru"] * 8 + ["lfu"] * 8
    assert {(one.load_ms, one.host_ms, one.batch) for one in found} == {(x, 1, b) for x in (1, 2) for b in (1, 2)}
    slow = [one.tokens_per_s for one in found if one.load_ms == 2]
    assert all(
        rate > other for rate, other in zip([o.tokens_per_s for o in found if o.load_ms == 1], slow, strict=True)
    )


def test_what_a_system_does_not_read_is_simulated_once() -> None:
    counted: list[Any] = []

    def each(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        counted.extend(tasks)
        return map(function, counted)

    asked = SweepSettings(compare=f"lru,{HOSTED}", device_memory="25%,50%", load_ms="1,2", host_ms="1,2")
    found = sweep.sweep(SimulateSettings(**GIVEN), asked, each)
    assert len(found) == 16
    assert len(counted) == 4 + 2, "lru has no host; ktransformers neither loads nor keeps"
    rates = {one.host_ms: one.tokens_per_s for one in found if one.system == HOSTED}
    assert rates[1] > rates[2]
    assert {one.slots for one in found if one.system == HOSTED} == {1}


def test_a_map_varies_load_host_memory_and_batch() -> None:
    _, axes = sweep.axes_of(SimulateSettings(), SweepSettings(map=True))
    assert axes.systems == sweep.COMPARED
    assert axes.memories == ("10%", "25%", "50%")
    assert (len(axes.loads), len(axes.hosts), axes.batches) == (3, 3, (1, 4))
    assert axes.loads[1] == pytest.approx(2.382e-3)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"compare": "lruu"}, r"--compare is 'lruu'; did you mean lru"),
        ({"compare": "lru,all"}, r"names all, which keeps every expert .* is 10%; give --device-memory 100%"),
        ({"compare": "fully-cached", "device_memory": "99%"}, "names fully-cached, which keeps every expert"),
        ({"compare": "lru+speed=9"}, r"--compare is lru\+speed=9; allowed after \+: FIELD=VALUE"),
        ({"device_memory": "2GB"}, r"--device-memory is 2GB; .* shares of all experts"),
        ({"load_ms": [0.001 * n for n in range(1, 1500)]}, r"has 4497 points; allowed: 4096"),
    ],
)
def test_what_cannot_be_compared_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        points(**asked)


def test_what_keeps_all_experts_is_compared_with_memory_for_all() -> None:
    assert [one.slots for one in points(compare="lru,fully-cached", device_memory="100%")] == [32, 32]


def test_a_comparison_of_single_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tokens is 1; a comparison is of decoding; allowed: 2 or more"):
        sweep.sweep(SimulateSettings(**GIVEN | {"tokens": 1}), SweepSettings(compare="lru,lfu"))


def test_more_requests_at_once_than_there_are_routes_for_are_refused() -> None:
    given = SimulateSettings(routes="demo-moe", tokens=2)
    with pytest.raises(ConfigError, match=r"--batch is 9; allowed: 1 to 4"):
        sweep.sweep(given, SweepSettings(compare="lru", device_memory="25%", batch="9"))


def test_the_command_writes_points_and_marks_the_fastest(cli: CommandLine, tmp_path: Path) -> None:
    files = tmp_path / "points.json", tmp_path / "points.csv"
    for file in files:
        answer = cli("simulate", *FLAGS, "--compare", "lru,belady", "--device-memory", "25%,50%", "-o", str(file))
        assert answer.code == 0, answer.err
    rows = [line.split() for line in answer.out.splitlines()]
    lru = next(row for row in rows if row[:1] == ["lru"])
    assert lru.count("*") == 2, "a bound does not win"
    found = json.loads(files[0].read_text())
    assert [one["device_memory"] for one in found["points"]] == ["25%", "50%"] * 2
    assert f"{found['points'][0]['tokens_per_s']:.2f}" in lru
    with files[1].open(newline="") as file:
        assert [float(row["tokens_per_s"]) for row in csv.DictReader(file)] == [
            one["tokens_per_s"] for one in found["points"]
        ]


def test_of_several_places_the_winners_are_listed(cli: CommandLine) -> None:
    answer = cli("simulate", *FLAGS, "--compare", f"lru,{HOSTED}", "--device-memory", "25%", "--host-ms", "0.01,1000")
    assert answer.code == 0, answer.err
    fastest = {line.split()[1]: line.split()[4] for line in answer.out.splitlines()[2:]}
    assert answer.out.startswith("simulated: rtx3090-pcie3\n")
    assert fastest == {"0.01": HOSTED, "1e+03": "lru"}


def test_a_comparison_does_not_take_what_it_varies(cli: CommandLine) -> None:
    answer = cli("simulate", "--compare", "lru", "--slots", "3")
    assert answer.code == 2
    assert "--slots is given with a comparison" in " ".join(answer.err.split())
