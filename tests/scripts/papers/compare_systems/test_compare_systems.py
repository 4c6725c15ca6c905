"""Systems beside each other: what is counted, and a small whole run."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.papers.compare_systems import __main__ as compare_systems
from scripts.papers.compare_systems import show


@pytest.mark.slow
def test_systems_side_by_side(run: Any, demo_store: Any) -> None:
    flags = ["--systems", "on-demand", "static", "importance", "fully-cached", "--budgets", "25", "--tokens", "4"]
    found, told = run(compare_systems, *flags)
    rows = {row["system"]: row for row in found["rows"]}
    assert "cannot be" in told
    assert "every expert" in rows["fully-cached"]["refused"]
    for name, answers in (("on-demand", 4), ("static", 1)):
        tokens = 4 * answers
        assert (rows[name]["same_tokens"], rows[name]["tokens"], rows[name]["exact"]) == (tokens, tokens, True)
    assert not rows["importance"]["exact"]
    manifest = demo_store("float32").manifest
    for name in ("on-demand", "static", "importance"):
        assert 0 < rows[name]["device_bytes"] <= 0.25 * manifest.expert_bytes
    # Eight layers of top-2: of a token, on-demand loads every expert, and hits none.
    assert rows["on-demand"]["loads_a_token"] == 16
    assert rows["on-demand"]["bytes_a_token"] == 16 * manifest.blob_bytes
    assert rows["on-demand"]["hit_rate"] == 0 < rows["static"]["hit_rate"] < 1
    assert rows["static"]["loads_a_token"] == pytest.approx(16 * (1 - rows["static"]["hit_rate"]))
    for name in ("on-demand", "static", "importance"):
        assert 0 < rows[name]["tpot_ratio_low"] <= rows[name]["tpot_ratio"] <= rows[name]["tpot_ratio_high"]
    again, told = run(compare_systems, *flags)
    assert "8 of 8 cells were finished before" in told
    assert again["rows"] == found["rows"]


@pytest.mark.slow
def test_three_prompts_at_once(run_script: Any) -> None:
    """Exact systems' tokens are those of each prompt alone; a pass takes as long as three tokens; loads are shared."""
    flags = ["--quick", "--models", "models/demo-moe", "--prompts", "1", "--history", "1", "--tokens", "12"]
    flags += ["--systems", "on-demand", "hybrimoe", "importance", "ktransformers", "--budgets", "25", "--batch", "3"]
    found = run_script(compare_systems, *flags, name="compare_systems-batch3-quick")
    rows = {row["system"]: row for row in found.facts["rows"]}
    assert "needs a host" in rows.pop("ktransformers")["refused"]
    rows.pop("Transformers")
    for name, row in rows.items():
        assert row["tpot_s"] == pytest.approx(3 * row["token_s"])
        assert 2 < row["requests_per_step"] <= 3
        assert row["tpot_ratio"] > 0
        assert row["exact"] == (name != "importance")
        assert (row["same_tokens"] == row["tokens"]) or not row["exact"]
    assert [rows[name]["tokens"] for name in ("on-demand", "hybrimoe")] == [4 * 3 * 12, 3 * 12]
    assert rows["on-demand"]["loads_a_token"] < 16  # of 8 layers of top-2, where nothing is kept from token to token
    assert rows["importance"]["hit_rate"] > 0


@pytest.mark.slow
def test_systems_beside_a_host(run_script: Any) -> None:
    """SMOE and its baselines, with two places to compute at."""
    flags = ["--quick", "--models", "models/demo-moe", "--prompts", "1", "--history", "1", "--tokens", "6"]
    flags += ["--systems", "on-demand", "smoe", "ktransformers", "--budgets", "25", "--profile", "rtx3090-pcie3"]
    found = run_script(compare_systems, *flags, "--batch", "3", name="compare_systems-emulated-batch3-quick")
    rows = {row["system"]: row for row in found.facts["rows"]}
    assert set(rows) == {"on-demand", "smoe", "ktransformers"}, "Transformers' time is not emulated"
    assert all(row["same_tokens"] == row["tokens"] and row["emulated"] == "rtx3090-pcie3" for row in rows.values())
    alone = rows["ktransformers"]
    assert (alone["loads_a_token"], alone["hit_rate"], alone["host_computed"]) == (0, 0, 3 * 5 * 16)
    assert "smoe against ktransformers: TPOT" in found.told


@pytest.mark.slow
def test_systems_beside_each_other_at_equal_totals(run_script: Any, demo_store: Any) -> None:
    """A shadow takes from the slots of its own system, and nobody holds more than the budget."""
    flags = ["--quick", "--models", "models/demo-moe", "--prompts", "1", "--history", "1", "--tokens", "4"]
    flags += ["--total", "--systems", "sep-arc", "hybrimoe", "--budgets", "60"]
    found = run_script(compare_systems, *flags, name="compare_systems-total-quick")
    rows = {row["system"]: row for row in found.facts["rows"]}
    assert "memory of all nodes 60 % of the whole model" in found.told
    whole = 4 * 1_195_200 + demo_store("float32").manifest.expert_bytes
    for name in ("sep-arc", "hybrimoe"):
        assert 0 < rows[name]["total_bytes"] <= 0.6 * whole
    assert rows["sep-arc"]["shadow_bytes"] > 10_000_000
    assert rows["hybrimoe"]["device_bytes"] - rows["sep-arc"]["device_bytes"] > 10_000_000


def row(system: str, times: list[float], hit_rate: float, budget: int = 10) -> dict[str, Any]:
    return {"model": "m", "budget": budget, "system": system, "tpot_by_prompt": times, "hit_rate": hit_rate}


def test_who_is_ahead_of_whom() -> None:
    """Ratios are paired: the third prompt met a machine that was ten times as slow."""
    rows = [
        row("fate", [1.0, 2.0, 9.0], 0.7),
        row("eap", [2.0, 4.0, 20.0], 0.5),
        row("on-demand", [1.0, 1.0, 10.0], 0.0),
        row("fate", [1.0], 0.4, 50),
        row("eap", [1.0], 0.5, 50),
        row("on-demand", [0.9], 0.0, 50),
    ]
    assert show.claims(rows) == [
        "m: fate against on-demand: TPOT 1.0 (0.9 to 2.0), 1.11 (1.11 to 1.11) of its, hit rate +0.70 +0.40 "
        "at 10, 50 %; slower at 50 %; no difference shown at 10 %",
        "m: fate against eap: TPOT 0.50 (0.45 to 0.50), 1.00 (1.00 to 1.00) of its, hit rate +0.20 -0.10 at 10, 50 %; "
        "slower at 50 %; no more hits at 50 %",
    ]


def test_systems_that_were_measured_beside_on_demand_are_compared_by_it() -> None:
    """The machine was twice as slow when eap answered."""
    rows = [row("fate", [1.0] * 6, 0.7), row("eap", [2.0] * 6, 0.5)]
    rows[0]["tpot_ratio_by_prompt"] = rows[1]["tpot_ratio_by_prompt"] = [0.5] * 6
    assert show.claims(rows)[0].startswith("m: fate against eap: TPOT 1.00 (1.00 to 1.00) of its")


def answer(seconds: float, at: float) -> dict[str, Any]:
    return {"tpot_s": seconds, "at": at}


def test_an_answer_is_divided_by_those_next_to_it() -> None:
    base = {0: answer(1.0, 0.0), 2: answer(4.0, 10.0), 4: answer(9.0, 9000.0), 6: {"refused": "", "at": 9010.0}}
    mine = {1: answer(1.0, 5.0), 3: answer(6.0, 15.0), 5: answer(3.0, 9005.0)}
    pairs = compare_systems.pairs_of(mine, base)
    assert [near for _, near in pairs] == [[base[0], base[2]], [base[2]], [base[4]]]
    assert show.ratio("tpot_s", {n: [pair] for n, pair in enumerate(pairs)}) == {
        "tpot_ratio": 0.5,  # of 1 / 2, 6 / 4 and 3 / 9
        "tpot_ratio_low": pytest.approx(1 / 3),
        "tpot_ratio_high": 1.5,
        "tpot_ratio_by_prompt": [0.5, 1.5, pytest.approx(1 / 3)],
    }
    itself = compare_systems.pairs_of(base, base, far=2)
    assert [near for _, near in itself][:2] == [[base[2]], [base[0]]]


def test_emulated_times_have_one_reference_and_are_shown_as_the_profiles_own() -> None:
    base = {3: answer(80.0, 0.0) | {"emulated": "rtx3090-pcie3@8"}}
    mine = {0: answer(40.0, 9000.0) | {"emulated": "rtx3090-pcie3@8", "ttft_s": 16.0}}
    pairs = compare_systems.pairs_of(mine, base)
    assert [near for _, near in pairs] == [[base[3]]]
    found = dict.fromkeys((*show.MEDIANS, "device_bytes", "shadow_bytes", "resident_max", "exact", "others_cores"), 0.0)
    base[3] = found | base[3] | {"ttft_s": 32.0}
    figures = show.figures({0: {0: found | mine[0]}}, {0: [(found | mine[0], [base[3]])]})
    assert (figures["tpot_s"], figures["ttft_s"], figures["tpot_by_prompt"]) == (5.0, 2.0, [5.0])
    assert (figures["tpot_ratio"], figures["ttft_ratio"]) == pytest.approx((0.5, 0.5))


def test_on_demand_stands_between_all_others() -> None:
    assert compare_systems.between(["a", "on-demand", "b"]) == ["on-demand", "a", "on-demand", "b", "on-demand"]
    assert compare_systems.between(["a", "b"]) == ["a", "b"]


def test_figures_of_a_busy_machine_are_marked() -> None:
    shown = show.interval("tpot")
    found = {"tpot_ratio": 0.5, "tpot_ratio_low": 0.4, "tpot_ratio_high": 0.6, "prompts": 6}
    assert shown(found | {"others_cores": 0.02}) == "0.5 (0.4 to 0.6)"
    assert shown(found | {"others_cores": 0.3}) == "0.5 (0.4 to 0.6)*"
    assert shown({"tpot_ratio": None}) is None
    time = show.milliseconds("tpot_s", ".1f")
    assert [time({"tpot_s": 0.05, "others_cores": cores}) for cores in (0.02, 0.3)] == ["50.0", "50.0*"]


def test_a_ratio_is_marked_where_the_machine_was_busy_for_its_baseline() -> None:
    quiet, busy = {"tpot_s": 1.0, "others_cores": 0.01}, {"tpot_s": 2.0, "others_cores": 0.4}
    for near, expected in ((quiet, ""), (busy, "*")):
        row = show.ratio("tpot_s", {n: [(quiet, [quiet, near])] for n in range(6)}) | {
            "prompts": 6,
            "others_cores": 0.01,
        }
        assert str(show.interval("tpot")(row)).endswith(")" + expected)


def test_medians_are_of_what_was_measured() -> None:
    assert show.middle([3.0, None, 1.0]) == 2.0
    assert show.middle([None]) is None
