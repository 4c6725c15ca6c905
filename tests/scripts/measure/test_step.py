"""Speed beside Transformers, and the parts of a traced step as a table."""

from __future__ import annotations

from scripts.measure.step import PARTS, PATH, speeds


def test_ratios_are_those_of_a_turn() -> None:
    """Medians of 2, 1 and 0.5; not the ratio of the medians, 40 / 20."""
    found = speeds([(40.0, 0.2), (10.0, 0.1), (50.0, 0.3)], [(20.0, 0.1), (10.0, 0.2), (100.0, 0.1)])
    assert (found["tokens_per_s"], found["eager_tokens_per_s"], found["ratio"]) == (40.0, 20.0, 1.0)
    assert (found["ttft_s"], found["eager_ttft_s"], found["ttft_ratio"]) == (0.2, 0.1, 2.0)


def test_every_part_of_a_step_is_a_line() -> None:
    row = {"ms": {part: number / 2 for number, part in enumerate(PARTS)}, "records": 183.4, "ratio": 0.5}
    texts = {column.name: column.text(row) for column in PATH}
    assert [texts[name] for name in PARTS.values()] == [f"{number / 2:.2f}" for number in range(len(PARTS))]
    assert texts["records of the trace a token"] == "183"
    assert texts["their share of a step"] == "-"
