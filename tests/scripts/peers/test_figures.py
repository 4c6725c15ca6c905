"""Ratios are paired turn by turn, and the best system decides the cap."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.lib.experiment import Cell
from scripts.measure.peers import exact_systems
from scripts.peers import figures, machine, show
from scripts.peers.checkpoints import SHAPES
from scripts.peers.engines import ACCELERATE, EAGER, LLAMA
from scripts.peers.figures import BASE, CACHED, CAPPED, FITS, QUARTER


def turn(rate: float, ttft_s: float = 1.0, choices: tuple[int, ...] = (7, 8, 9), **more: Any) -> dict[str, Any]:
    count = len(choices) - 1
    return {
        "ttft_s": ttft_s,
        "decode_s": count / rate,
        "choices": list(choices),
        "read_bytes": 0,
        "first_token_at": 0.0,
        "hits": None,
        "named": None,
        "exact": None,
        "others_cores": 0.0,
    } | more


def engine(*turns: dict[str, Any], peak: int = 1 << 30, start: float = 5.0) -> dict[str, Any]:
    return {"turns": list(turns), "start_s": start, "peak_bytes": peak, "group_peak_bytes": None}


def cell(case: str, name: str, **more: Any) -> Cell:
    return Cell({"model": "A", "case": case, "engine": name, **more})


def test_ratios_are_of_the_same_turn() -> None:
    mine, theirs = [turn(10), turn(2), turn(30)], [turn(5), turn(1), turn(10)]
    assert figures.ratios(mine, theirs, figures.decode_rate) == pytest.approx([2, 2, 3])
    assert figures.spread([2, 1, 3]) == {"median": 2, "low": 1, "high": 3, "turns": [2, 1, 3]}
    assert figures.said(figures.spread([2, 2, 3])) == "2.0 (2.0 to 3.0)"


def test_a_ratio_is_marked_where_others_used_the_processor_in_a_turn_of_either_engine() -> None:
    result = {EAGER: engine(turn(5), turn(5)), CACHED: engine(turn(10), turn(10, others_cores=0.3))}
    quiet = {EAGER: engine(turn(5), turn(5)), CACHED: engine(turn(10), turn(10, others_cores=0.05))}
    for found, said in ((result, "2.00 (2.00 to 2.00)*"), (quiet, "2.00 (2.00 to 2.00)")):
        [row] = [one for one in figures.rows([cell(FITS, CACHED)], [found]) if one["engine"] == CACHED]
        assert figures.said(row[f"decode over {EAGER}"]) == said


def test_the_best_system_is_the_one_with_the_best_ratio_and_its_memory_is_the_cap() -> None:
    cells = [cell(QUARTER, name) for name in ("slow", "fast", "refused")]
    base = engine(turn(2), peak=900 << 20)
    results = [
        {BASE: base, "slow": engine(turn(3), peak=2 << 30)},
        {BASE: engine(turn(1)), "fast": engine(turn(2), peak=(1000 << 20) + 1)},
        {BASE: base, "refused": {"failed": "no weights"}},
    ]
    assert figures.best_system("A", cells, results) == ("fast", 1024 << 20)
    assert figures.best_system("B", cells, results) is None
    slower = [{BASE: base, "slow": engine(turn(1))}]
    assert figures.best_system("A", cells[:1], slower) == (BASE, 960 << 20)


def test_rows_have_ratios_agreement_and_hit_rate() -> None:
    cells = [cell(FITS, CACHED), cell(FITS, LLAMA), cell(CAPPED, "hybrimoe", cap=10**9)]
    ours = turn(8, 2.0, hits=3, named=4, exact=True)
    results = [
        {EAGER: engine(turn(10), start=4), CACHED: engine(ours, start=2)},
        {EAGER: engine(turn(10)), LLAMA: engine(turn(30, choices=(7, 8, 1)))},
        {"hybrimoe": engine(ours), LLAMA: engine(turn(2)), ACCELERATE: {"failed": "killed"}},
    ]
    rows = {(row["case"], row["engine"]): row for row in figures.rows(cells, results)}
    cached = rows[FITS, CACHED]
    assert cached["decode over Transformers eager"]["median"] == pytest.approx(0.8)
    assert cached["ttft over Transformers eager"]["median"] == pytest.approx(2)
    assert cached["start over Transformers eager"] == 0.5
    assert (cached["agreement"], cached["hit_rate"], cached["exact"]) == (1, 0.75, True)
    assert rows[FITS, LLAMA]["agreement"] == pytest.approx(2 / 3)
    assert "decode over accelerate" not in rows[CAPPED, "hybrimoe"]
    assert rows[CAPPED, "hybrimoe"]["decode over llama.cpp"]["median"] == pytest.approx(4)
    assert rows[CAPPED, ACCELERATE]["failed"] == "killed"
    told = figures.claims(list(rows.values()))
    assert len(told) == 4
    assert "A, a quarter fits, capped: hybrimoe, decode over llama.cpp: 4.00" in told[2]
    table = show.table(list(rows.values()))
    assert table.splitlines()[-1] == "A, a quarter, limit 1.00 GB: accelerate: killed"
    assert "0.80 (0.80 to 0.80) Transformers eager" in table
    assert [row["engine"] for row in show.ran(list(reversed(rows.values())))] == [
        LLAMA,
        EAGER,
        CACHED,
        "hybrimoe",
        LLAMA,
    ]


def test_the_picture_has_a_bar_for_each_engine() -> None:
    cells = [cell(FITS, CACHED), cell(QUARTER, "hybrimoe"), cell(CAPPED, "hybrimoe", cap=10**9)]
    results = [
        {EAGER: engine(turn(10)), CACHED: engine(turn(8))},
        {BASE: engine(turn(2)), "hybrimoe": engine(turn(6))},
        {"hybrimoe": engine(turn(5)), LLAMA: engine(turn(1)), ACCELERATE: engine(turn(0.5))},
    ]

    class Args:
        shapes = SHAPES

    figure = show.picture(figures.rows(cells, results), Args())
    fits, quarter = figure.axes
    assert [text.get_text() for text in fits.get_yticklabels()] == ["Transformers", "OD-MoE, all cached"]
    assert [bar.get_width() for bar in quarter.patches] == [5, 2, 1, 0.5]


def test_every_exact_system_is_compared() -> None:
    from odmoe.settings.settings import Settings
    from scheduler.policies.registry import is_exact

    found = exact_systems()
    assert {"on-demand", "static", "hybrimoe", "smoe", "moe-infinity", "od-moe", "importance, alpha 0"} <= set(found)
    assert not {"fully-cached", "eap", "fate", "hobbit", "mixtral-offloading", "importance"} & set(found)
    for name, settings in found.items():
        assert is_exact(Settings(model="x", **settings).system_config), name


def test_without_llama_cpp_the_script_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "llama_cpp" else object())
    told = machine.llama_missing()
    assert told is not None
    assert "no row of llama.cpp: llama-cpp-python not installed" in told
    assert "pip install -e '.[peers]'" in told
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    assert machine.llama_missing() is None
