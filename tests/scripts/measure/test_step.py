"""Speed beside Transformers, and the parts of a traced step as a table."""

from __future__ import annotations

import pytest

from scheduler.trace import Span
from scripts.measure.step import PARTS, PATH, paths, speeds


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


@pytest.mark.parametrize("loaded", [None, 0.5, 4.0, 7.0])
def test_a_layers_path_with_an_expert_that_was_resident_before(loaded: float | None) -> None:
    """Its load is in no trace: nothing waits for it. `loaded`: when a load of this trace ended; at 7 that of a later
    stay, which began after the computation."""
    spans = [
        Span("main", "token", "0", 0.0, 1.0),
        Span("main", "token", "1", 1.0, 9.0),
        Span("main", "gate", "0", 1.5, 2.0),
        Span("worker 0", "transfer", "0.3 to #7", 2.0, 3.0),
        Span("worker 0", "compute", "0.3", 5.0, 6.0),
        Span("worker 0", "transfer", "from #7", 6.0, 7.0),
        Span("main", "wait", "0", 2.0, 8.0),
    ]
    if loaded is not None:
        spans.append(Span("worker 0", "load", "0.3", 6.5 if loaded == 7.0 else 0.25, loaded))
    [found] = paths(spans)
    waits = 1.0 if loaded == 4.0 else 0.0
    expected = {"decide": 0.5, "out": 1.0, "load": waits, "hand": 2.0 - waits, "compute": 1.0, "back": 1.0, "wake": 1.0}
    assert {part: found[part] for part in expected} == expected
