"""A trace of a real run agrees with the report, and with what cannot be otherwise."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from main_node.engine.engine import Engine
from odmoe.clusters.embedded import EmbeddedCluster
from scheduler.timing.profile import find_profile
from scheduler.trace import Span, read_trace
from scheduler.types import Visit
from support.cases import slow_except
from support.machines.cli import CommandLine

COUNT = 6


def run(cluster: EmbeddedCluster, prompt: list[int]) -> tuple[Any, list[Span], int]:
    """An answer's report, what was traced, and how many experts its gates named in all."""
    named = 0
    compute = cluster.main.experts.compute

    def counted(visit: Any, hidden: Any, index: Any, weights: Any) -> Any:
        nonlocal named
        named += len(set(index.flatten().tolist()))
        return compute(visit, hidden, index, weights)

    cluster.main.experts.compute = counted  # type: ignore[method-assign]
    *_, last = cluster.generate(prompt, COUNT, ignore_eos=True)
    spans = cluster.trace()
    assert cluster.trace() == []
    return last.report, spans, named


@pytest.fixture
def shadow_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each pass the main node lets the shadow end its own, however busy the machine: then the shadow waits."""
    forget = Engine.forget

    def patient(self: Engine, visit: Visit) -> None:
        forget(self, visit)
        if self.peers.shadow is not None and visit.layer == self.core.shape.layers[-1] and visit.position:
            assert self.wait_for_predictions(visit.request, 60.0)
            time.sleep(0.05)  # for its last product

    monkeypatch.setattr(Engine, "forget", patient)


def length(spans: list[Span], what: str) -> float:
    return sum(span.end - span.start for span in spans if span.what == what)


SETTINGS: tuple[dict[str, Any], ...] = (
    {"shadow": "none"},
    {"shadow": "nf4"},
    {"shadow": "nf4", "departure": "late"},
    {"shadow": "nf4", "departure": "late", "slots": 2},
)


@pytest.mark.parametrize("settings", slow_except((SETTINGS[0], SETTINGS[3]), SETTINGS), ids=str)
@pytest.mark.usefixtures("shadow_waits")
def test_the_trace_is_what_happened(settings: dict[str, Any], embedded: Any, reference: Any) -> None:
    expected = reference("float32", 0, COUNT)
    cluster = embedded(mini_batch=4096, trace="memory", audit=0, **settings)  # what an audit does is no answer's
    report, spans, named = run(cluster, expected.prompt)
    assert report.token_ids == expected.tokens
    count = Counter(span.what for span in spans)
    assert count["token"] == COUNT
    assert count["layer"] == count["gate"] == count["wait"] == 8 * COUNT
    assert count["compute"] == named
    assert count["load"] <= report.loads <= count["load"] + count["given up"] + report.unused_loads
    assert sum(s.what == "transfer" and " to #" in s.label for s in spans) == named
    assert sum(s.what == "transfer" and s.label.startswith("from #") for s in spans) == named
    assert length(spans, "stall") == pytest.approx(report.stall_s + report.prefill_stall_s, rel=0.02, abs=0.02)
    shadow = settings["shadow"] != "none"
    assert (count["shadow"] >= 8 * (COUNT - 1)) is shadow
    assert (count["late"] > 0) is ("departure" in settings)
    for row in {span.row for span in spans if span.row.startswith("worker")}:
        for what in ("load", "compute"):  # one at a time
            mine = sorted((s for s in spans if (s.row, s.what) == (row, what)), key=lambda s: s.start)
            assert all(after.start >= before.end - 1e-4 for before, after in itertools.pairwise(mine))
    token = [span for span in spans if span.what == "token"]
    inside = [s for s in spans if s.row == "main" and s.what in ("layer", "gate", "wait", "head")]
    assert sum(s.end - s.start for s in inside) == pytest.approx(sum(s.end - s.start for s in token), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
def test_emulated_time_is_kept_and_said(
    slots: int, embedded: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every load and computation lasts as the profile has it, in the trace too, and tokens stay the same."""
    for module in ("scheduler.emulation.clock", "main_node.engine.pace"):
        monkeypatch.setattr(f"{module}.CREDIT_S", 3600.0)  # a busy machine is made up for in full
    expected = reference("float32", 0, COUNT)
    profile = find_profile("rtx3090-1gbe")
    cluster = embedded(mini_batch=4096, trace="memory", shadow="nf4", profile="rtx3090-1gbe", slots=slots)
    report, spans, _ = run(cluster, expected.prompt)
    assert report.token_ids == expected.tokens
    assert report.emulated == "rtx3090-1gbe"
    decode = [span for span in spans if span.what == "token"][1].start
    for span in spans:
        if span.what == "load":
            assert span.end - span.start >= profile.load_s - 1e-6
        if span.what == "compute" and span.start > decode:
            assert span.end - span.start == pytest.approx(profile.expert_s, abs=1e-6)
        if span.what == "layer" and span.start > decode:
            assert span.end - span.start >= profile.main_layer_s - 1e-6
    for row in {span.row for span in spans if span.row.startswith("worker")}:
        # its link and its processor do one thing at a time; with one slot, one of the two at a time
        lanes = [("load", "given up", "compute")] if slots == 1 else [("load", "given up"), ("compute",)]
        for lane in lanes:
            mine = sorted((s for s in spans if s.row == row and s.what in lane), key=lambda s: (s.start, s.end))
            assert all(after.start >= before.end - 1e-6 for before, after in itertools.pairwise(mine))
    for span in spans:  # a computation's expert was there by then
        if span.what == "compute":
            loads = [s.end for s in spans if (s.row, s.what, s.label) == (span.row, "load", span.label)]
            assert any(end <= span.start + 1e-6 for end in loads)


@pytest.mark.slow
@pytest.mark.usefixtures("shadow_waits")
def test_from_the_command_line_to_a_file(demo: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    cli = CommandLine()
    flags = ("-q", "-m", str(demo), "-n", "6", "--shadow", "fp16", "--departure", "late", "--threads", "1")
    flags += ("--trace", str(trace))
    assert cli("generate", *flags, "HAMLET").code == 0
    spans, about = read_trace(trace)
    assert sum(span.what == "token" for span in spans) == 6
    assert (about["cluster"], about["shadow"], about["emulated"]) == ("embedded", "fp16", None)
