"""`odmoe.simulate` gives what the command line prints; test_plan.py has the same of `odmoe.plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import odmoe
from scheduler.errors import ConfigError, DoesNotFitError
from support.machines.cli import CommandLine
from support.paths import CONFIGS

MIXTRAL = CONFIGS / "mixtral-8x7b.json"
TIMES = ("wall_s", "simulated_tokens_per_s")
"""How long the simulation itself took."""


def printed(cli: CommandLine, *arguments: str) -> dict[str, Any]:
    answer = cli(*arguments, "--json")
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return found


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"tokens": 6}, ["--tokens", "6"]),
        (
            {"tokens": 6, "requests": 3, "interval": 0.5, "system": "od-moe", "draft": 2, "seed": 3},
            [
                "--tokens",
                "6",
                "--requests",
                "3",
                "--interval",
                "0.5",
                "--system",
                "od-moe",
                "--draft",
                "2",
                "--seed",
                "3",
            ],
        ),
    ],
)
def test_a_simulation(cli: CommandLine, settings: dict[str, Any], flags: list[str]) -> None:
    found = odmoe.simulate(**settings)
    same = json.loads(json.dumps(found.as_dict()))
    other = printed(cli, "simulate", *flags)
    assert set(same) == set(other)
    assert {name: same[name] for name in same if name not in TIMES} == {
        name: other[name] for name in other if name not in TIMES
    }
    assert found.decode_tokens_per_s == other["decode_tokens_per_s"]
    assert found.requests[0].ttft_s == other["requests"][0]["ttft_s"]


def test_a_simulation_of_recorded_routes(tmp_path: Path, demo: Path) -> None:
    file = tmp_path / "record"
    with odmoe.load(demo, shadow="none", threads=1, record=str(file)) as loaded:
        loaded.generate("HAMLET:", max_new_tokens=4)
    found = odmoe.simulate(routes=str(file), trace=str(tmp_path / "trace"))
    assert found.tokens == [4]
    assert found.as_dict()["requests"][0]["recorded_ttft_s"] > 0
    assert (tmp_path / "trace").stat().st_size > 0


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokns is not a setting of odmoe simulate; did you mean tokens"):
        odmoe.simulate(tokns=3)
    with pytest.raises(ConfigError, match="tokens is 0; allowed: 1 to"):
        odmoe.simulate(tokens=0)
    with pytest.raises(ConfigError, match=r"call odmoe\.replay"):
        odmoe.simulate(replay="file")
    with pytest.raises(ConfigError, match=r"worker is not a setting of odmoe plan; did you mean workers"):
        odmoe.plan(MIXTRAL, worker=3)
    with pytest.raises(DoesNotFitError, match="one expert"):
        odmoe.plan(MIXTRAL, worker_memory="100MB")
    with pytest.raises(ConfigError, match="nothing"):
        odmoe.replay(tmp_path / "nothing")
