"""Traces: what is written is what is read, clocks become one, and the file is one that Chrome's format allows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.errors import ConfigError
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import simulate
from scheduler.simulation.workload import random_workload
from scheduler.timing.profile import find_profile
from scheduler.trace import CAME, SENT, Span, Tracer, assemble, read_trace, write_trace

ROWS = st.sampled_from(["main", "shadow", "worker 0", "worker 11", "worker 2"])
WHAT = st.sampled_from(
    ["token", "layer", "wait", "stall", "load", "given up", "compute", "shadow", "transfer", "evict"]
)


@st.composite
def spans(draw: Any) -> Span:
    start = draw(st.floats(0, 1e4))
    label = draw(st.text("0123456789.", max_size=6))
    return Span(draw(ROWS), draw(WHAT), label, start, start + draw(st.floats(0, 10)))


@given(st.lists(spans(), min_size=1, max_size=30))
def test_what_is_written_is_what_is_read(made: list[Span]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(path, made, {"cluster": "embedded"})
        found, about = read_trace(path)
        assert [p.name for p in Path(folder).iterdir()] == ["trace.json"]
    assert about == {"cluster": "embedded"}
    origin = min(span.start for span in made)

    def key(span: Span, start: float) -> tuple[str, str, str, float, float]:
        return span.row, span.what, span.label, round(span.start - start, 5), round(span.end - start, 5)

    assert [k[:3] for k in sorted(key(s, 0) for s in found)] == [k[:3] for k in sorted(key(s, origin) for s in made)]
    for one, other in zip(sorted(key(s, 0) for s in found), sorted(key(s, origin) for s in made), strict=True):
        assert one[3:] == pytest.approx(other[3:], abs=1e-4)


def test_chromes_format(tmp_path: Path) -> None:
    """After its description: complete events with microseconds, asynchronous ones in pairs, a process a node."""
    scenario = Scenario(find_profile("rtx3090-1gbe"), tokens=3)
    outcome = simulate(scenario, random_workload(scenario, 0.9), spans=True)
    write_trace(tmp_path / "t.json", outcome.spans, {})
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "b", "e"}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)] == ["main", "shadow", *[f"worker {n}" for n in range(8)]]
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    assert sorted(e["id"] for e in events if e["ph"] == "b") == sorted(e["id"] for e in events if e["ph"] == "e")
    lines: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            lines.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for line in lines.values():  # on one line, one inside the other or apart: what the format demands
        line.sort(key=lambda one: (one[0], -one[1]))
        for (_, before), (after, end) in itertools.pairwise(line):
            assert after >= before - 1e-3 or end <= before + 1e-3


def test_clocks_and_transfers() -> None:
    records = {
        "main": [("layer", "0", 1.0, 2.0), (SENT, "c1", 2.0, 2.0), (CAME, "r1", 2.6, 2.6), (SENT, "lost", 3.0, 3.0)],
        "worker 1": [(CAME, "c1", 102.2, 102.2), ("compute", "0.4", 102.2, 102.5), (SENT, "r1", 102.5, 102.5)],
    }
    made = assemble(records, {"worker 1": -100.0})
    assert [(s.row, s.what, s.label) for s in made] == [
        ("main", "layer", "0"),
        ("worker 1", "transfer", "c1"),
        ("worker 1", "compute", "0.4"),
        ("worker 1", "transfer", "r1"),
    ]
    assert [s.start for s in made] == pytest.approx([1.0, 2.0, 2.2, 2.5])
    assert [s.end for s in made] == pytest.approx([2.0, 2.2, 2.5, 2.6])
    early = assemble(records, {"worker 1": -100.5})
    assert all(span.end >= span.start for span in early)


def test_a_tracer_forgets_the_oldest_and_tells_once() -> None:
    tracer = Tracer(limit=3)
    for n in range(5):
        tracer.add("load", str(n), n, n + 1)
    assert [label for _, label, _, _ in tracer.take()] == ["2", "3", "4"]
    assert tracer.take() == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": 3}', '{"traceEvents": [{"ph": "X"}]}'])
def test_what_is_no_trace(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=r"t\.json is no trace of odmoe"):
        read_trace(tmp_path / "t.json")
