"""`odmoe simulate --route-model`: caches differ where routes do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.machines.cli import CommandLine

CACHE = ("--profile", "rtx3090-pcie3", "--predictor", "none", "--workers", "1", "--slots", "64")


def facts(cli: CommandLine, *flags: str) -> dict[str, Any]:
    answer = cli("simulate", "--json", *flags)
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return found


@pytest.mark.slow
def test_what_keeps_popular_experts_loads_less_often(cli: CommandLine) -> None:
    """A pass over all layers uses more experts than there are slots, so that an LRU of all layers never has the one
    that is needed; shares of each layer keep what is popular, and frequency keeps it better."""
    found = {name: facts(cli, *CACHE, "--residency", name) for name in ("lru", "layer-lru", "lfu")}
    model, loads = found["lru"]["model"], {name: one["loads_a_token"] for name, one in found.items()}
    assert loads["lfu"] < loads["layer-lru"] < loads["lru"] == model["layers"] * model["top_k"] > 64


def test_the_default_is_uniform_only_where_nothing_is_remembered(cli: CommandLine) -> None:
    few = ("--tokens", "4")
    assert facts(cli, *few)["route_model"] == facts(cli, *few, "--system", "fully-cached")["route_model"] == "uniform"
    assert facts(cli, *few, *CACHE, "--residency", "arc")["route_model"] == "deep-moe"
    assert facts(cli, *few, "--predictor", "path")["route_model"] == "deep-moe"
    assert facts(cli, *few, "--route-model", "fine-moe")["route_model"] == "fine-moe"


@pytest.mark.parametrize("kept", [("--residency", "lfu"), ("--predictor", "path")])
def test_uniform_routes_compare_no_memories(cli: CommandLine, kept: tuple[str, str]) -> None:
    answer = cli("simulate", *kept, "--route-model", "uniform")
    assert answer.code == 2
    said = " ".join(answer.err.split())
    assert f"--route-model is uniform, and {' '.join(kept)} goes by what was chosen before" in said
    assert "give demo-moe, deep-moe, fine-moe, or a recording" in said


@pytest.mark.slow
def test_requests_of_text_share_more_experts(cli: CommandLine) -> None:
    eight = ("--requests", "8", "--tokens", "8")
    alike = facts(cli, *eight, "--route-model", "deep-moe")["experts_a_layer"]
    assert alike < facts(cli, *eight)["experts_a_layer"] - 0.3


def test_the_report_says_how_routes_were_drawn(cli: CommandLine) -> None:
    assert (
        "routes        drawn like those of models/fine-moe"
        in cli("simulate", "--tokens", "4", "--route-model", "fine-moe").out
    )
