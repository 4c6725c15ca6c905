"""Time to first token over prompt lengths: shares, slots and ratios by hand, and a small whole run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.policies.systems import SYSTEMS
from scheduler.simulation.recorded_routes import RecordedWorkload
from scheduler.simulation.workload import Gate
from scheduler.timing.profile import find_profile
from scheduler.trace import Span
from scripts.papers.prefill import __main__ as prefill
from scripts.papers.prefill import figures, simulated
from scripts.papers.prefill.variants import IN_FULL, IN_TURN, ON_HOST, VARIANTS, config_of, foresight_of

PC = replace(find_profile("rtx3090-pcie3"), layers=8, experts=8, top_k=2)


@pytest.mark.slow
def test_a_whole_run(run_script: Any, tmp_path: Path) -> None:
    flags = ["--quick", "--models", "models/demo-moe", "--lengths", "16", "48", "--history", "1"]
    flags += ["--systems", "on-demand", ON_HOST, "smoe", "hybrimoe"]
    found = run_script(prefill, *flags, name="prefill-simulated-quick")
    rows = {(row["system"], row["prompt_tokens"]): row for row in found.facts["rows"]}
    assert len(rows) == 8
    path = next((tmp_path / "prefill-simulated-quick.files").glob("*.recording"))
    _, (_, *asked) = simulated.read(path)
    for one in asked:
        length = one.prompt_tokens
        layers = [one.prompt(layer) for layer in range(8)]
        host_s = sum(PC.host_compute_s(count) for layer in layers for _, count in layer)
        row = rows[ON_HOST, length]
        assert row["ttft_s"] == pytest.approx(8 * PC.main_s(length) + host_s)
        assert (row["loads"], row["hosted"]) == (0, sum(map(len, layers)))
        on_demand = rows["on-demand", length]
        assert on_demand["ttft_ratio"] == 1.0
        assert on_demand["ttft_s"] >= sum(map(len, layers)) * PC.load_s, "each of them is loaded over one link"
        assert row["ttft_ratio"] == pytest.approx(row["ttft_s"] / on_demand["ttft_s"])
    assert all(0 <= row[name] <= 1 + 1e-9 for row in rows.values() for name in figures.SHARES)


@pytest.mark.slow
def test_a_whole_run_from_the_disk(run_script: Any) -> None:
    flags = ["--quick", "--how", "disk", "--models", "models/demo-moe", "--lengths", "8", "24", "--history", "1"]
    found = run_script(prefill, *flags, "--systems", "on-demand", "fate", name="prefill-disk-quick")
    rows = {(row["system"], row["prompt_tokens"]): row for row in found.facts["rows"]}
    assert set(rows) == {(system, length) for system in ("on-demand", "fate") for length in (8, 24)}
    assert all(row["ttft_s"] > 0 and row["prompts"] == 1 + (row["system"] == "on-demand") for row in rows.values())
    assert 0 < rows["fate", 24]["prefill_bytes"] < rows["on-demand", 24]["prefill_bytes"], "smaller forms, and a cache"
    assert rows["fate", 24]["ttft_ratio"] > 0


def test_a_quick_run_has_other_settings_than_a_whole_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["prefill", "--out", str(tmp_path), "--how", "disk"])
    args = prefill.parse()
    assert args.lengths == [16, 64, 128, 256, 512]
    assert set(args.systems) == set(VARIANTS) | {"od-moe", "sep-arc"}
    monkeypatch.setattr("sys.argv", ["prefill", "--out", str(tmp_path), "--quick"])
    assert prefill.parse().lengths == [16, 64]
    for wrong in (["--budgets", "10", "25"], ["--systems", "od-moe"]):
        monkeypatch.setattr("sys.argv", ["prefill", "--out", str(tmp_path), *wrong])
        with pytest.raises(SystemExit):
            prefill.parse()


def test_a_measured_time_has_its_interval_and_its_mark() -> None:
    ratio = {"ttft_ratio": 0.5, "ttft_ratio_low": 0.48, "ttft_ratio_high": 0.52, "prompts": 5}
    rows: list[dict[str, Any]] = [
        {"system": "fate", "prompt_tokens": 16, "ttft_s": 0.25, **ratio, "others_cores": 0.0},
        {"system": "fate", "prompt_tokens": 64, "ttft_s": 0.5, **ratio, "others_cores": 0.5},
    ]
    assert figures.wide(rows).splitlines()[::2] == [
        "|  | 16 tokens | 64 tokens |",
        "| fate | 0.25: 0.50 (0.48 to 0.52) | 0.50: 0.50 (0.48 to 0.52)* |",
    ]


def test_every_system_of_one_machine_is_there() -> None:
    assert {name for name, preset in SYSTEMS.items() if preset.single_machine} <= set(VARIANTS)
    assert config_of(IN_FULL) == replace(SYSTEMS["fate"].config, precision="full")
    assert config_of(IN_TURN) == replace(SYSTEMS["on-demand"].config, prefill="in-turn")


def test_what_expects_nothing_in_prefill_is_simulated_without_its_predictor() -> None:
    for name, predictor in (("smoe", "none"), ("importance", "none"), ("fate", "cross-layer"), ("eap", "path")):
        assert simulated.in_prefill(config_of(name), foresight_of(name)).predictor == predictor


def test_the_next_gate_is_one_of_several() -> None:
    scores = ((0.5, 0.5),)
    seen = ((-1, 1, scores), (-1, 2, scores), (0, 0, scores))
    gates = {(-1, 0): Gate(((0,),), scores, seen), (-1, 2): Gate(((0,),), scores, ((0, 0, scores),))}
    one = RecordedWorkload(1, 16, 2, foresight="gates", gates=gates)
    nearest = simulated.foreseeing(one, "gate")
    assert nearest.foresight == "gate"
    assert [nearest.gate(-1, layer).foreseen for layer in (0, 2)] == [((-1, 1, scores),), ()]
    assert simulated.foreseeing(one, "gates") is one


def test_smaller_forms_leave_room_for_more_experts() -> None:
    """A quarter of 8 x 8 experts; in int4, of 4.5 bits for 16, 3.56 times as many."""
    assert simulated.scenario_of(PC, config_of("smoe"), 25).slots == 16
    assert simulated.scenario_of(PC, config_of("fate"), 25).slots == int(16 * 16 / 4.5)


def test_shares_of_the_time_until_the_first_token() -> None:
    """From 10 to 20: the link is busy for 2 + 3 of it, the host for 10, and the device for none."""
    spans = [
        Span("worker 0", "load", "", 8.0, 12.0),
        Span("worker 0", "given up", "", 15.0, 18.0),
        Span("worker 0", "load", "", 21.0, 22.0),
        Span("worker 0", "evict", "", 13.0, 13.0),
        Span("worker 1", "compute", "", 5.0, 25.0),
        Span("main", "layer", "", 10.0, 20.0),
    ]
    assert simulated.busy(spans, 10.0, 20.0) == {"link_busy": 0.5, "device_busy": 0.0, "host_busy": 1.0}


def answer(seconds: float, **more: float) -> dict[str, Any]:
    return {"ttft_s": seconds, "loads": 4, "hosted": 2, "link_busy": 0.5, "host_busy": 0.25, "device_busy": 0.1, **more}


def test_rows_are_medians_and_paired_ratios() -> None:
    answers = [answer(1.0), answer(3.0, loads=8), answer(8.0, loads=6)]
    row = figures.row_of({"system": "smoe", "prompt_tokens": 16}, answers, [0.5, 1.5, None])
    assert (row["ttft_s"], row["ttft_ratio"], row["loads"], row["prompts"]) == (3.0, 1.0, 6, 3)
    assert (row["ttft_ratio_low"], row["ttft_ratio_high"]) == (0.5, 1.5)
    assert "ttft_ratio" not in figures.row_of({}, answers, [None] * 3)
    assert figures.row_of({"system": "x"}, [answer(1.0), {"refused": "why"}], []) == {"system": "x", "refused": "why"}


def test_the_table_has_a_line_a_system_and_a_column_a_length() -> None:
    def row(system: str, length: int, seconds: float) -> dict[str, Any]:
        return figures.row_of({"system": system, "prompt_tokens": length}, [answer(seconds)], [seconds / 2])

    rows = [row("smoe", 16, 1.0), row("smoe", 64, 2.0), row("hybrimoe", 16, 4.0)]
    assert figures.wide(rows).splitlines()[::2] == [
        "|  | 16 tokens | 64 tokens | link, host busy at 64 |",
        "| smoe | 1.000 (0.50) | 2.000 (1.00) | 50%, 25% |",
    ]
    assert figures.wide(rows).splitlines()[3] == "| hybrimoe | 4.000 (2.00) | - | - |"
    assert figures.claims(rows) == ["smoe over hybrimoe: 0.25 at 16"]
    assert "on the host" in figures.text(rows)
    assert "cannot be" not in figures.text(rows)
