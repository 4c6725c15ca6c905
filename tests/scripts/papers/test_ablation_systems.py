"""The steps of importance, Fate and SMOE: each changes one thing, and small whole runs."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import fields
from typing import Any

import pytest

from odmoe.settings.settings import Settings
from scheduler.policies.systems import SYSTEMS
from scripts.papers import ablation_systems


@pytest.mark.parametrize("paper", ablation_systems.SERIES)
def test_each_step_is_possible_and_ends_with_the_papers_own_system(paper: str) -> None:
    """All but the settings that the paper's preset has, too, are gone by the last step that is no sweep."""
    args = argparse.Namespace(paper=paper, how=["emulated"], profile="rtx3090-pcie3", alpha=0.3)
    configs = [
        Settings(model="m", device_memory="25%", **values).system_config
        for values in ablation_systems.variants(args).values()
    ]
    changed = [
        {one.name for one in fields(a) if getattr(a, one.name) != getattr(b, one.name)}
        for a, b in itertools.pairwise(configs)
    ]
    assert all(changed)
    assert all(len(names - {"prefetch"}) <= 1 for names in changed), "a step changes one policy"
    assert SYSTEMS[paper].config in configs


@pytest.mark.slow
def test_steps_of_importance(run: Any) -> None:
    found, _ = run(
        ablation_systems, "--how", "disk", "--budgets", "50", "--tokens", "4", name="ablation_importance-quick"
    )
    rows = {row["step"]: row for row in found["rows"]}
    assert list(rows) == ["+loads", "+CE", "+ER", "+Pre"]
    assert [row["exact"] for row in rows.values()] == [True, True, False, False]
    assert rows["+ER"]["recall"] is None
    assert 0 < rows["+Pre"]["recall"] <= 1
    assert rows["+loads"]["tpot_ratio"] is None
    assert rows["+CE"]["tpot_ratio"] == pytest.approx(rows["+CE"]["tpot_s"] / rows["+loads"]["tpot_s"])


@pytest.mark.slow
def test_steps_of_fate(run: Any) -> None:
    flags = ["--paper", "fate", "--how", "disk", "--budgets", "50", "--tokens", "4"]
    found, _ = run(ablation_systems, *flags, name="ablation_fate-quick")
    rows = {row["step"]: row for row in found["rows"]}
    assert list(rows) == ["on-demand", "+Pre", "+cache", "+int4"]
    assert [row["exact"] for row in rows.values()] == [True, True, True, False]
    assert rows["on-demand"]["hit_rate"] == 0
    assert rows["on-demand"]["recall"] is None
    assert 0 < rows["+Pre"]["recall"] <= 1, "whether a prefetch is there in time is the machine's matter"
    assert rows["+int4"]["bytes_a_token"] < rows["+cache"]["bytes_a_token"]


@pytest.mark.slow
def test_steps_of_three_prompts_at_once(run_script: Any) -> None:
    """Beside a host, where the balancer has batch sizes to balance."""
    flags = ["--quick", "--models", "models/demo-moe", "--prompts", "1", "--history", "1", "--tokens", "8"]
    flags += ["--how", "emulated", "--budgets", "25", "--batch", "3"]
    found = run_script(ablation_systems, *flags, name="ablation_importance-emulated-batch3-quick")
    rows = {row["step"]: row for row in found.facts["rows"]}
    assert list(rows) == ["baseline", "+loads", "+CE", "+ER", "+Pre", "+BA"]
    assert all(row["tpot_s"] == pytest.approx(3 * row["token_s"]) for row in rows.values())
    assert all(2 < row["requests_per_step"] <= 3 for row in rows.values())
    assert [row["exact"] for row in rows.values()] == [True, True, True, False, False, False]
    assert rows["baseline"]["host_computed"] > 0 == rows["+Pre"]["host_computed"]
