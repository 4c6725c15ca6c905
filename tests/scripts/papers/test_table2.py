"""Table 2: the paper's columns as it printed them, and a whole small run."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.papers import table2
from scripts.papers import table2_show as show


@pytest.mark.parametrize(
    ("name", "ttft_ms", "decode", "overall"),
    [  # the lines `Average` of the paper's Table 2 (i)
        ("Mixtral-Offloading", 1844.9825, 2.2375, 2.1725),
        ("MoE-Infinity", 6118.6825, 0.6875, 0.6675),
        ("HOBBIT", 5679.6875, 0.7850, 0.7575),
        ("AdapMoE", 1387.0000, 3.1300, 3.0350),
        ("Transformers", 416.9925, 4.8900, 4.8425),
        ("llama.cpp", 4288.4100, 0.8225, 0.7975),
        ("OD-MoE", 2244.3475, 3.6925, 3.3700),
    ],
)
def test_the_papers_cases_have_the_papers_averages(name: str, ttft_ms: float, decode: float, overall: float) -> None:
    rows, column = show.paper_rows(), f"paper: {name}"
    assert 1000 * (show.mean(rows, column, "ttft_s") or 0) == pytest.approx(ttft_ms, abs=1e-3)
    assert show.mean(rows, column, "decode_tokens_per_s") == pytest.approx(decode, abs=1e-4)
    assert show.mean(rows, column, "tokens_per_s") == pytest.approx(overall, abs=1e-4)


def test_the_papers_memory_is_a_third() -> None:
    row = show.most(show.paper_rows(), "paper: OD-MoE")
    assert row is not None
    assert show.held(row["memory_bytes"]) == 60e9
    assert row["of_whole"] == pytest.approx(1 / 3)


def test_a_mean_of_other_cases_says_which() -> None:
    figures = {"ttft_s": 1.0, "decode_tokens_per_s": 2.0, "tokens_per_s": 3.0}
    ours = [
        {"part": "speed", "block": "emulated: x", "model": "deep-moe", "column": column, "input": i, "output": o}
        | figures
        for column in ("OD-MoE", "OD-MoE, in turn")
        for i, o in show.CASES
        if column == "OD-MoE" or o == 64
    ]
    line = next(line for line in show.tables(ours).splitlines() if "mean of 4 cases" in line and "decode" in line)
    _, _, _, whole, some, *papers = [text.strip() for text in line.split("|")]
    assert (whole, some) == ("2.00", "2.00 (16, 64; 128, 64)")
    assert papers[0] == "3.69"


def test_the_paper_stands_beside_the_same_cases() -> None:
    figures = {"ttft_s": 1.0, "decode_tokens_per_s": 2.0, "tokens_per_s": 3.0}
    ours = [
        {"part": "speed", "block": block, "model": "m", "column": "OD-MoE", "input": i, "output": 64} | figures
        for block in (show.AS_IT_IS, "emulated: x")
        for i in (16, 128)
    ]
    lines = show.of_docs(ours, "emulated").splitlines()
    assert lines[0] == "|  | in, out | OD-MoE | paper: OD-MoE | paper: Transformers |"
    assert "| overall, tokens/s | mean of 2 cases | 3.00 | 3.25 | 4.82 |" in lines
    assert "paper" not in show.of_docs(ours, "native")


@pytest.mark.slow
def test_a_small_run(run_script: Any) -> None:
    flags = ["--quick", "--parts", "quality", "--problems", "1", "--tokens", "4", "--text-tokens", "12"]
    rows = run_script(table2, *flags, name="table2-quick").facts["rows"]
    assert {row["column"]: (row["same_tokens"], row["tokens"]) for row in rows} == dict.fromkeys(
        ["OD-MoE", "load on demand", "fully cached", "Transformers", "accelerate"], (4, 4)
    )
    assert all(row["perplexity"] == pytest.approx(rows[3]["perplexity"], rel=1e-4) for row in rows)
    assert "10 of 10 cells were finished before" in run_script(table2, *flags, name="table2-quick").told
